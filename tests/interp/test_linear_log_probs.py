"""The fused log-prob kernels in the interpreter: scores and gradients against logits in memory.

Memory is poisoned (see conftest.py) and every case runs twice: each element is written, and by a fixed order of sums.
"""

import dataclasses
import sys
from functools import partial

import check_log_probs
import numpy as np
import pytest
import torch
import triton
import triton.language as tl  # noqa: F401  (the interpreter looks for it among a kernel's globals)
from harness import read_records
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
)
from tree_cases import DEEP, VOCAB_SIZE, gradients, layout_of, relative_error, tiny_model

from verl_tree.attention import AttentionPlan
from verl_tree.attention.hf import ATTENTION_NAME, register
from verl_tree.functional import linear_choice, linear_log_probs_kernels
from verl_tree.functional.linear_arguments import LabelledPairs, LinearConfig, LinearSizes, LogitTransform
from verl_tree.functional.linear_log_probs import linear_log_probs, plain_log_probs
from verl_tree.functional.logprobs import tree_forward_log_probs

NUM_CASES = 36
TOLERANCE = 5e-6


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    inputs: tuple[torch.Tensor, ...]  # hidden states, weight and maybe bias, float32
    pairs: LabelledPairs
    grad_CK: torch.Tensor
    sizes: LinearSizes


def draw_case(seed):
    """Draw sizes that no tile divides, several spans, parts of the gradient, and pairs."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    num_positions, num_words = int(rng.choice([1, 5, 40, 70])), int(rng.choice([3, 50, 130, 200]))
    hidden_size = int(rng.choice([8, 24, 72]))
    labels_of_position = rng.choice([1, 2, 20], p=[0.8, 0.15, 0.05], size=num_positions)
    position_K = torch.from_numpy(np.repeat(np.arange(num_positions), labels_of_position))
    has_entropy = bool(rng.integers(4))
    temperature = [1.0, 0.7, 0.5 + torch.rand(num_positions, generator=generator)][rng.integers(3)]
    bias = [torch.randn(num_words, generator=generator)] if rng.integers(2) else []
    weight_VX = torch.randn(num_words, hidden_size, generator=generator) * 2 * hidden_size**-0.5
    config = LinearConfig(int(rng.choice([16, 32])), int(rng.choice([16, 64])), int(rng.choice([16, 64])), 4, 1)
    return Case(
        inputs=(torch.randn(num_positions, hidden_size, generator=generator), weight_VX, *bias),
        pairs=LabelledPairs(
            position_K,
            torch.randint(num_words, position_K.shape, generator=generator),
            temperature,
            [LogitTransform(), LogitTransform(0.6), LogitTransform(1.3, 4.0)][rng.integers(3)],
            calculate_entropy=has_entropy,
            entropy_requires_grad=bool(rng.integers(4)),
        ),
        grad_CK=torch.randn(1 + has_entropy, len(position_K), generator=generator),
        sizes=LinearSizes(
            config,
            span=config.word_block * int(rng.integers(1, 5)),
            gradient_positions=int(rng.choice([16, 48, 1000])),
            gradient_bytes=int(rng.choice([8000, 10**6])),
        ),
    )


def run(score, case, *, dtype=torch.float32, wanted=(True, True, True)):
    """Return the scores and the gradients of the wanted inputs."""
    leaves = [each.to(dtype).requires_grad_(is_wanted) for each, is_wanted in zip(case.inputs, wanted, strict=False)]
    pairs = case.pairs
    if dtype == torch.float64 and isinstance(pairs.temperature_P, torch.Tensor):
        pairs = dataclasses.replace(pairs, temperature_P=pairs.temperature_P.double())
    scores_CK = score(*leaves[:2], leaves[2] if leaves[2:] else None, pairs)
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    return scores_CK.detach(), *torch.autograd.grad(scores_CK, trained, case.grad_CK.to(scores_CK.dtype))


def run_fused(case, **kwargs):
    """Do what `run` does through the kernels, with the case's own sizes of tiles, spans and parts."""
    return run(partial(linear_log_probs, sizes=case.sizes), case, **kwargs)


