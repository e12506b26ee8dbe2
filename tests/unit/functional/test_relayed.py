"""`tree_log_probs` of a forest that exceeds the capacity: scores, gradients, memory, and what autograd may ask for.

Models compute in float64. The references are the flat sequences, and one pack without a capacity.
"""

import copy
import re
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from process_groups import group_of_one
from tiny_models import tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from tree_cases import DEEP, flat_scores, gradients, layout_of, random_sequences, relative_error

from verl_tree.functional import tree_log_probs

TOLERANCE = 1e-10
NUM_DEEP = 21  # tree tokens of DEEP
CHAIN = np.random.default_rng(0).integers(0, 61, 72).tolist()


def coupled_loss(log_probs, entropies):
    """Multiply sums over all tokens, so that the gradient of each depends on all others."""
    generator = torch.Generator().manual_seed(0)
    log_prob, entropy = torch.cat(log_probs), torch.cat(entropies)
    coefficient, weight = torch.randn(2, len(log_prob), dtype=torch.float64, generator=generator)
    return (coefficient * log_prob).logsumexp(0) * (1 + (weight * entropy).mean()) + (log_prob.exp() * entropy).sum()


def flat(model, sequences):
    scores = [flat_scores(model, sequence) for sequence in sequences]
    return [log_probs for log_probs, _ in scores], [entropy for _, entropy in scores]


def tree(model, sequences, **options):
    out = tree_log_probs(model, sequences, calculate_entropy=True, **options)
    assert out.num_tree_tokens == layout_of(sequences).num_tokens
    return out.log_probs, out.entropy


def assert_scores_equal(got, want):
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)


def assert_gradients_equal(got, want):
    assert got.keys() == want.keys()
    assert want
    for name, gradient in want.items():
        assert relative_error(got[name], gradient) < TOLERANCE, name


def assert_equal(model, got, want):
    assert_scores_equal(got, want)
    assert_gradients_equal(gradients(model, coupled_loss(*got)), gradients(model, coupled_loss(*want)))
    assert model.config._attn_implementation == "sdpa"


@contextmanager
def recorded_lens(model) -> Iterator[list[int]]:
    """Yield the tokens of every forward pass of the decoder."""
    lens = []
    handle = model.get_decoder().register_forward_pre_hook(
        lambda _module, _args, kwargs: lens.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    yield lens
    handle.remove()


def test_every_capacity_gives_the_flat_scores_and_gradients():
    model = tiny_model()
    want = flat(model, DEEP)
    wanted = gradients(model, coupled_loss(*want))
    for capacity in range(1, NUM_DEEP + 1):
        with recorded_lens(model) as lens:
            got = tree(model, DEEP, capacity=capacity)
            num_forward = len(lens)
            found = gradients(model, coupled_loss(*got))
        assert_scores_equal(got, want)
        assert_gradients_equal(found, wanted)
        # One pack, or each section once without and once with gradient.
        first, again = lens[:num_forward], lens[num_forward:]
        assert again == ([] if capacity == NUM_DEEP else first[::-1])
        assert sum(first) == NUM_DEEP
        assert max(first) <= capacity


@pytest.mark.parametrize("seed", range(6))
def test_drawn_forests_equal_one_pack_and_the_flat_path(seed):
    rng = np.random.default_rng(seed)
    sequences = random_sequences(rng, num_sequences=12, mean_len=5)
    model = tiny_model(["qwen3", "llama", "qwen2"][seed % 3], seed=seed)
    for capacity in rng.integers(2, layout_of(sequences).num_tokens, 3).tolist():
        got = tree(model, sequences, capacity=capacity)
        assert_equal(model, got, tree(model, sequences))
        assert_equal(model, tree(model, sequences, capacity=capacity), flat(model, sequences))


def test_a_chain_of_nine_times_the_capacity():
    model = tiny_model()
    assert_equal(model, tree(model, [CHAIN], capacity=8), flat(model, [CHAIN]))


def test_tied_embeddings():
    model = tiny_model(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_equal(model, tree(model, DEEP, capacity=7), flat(model, DEEP))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(use_reentrant):
    """torch.autograd.grad does not run through reentrant checkpoints, so the sections get the other kind."""
    model = tiny_model().train()
    want = gradients(model, coupled_loss(*flat(model, DEEP)))
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    checkpoint = model.model.layers[0]._gradient_checkpointing_func
    with recorded_lens(model) as lens:
        loss = coupled_loss(*tree(model, DEEP, capacity=7))
        loss.backward()
    assert len(lens) % 2 == 0
    assert_gradients_equal({name: parameter.grad for name, parameter in model.named_parameters()}, want)
    assert model.model.layers[0]._gradient_checkpointing_func is checkpoint
    assert model.config._attn_implementation == "sdpa"


def test_lora_trains_its_adapters_only():
    lora = LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(tiny_model(), lora).double()
    assert_equal(model, tree(model, DEEP, capacity=7), flat(model, DEEP))
    coupled_loss(*tree(model, DEEP, capacity=7)).backward()
    have = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert len(have) == 8
    assert all("lora_" in name for name in have)


def test_calls_before_the_first_backward_keep_their_stores():
    model = tiny_model()
    halves = DEEP[:4], DEEP[4:]
    want = gradients(model, sum(coupled_loss(*flat(model, half)) for half in halves))
    first, second = (coupled_loss(*tree(model, half, capacity=5)) for half in halves)
    first.backward()
    second.backward()
    assert_gradients_equal({name: parameter.grad for name, parameter in model.named_parameters()}, want)
    # In one graph, too.
    assert_gradients_equal(gradients(model, sum(coupled_loss(*tree(model, half, capacity=5)) for half in halves)), want)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_each_token_is_computed_once(mode):
    model = tiny_model()
    want = flat(model, DEEP)
    with mode(), recorded_lens(model) as lens:
        got = tree(model, DEEP, capacity=4)
    assert sum(lens) == NUM_DEEP
    assert_scores_equal(got, want)
    assert not any(each.requires_grad for kind in got for each in kind)


def test_autograd_grad_of_some_parameters_touches_no_grad():
    model = tiny_model()
    some = [model.model.layers[0].self_attn.k_proj.weight, model.model.embed_tokens.weight]
    want = torch.autograd.grad(coupled_loss(*flat(model, DEEP)), some)
    got = torch.autograd.grad(coupled_loss(*tree(model, DEEP, capacity=7)), some)
    for got_one, want_one in zip(got, want, strict=True):
        assert relative_error(got_one, want_one) < TOLERANCE
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_without_trained_parameters_gives_scores_without_gradient():
    model = tiny_model().requires_grad_(requires_grad=False)
    got = tree(model, DEEP, capacity=7)
    assert_scores_equal(got, flat(model, DEEP))
    assert not got[0][0].requires_grad


def test_backward_runs_again_with_retain_graph_only():
    model = tiny_model()
    loss = coupled_loss(*tree(model, DEEP, capacity=7))
    parameters = list(model.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    second = torch.autograd.grad(loss, parameters)
    for got, want in zip(second, first, strict=True):
        assert torch.equal(got, want)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, parameters)


def test_a_second_derivative_is_refused():
    model = tiny_model()
    weight = model.lm_head.weight
    (gradient,) = torch.autograd.grad(coupled_loss(*tree(model, DEEP, capacity=7)), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_dropout_is_refused_where_tokens_run_twice():
    model = tiny_model().train()
    model.model.layers[0].mlp.add_module("drop", torch.nn.Dropout(0.5))
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.drop drops out 0\.5 .* packing=\"auto\" in tree_log_probs"):
        tree_log_probs(model, DEEP, capacity=7)
    tree_log_probs(model, DEEP)
    tree_log_probs(model, DEEP, capacity=12, packing="auto")
    with torch.no_grad():
        tree_log_probs(model, DEEP, capacity=7)
    out = tree_log_probs(model.eval(), DEEP, capacity=7)
    model.train()
    with pytest.raises(ValueError, match="drops out"):
        torch.cat(out.log_probs).sum().backward()
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.0.mlp.down_proj.weight", "model.rotary_emb.inv_freq"]
)
@pytest.mark.parametrize("replaces", [False, True], ids=["in place", "replaced"])
def test_what_changed_before_the_backward_pass_is_refused(name: str, replaces: bool) -> None:
    """A trained weight, a frozen one, as under adapters, and a buffer."""
    model = tiny_model()
    model.model.layers[0].mlp.down_proj.weight.requires_grad_(False)
    loss = torch.cat(tree_log_probs(model, DEEP, capacity=7).log_probs).sum()
    owner, _, attribute = name.rpartition(".")
    tensor = getattr(model.get_submodule(owner), attribute)
    if replaces:
        setattr(model.get_submodule(owner), attribute, copy.deepcopy(tensor))
    else:
        with torch.no_grad():
            tensor.mul_(2)
    with pytest.raises(ValueError, match=rf"{re.escape(name)} has changed since tree_log_probs"):
        loss.backward()


def test_sharded_parameters_are_refused():
    model = tiny_model()
    with group_of_one():
        weight = DTensor.from_local(model.lm_head.weight.data, init_device_mesh("cpu", (1,)), [Replicate()])
        model.lm_head.weight = torch.nn.Parameter(weight)
        with pytest.raises(ValueError, match=r"lm_head\.weight is sharded"):
            tree_log_probs(model, DEEP, capacity=7)


def test_hooks_that_run_after_accumulation_see_one_gradient():
    """Optimisers that step in the backward pass hang on these."""
    model = tiny_model()
    calls = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(calls.append)
    coupled_loss(*tree(model, DEEP, capacity=7)).backward()
    assert len(calls) == len(set(map(id, calls))) == len(list(model.parameters()))


def test_hooks_on_a_parameter_see_the_parts_and_then_their_sum():
    model = tiny_model()
    seen = []
    model.lm_head.weight.register_hook(seen.append)
    with recorded_lens(model) as lens:
        loss = coupled_loss(*tree(model, DEEP, capacity=7))
    loss.backward()
    *parts, total = seen
    assert len(parts) == len(lens) > 2
    torch.testing.assert_close(sum(parts), total, rtol=TOLERANCE, atol=TOLERANCE)


def test_autocast_of_the_call_holds_in_the_backward_pass():
    model = tiny_model().float()

    def found(*, inside, **options):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = coupled_loss(*tree(model, DEEP, **options))
            if inside:
                return gradients(model, loss)
        return gradients(model, loss)

    want, got = found(inside=False), found(inside=False, capacity=7)
    exact = gradients(model, coupled_loss(*tree(model, DEEP)))
    total = {
        kind: sum((each[name] - exact[name]).square().sum().item() for name in exact) ** 0.5
        for kind, each in (("pack", want), ("sections", got))
    }
    assert 0 < total["sections"] < 1.5 * total["pack"]
    within = found(inside=True, capacity=7)
    assert all(torch.equal(within[name], got[name]) for name in got)


def test_weights_cast_without_gradient_do_not_serve_what_follows_in_the_same_autocast():
    """Guards against a torch whose cache of casts does not know whether gradients are on."""
    model = tiny_model().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tree_log_probs(model, DEEP, capacity=7)
        found = gradients(model, flat_scores(model, DEEP[0])[0].sum())
    assert "model.layers.0.mlp.up_proj.weight" in found


class Held:
    """What autograd saved, as `SavedBytes` packs it."""

    def __init__(self, tensor):
        self.tensor = tensor


class SavedBytes:
    """Bytes that graphs hold beside the parameters: now, and the most at a time."""

    def __init__(self, model):
        self.parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.num_uses = Counter()  # of each storage
        self.now = self.peak = 0

    def hold(self, tensor):
        storage = tensor.untyped_storage()
        key, num_bytes = storage.data_ptr(), storage.nbytes()
        held = Held(tensor.detach())
        if key not in self.parameters:
            self.now += num_bytes if self.num_uses[key] == 0 else 0
            self.num_uses[key] += 1
            self.peak = max(self.peak, self.now)
            weakref.finalize(held, self.release, key, num_bytes)
        return held

    def release(self, key, num_bytes):
        self.num_uses[key] -= 1
        self.now -= num_bytes if self.num_uses[key] == 0 else 0


def peak_bytes(model, sequences, **options):
    """Measure the most that graphs hold at a time, keys and values of the spine included."""
    saved = SavedBytes(model)
    with torch.autograd.graph.saved_tensors_hooks(saved.hold, lambda held: held.tensor):
        loss = coupled_loss(*tree(model, sequences, **options))
        assert saved.now > 0
        loss.backward()
    assert saved.now == 0, "the backward pass frees everything, also while its result is held"
    return saved.peak


def star(num_branches):
    """Make a prompt of 16 tokens with branches of 8."""
    return [[*range(16), *[20 + branch] * 8] for branch in range(num_branches)]


def test_graphs_hold_one_section_however_large_the_forest():
    model = tiny_model()
    one_section = peak_bytes(model, star(2))  # 32 tokens
    small, large = (peak_bytes(model, star(num_branches), capacity=32) for num_branches in (10, 40))
    assert small == large < 1.1 * one_section
    assert peak_bytes(model, star(40)) > 10 * large


def test_a_longer_chain_adds_the_keys_and_values_of_its_context():
    model = tiny_model()
    small, large = (peak_bytes(model, [CHAIN[:length]], capacity=8) for length in (24, 72))
    # 2 layers, keys and values, 2 heads of 8 numbers of 8 bytes; in the store, and gathered for the last section.
    assert large - small == 2 * (72 - 24) * 2 * 2 * 2 * 8 * 8
    assert peak_bytes(model, [CHAIN]) > 5 * large