def worst_error(got, want):
    assert all(torch.isfinite(one).all() for one in got)
    # A gradient that is zero, such as that of the only word of a softmax, leaves the differences of rounding.
    return max(((a.double() - b).norm() / max(b.norm(), 1e-2)).item() for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("seed", range(NUM_CASES))
def test_scores_and_gradients_equal_logits_in_memory_in_float64(seed):
    case = draw_case(seed)
    got, again = run_fused(case), run_fused(case)
    assert worst_error(got, run(plain_log_probs, case, dtype=torch.float64)) < TOLERANCE
    for one, other in zip(got, again, strict=True):
        assert torch.equal(one, other)


def test_the_cases_reach_what_may_go_wrong():
    """Guards the fuzz test."""
    cases = [draw_case(seed) for seed in range(NUM_CASES)]
    counts = {
        "spans": sum(len(case.inputs[1]) > case.sizes.span for case in cases),
        "cut spans": sum(len(case.inputs[1]) % case.sizes.span > 0 for case in cases),
        "cut words": sum(len(case.inputs[1]) % case.sizes.config.word_block > 0 for case in cases),
        "cut hidden": sum(case.inputs[0].shape[1] % case.sizes.config.hidden_block > 0 for case in cases),
        "blocks": sum(len(case.inputs[0]) > case.sizes.gradient_positions for case in cases),
        "parts": sum(
            min(len(case.inputs[0]), case.sizes.gradient_positions) * len(case.inputs[1]) * 4
            > case.sizes.gradient_bytes
            for case in cases
        ),
        "one position": sum(len(case.inputs[0]) == 1 for case in cases),
        "several labels": sum(len(case.pairs.label_K) > len(case.inputs[0]) for case in cases),
        "temperatures": sum(isinstance(case.pairs.temperature_P, torch.Tensor) for case in cases),
        "caps": sum(case.pairs.transform.softcap is not None for case in cases),
        "bias": sum(len(case.inputs) == 3 for case in cases),
        "no entropy": sum(not case.pairs.calculate_entropy for case in cases),
        "entropy without gradient": sum(
            case.pairs.calculate_entropy and not case.pairs.entropy_requires_grad for case in cases
        ),
    }
    assert min(counts.values()) > 3, counts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(6))
def test_16_bit_errors_are_those_of_rounding(dtype, seed):
    """Against float64 on the same rounded inputs: scores as good as float32, gradients as with logits in memory."""
    case = draw_case(100 + seed)
    case = dataclasses.replace(case, inputs=tuple(each.to(dtype) for each in case.inputs))
    want, plain = run(plain_log_probs, case, dtype=torch.float64), run(plain_log_probs, case, dtype=dtype)
    got = run_fused(case, dtype=dtype)
    assert (got[0] - want[0]).abs().max() < 1e-5
    for got_one, plain_one, want_one in zip(got[1:], plain[1:], want[1:], strict=True):
        assert got_one.dtype == dtype
        if want_one.norm() > 1e-3:
            assert relative_error(got_one.double(), want_one) <= 1.5 * relative_error(plain_one.double(), want_one)


def test_confident_positions_keep_their_small_gradients():
    """The gradient of a label's logit is `1 - p`. From a rounded `p` of .999 it would be zero in bfloat16."""
    hidden_PX, weight_VX = torch.eye(16)[:8], torch.zeros(40, 16)
    weight_VX[torch.arange(8), torch.arange(8)] = 11.0
    case = dataclasses.replace(
        draw_case(0),
        inputs=(hidden_PX.bfloat16(), weight_VX.bfloat16()),
        pairs=LabelledPairs(torch.arange(8), torch.arange(8)),
        grad_CK=torch.ones(1, 8),
    )
    _, got, _ = run_fused(case, dtype=torch.bfloat16)
    _, want, _ = run(plain_log_probs, case, dtype=torch.float64)
    # exp(11) against 39 words of exp(0): 1 - p = 39 / (exp(11) + 39).
    torch.testing.assert_close(want[0, 0], torch.tensor(11 * 39 / (np.exp(11) + 39)).double())
    assert relative_error(got.double(), want) < 0.01


@pytest.mark.parametrize("labels", [[], [7], [7, 7, 7], list(range(30)) * 5])
def test_any_number_of_labels_at_a_position(labels):
    """None, one, the same one several times, and more than a block of pairs."""
    case = draw_case(3)
    num_positions = 1 if labels else 0
    bias = case.inputs[2:]
    num_words = 31
    inputs = (case.inputs[0][:1].repeat(num_positions, 1), torch.randn(num_words, case.inputs[0].shape[1]), *bias)
    case = dataclasses.replace(
        case,
        inputs=inputs[:2],
        pairs=LabelledPairs(
            torch.zeros(len(labels), dtype=torch.int64), torch.tensor(labels, dtype=torch.int64), calculate_entropy=True
        ),
        grad_CK=torch.randn(2, len(labels), generator=torch.Generator().manual_seed(0)),
    )
    got, want = run_fused(case), run(plain_log_probs, case, dtype=torch.float64)
    assert got[0].shape == (2, len(labels))
    assert worst_error(got, want) < TOLERANCE


def test_the_scores_of_a_position_do_not_depend_on_the_others():
    case = next(case for case in map(draw_case, range(99)) if len(case.inputs[0]) == 70 and len(case.inputs[1]) == 200)
    whole = run_fused(case)[0]
    for kept in (1, 33):
        pairs = case.pairs
        is_kept_K = pairs.position_K < kept
        temperature = pairs.temperature_P
        part = dataclasses.replace(
            case,
            inputs=(case.inputs[0][:kept], *case.inputs[1:]),
            pairs=dataclasses.replace(
                pairs,
                position_K=pairs.position_K[is_kept_K],
                label_K=pairs.label_K[is_kept_K],
                temperature_P=temperature[:kept] if isinstance(temperature, torch.Tensor) else temperature,
            ),
            grad_CK=case.grad_CK[:, is_kept_K],
        )
        assert torch.equal(run_fused(part)[0], whole[:, is_kept_K])


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, True, True)])
def test_only_the_wanted_gradients_are_made(wanted):
    case = next(case for case in map(draw_case, range(99)) if len(case.inputs) == 3 and len(case.inputs[0]) == 40)
    got, want = run_fused(case, wanted=wanted), run(plain_log_probs, case, dtype=torch.float64, wanted=wanted)
    assert worst_error(got, want) < TOLERANCE


def small_self_test(variant):
    return linear_choice.self_test(
        variant, sizes=LinearSizes(LinearConfig(64, 128, 64, 4, 1), span=256), num_words=256 + 100
    )


@pytest.mark.parametrize("options", [{}, {"has_bias": True, "is_capped": True, "has_entropy": True}])
def test_the_self_test_passes(options):
    options = {"has_bias": False, "is_capped": False, "has_entropy": False} | options
    variant = linear_choice.LinearVariant(torch.device("cpu"), torch.bfloat16, **options)
    assert small_self_test(variant) == []


@triton.jit
def _wrong_slope(tanh, inverse_temperature, scale, softcap):  # noqa: ARG001
    return scale * inverse_temperature


@triton.jit
def _wrong_logits(raw, inverse_temperature, scale, softcap):  # noqa: ARG001
    return raw * inverse_temperature, raw


@pytest.mark.parametrize(("name", "wrong"), [("_slope", _wrong_slope), ("_transformed", _wrong_logits)])
def test_the_self_test_finds_a_wrong_kernel(name, wrong, monkeypatch):
    monkeypatch.setattr(linear_log_probs_kernels, name, wrong)
    variant = linear_choice.LinearVariant(
        torch.device("cpu"), torch.bfloat16, has_bias=False, is_capped=True, has_entropy=True
    )
    reasons = small_self_test(variant)
    assert reasons
    assert ("score" in reasons[0]) == (name == "_transformed")


def test_the_check_of_a_first_gpu_passes_in_the_interpreter(tmp_path, monkeypatch):
    """`benchmarks/check_log_probs.py`, which without the interpreter's variable refuses on a CPU."""
    out = tmp_path / "log_probs.jsonl"
    monkeypatch.setattr(sys, "argv", ["check", "--device", "cpu", "--small", "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        check_log_probs.main()
    assert ended.value.code == 0
    _, record, _ = read_records(out)
    assert record["passed"]
    assert record["repeats"]
    assert set(record["errors"]) == {"scores", "hidden states", "weight"}


@pytest.fixture
def fused_and_chunked(monkeypatch):
    """Compare a model's scores and gradients on the two paths. Without the interpreter's variable it is chunked."""
    calls = []

    def counted(*args):
        calls.append(args)
        return linear_log_probs(*args)

    monkeypatch.setattr(linear_choice, "linear_log_probs", counted)

    def compare(model, *, temperature=1.0):
        layout = layout_of(DEEP)
        model.set_attn_implementation(ATTENTION_NAME)
        if temperature == "by position":
            temperature = torch.linspace(0.5, 1.5, layout.num_tokens)

        def scores():
            plan = AttentionPlan.from_layout(layout, backend="dense")
            options = {"temperature": temperature, "calculate_entropy": True, "chunk_size": 5}
            out = tree_forward_log_probs(model, layout, plan=plan, **options)
            both_CT = torch.stack((out.log_probs_T, out.entropy_T))
            loss = (both_CT * torch.randn(both_CT.shape, generator=torch.Generator().manual_seed(0))).sum()
            return both_CT.detach(), gradients(model, loss)

        got_CT, got = scores()
        assert len(calls) == 1
        with monkeypatch.context() as patch:
            patch.delenv("TRITON_INTERPRET")
            want_CT, want = scores()
        assert len(calls) == 1
        assert relative_error(got_CT, want_CT) < 1e-6
        for name, want_one in want.items():
            assert relative_error(got[name], want_one) < 1e-5, name

    return compare


@pytest.mark.parametrize("temperature", [1.0, 0.7, "by position"])
def test_a_model_scores_as_on_the_chunked_path(temperature, fused_and_chunked):
    fused_and_chunked(tiny_model("qwen3").float(), temperature=temperature)


@pytest.mark.parametrize(
    ("config_class", "model_class", "settings"),
    [
        (Gemma2Config, Gemma2ForCausalLM, {"final_logit_softcapping": 0.5, "attn_logit_softcapping": None}),
        (CohereConfig, CohereForCausalLM, {"logit_scale": 0.1}),
        (Cohere2Config, Cohere2ForCausalLM, {"logit_scale": 0.1}),
        (GraniteConfig, GraniteForCausalLM, {"logits_scaling": 3.0}),
        (GraniteMoeConfig, GraniteMoeForCausalLM, {"logits_scaling": 3.0}),
    ],
)
def test_a_model_that_changes_its_logits_scores_as_on_the_plain_path(
    config_class, model_class, settings, fused_and_chunked
):
    register()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": VOCAB_SIZE, "pad_token_id": 0}
    if model_class is Gemma2ForCausalLM:
        sizes["head_dim"] = 8
    fused_and_chunked(model_class(config_class(**sizes, **settings)).eval())
