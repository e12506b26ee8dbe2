"""The fa4 backend without a GPU: what it refuses, that its self-test can fail, and that its kernels compile."""

import importlib.metadata
import itertools
import json
import os
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from verl_tree.attention import fa4, self_test
from verl_tree.attention.dense import dense_attention
from verl_tree.attention.options import ScoreOptions
from verl_tree.attention.varlen import varlen_attention
from verl_tree.tree import kernel_test
from verl_tree.tree.plan import AttentionPlan

PLAN = AttentionPlan.from_subtree_end(torch.tensor(self_test.subtree_ends(self_test.TREES), dtype=torch.int32))
VARIANT = self_test.KernelVariant(torch.device("cpu"), torch.bfloat16, 64, 4, 2)
NARROW_VARIANT = self_test.KernelVariant(torch.device("cpu"), torch.float32, 16, 1, 1)
HOPPER, AMPERE = (9, 0), (8, 0)
PLAIN = ScoreOptions(scale=1.0)


@pytest.fixture(autouse=True)
def no_self_test_has_run(monkeypatch):
    monkeypatch.setattr(kernel_test, "_results", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # a torch without CUDA raises


@pytest.fixture
def on_gpu(monkeypatch):
    """Refusals of inputs that say they are on a GPU of some compute capability, everything else being in order."""

    def refusals(
        *,
        capability=HOPPER,
        dtype=torch.bfloat16,
        head_dim=128,
        value_head_dim=None,
        num_tokens=700,
        num_context=0,
        options=PLAIN,
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(fa4, "installation_reasons", lambda: ())
        monkeypatch.setattr(fa4, "self_test_reasons", lambda *_: [])
        ends_T = torch.full((num_tokens,), num_tokens, dtype=torch.int32)
        plan = AttentionPlan.from_subtree_end(ends_T, num_context=num_context)
        shapes = [
            (plan.num_queries, 8, head_dim),
            (num_tokens, 2, head_dim),
            (num_tokens, 2, value_head_dim or head_dim),
        ]
        with FakeTensorMode():
            q, k, v = (torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes)
        return fa4.not_supported_reasons(q, k, v, plan, options=options)

    return refusals


def rounded_attention(q_QHD, k_THD, v_THD, plan, *, options, visible_TT=None, visible_in_backward_TT=None):
    """Attention as a flash kernel rounds it: probabilities and score gradients in the dtype of the inputs."""
    forward_TT = tree_mask() if visible_TT is None else visible_TT
    backward_TT = forward_TT if visible_in_backward_TT is None else visible_in_backward_TT
    masks = (mask_TT[plan.num_context :] for mask_TT in (forward_TT, backward_TT))
    return _Rounded.apply(q_QHD, k_THD, v_THD, *masks, options.scale)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_QHD, k_THD, v_THD, forward_QT, backward_QT, scale):
        num_groups = q_QHD.shape[1] // k_THD.shape[1]
        q_HQD = q_QHD.float().transpose(0, 1)
        k_HTD, v_HTD = (each.float().repeat_interleave(num_groups, 1).transpose(0, 1) for each in (k_THD, v_THD))
        scores_HQT = (q_HQD @ k_HTD.mT * scale).masked_fill(~forward_QT, -torch.inf)
        probs_HQT = (scores_HQT - scores_HQT.amax(-1, keepdim=True)).exp()
        out_HQD = (probs_HQT.to(q_QHD.dtype).float() @ v_HTD) / probs_HQT.sum(-1, keepdim=True)
        out_HQD = out_HQD.to(q_QHD.dtype)
        ctx.save_for_backward(q_HQD, k_HTD, v_HTD, out_HQD, scores_HQT.logsumexp(-1, keepdim=True), backward_QT)
        ctx.dtype, ctx.scale, ctx.num_groups = q_QHD.dtype, scale, num_groups
        return out_HQD.transpose(0, 1)

    @staticmethod
    def backward(ctx, grad_out_QHD):
        q_HQD, k_HTD, v_HTD, out_HQD, lse_HQ1, backward_QT = ctx.saved_tensors
        grad_out_HQD = grad_out_QHD.float().transpose(0, 1)
        scores_HQT = (q_HQD @ k_HTD.mT * ctx.scale).masked_fill(~backward_QT, -torch.inf)
        probs_HQT = (scores_HQT - lse_HQ1).exp()
        delta_HQ1 = (grad_out_HQD * out_HQD.float()).sum(-1, keepdim=True)
        grad_scores_HQT = (probs_HQT * (grad_out_HQD @ v_HTD.mT - delta_HQ1)).to(ctx.dtype).float()
        dq_HQD = ctx.scale * grad_scores_HQT @ k_HTD
        dk_HTD = ctx.scale * grad_scores_HQT.mT @ q_HQD
        dv_HTD = probs_HQT.to(ctx.dtype).float().mT @ grad_out_HQD
        dk_HTD, dv_HTD = (each.unflatten(0, (-1, ctx.num_groups)).sum(1) for each in (dk_HTD, dv_HTD))
        return *(each.transpose(0, 1).to(ctx.dtype) for each in (dq_HQD, dk_HTD, dv_HTD)), None, None, None


def test_cpu_tensors_are_refused():
    q, k, v = torch.zeros(700, 8, 80), torch.zeros(700, 2, 80), torch.zeros(700, 2, 80)
    assert fa4.not_supported_reasons(q, k, v, PLAN, options=PLAIN) == [
        "tensors are on cpu, the kernels run on CUDA only",
        "dtype torch.float32 is none of bfloat16, float16 throughout",
        "head dim 80 is none of (64, 96, 128, 256), the same for q, k and v",
    ]


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hopper_with_everything_in_order_is_served(on_gpu, head_dim, dtype):
    assert on_gpu(head_dim=head_dim, dtype=dtype, num_tokens=129) == []
    assert on_gpu(head_dim=head_dim, dtype=dtype, num_tokens=700, num_context=571) == []


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"capability": AMPERE}, "compute capability (8, 0) is not (9, 0)"),
        ({"capability": (10, 0)}, "compute capability (10, 0) is not (9, 0)"),
        ({"dtype": torch.float32}, "dtype torch.float32 is none of bfloat16, float16"),
        ({"head_dim": 192}, "head dim 192 is none of"),
        ({"value_head_dim": 64}, "head dim 64 and 128 is none of"),
        ({"num_tokens": 128}, "128 queries are one block"),
        ({"num_tokens": 700, "num_context": 572}, "128 queries are one block"),
        ({"options": ScoreOptions(1.0, window=5)}, "a sliding window of 5 tokens"),
        ({"options": ScoreOptions(1.0, softcap=50.0)}, "scores softcapped at 50.0"),
        ({"options": ScoreOptions(1.0, sinks_H=torch.zeros(8))}, "attention sinks"),
    ],
)
def test_each_refusal_has_its_reason(on_gpu, case, reason):
    (got,) = on_gpu(**case)
    assert reason in got


def test_deterministic_algorithms_are_refused(on_gpu):
    torch.use_deterministic_algorithms(True)
    try:
        (got,) = on_gpu()
    finally:
        torch.use_deterministic_algorithms(False)
    assert "deterministic" in got


def test_the_extra_is_a_tested_combination():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    pins = dict(each.split("==") for each in project["project"]["optional-dependencies"]["fa4"])
    assert {name.split("[")[0]: version for name, version in pins.items()} in fa4.TESTED_COMBINATIONS


def test_a_combination_that_was_not_tested_is_refused_with_those_that_were(monkeypatch):
    """Each version is that of some tested combination, so only their combination is wrong."""
    found = {**fa4.TESTED_COMBINATIONS[0], "nvidia-cutlass-dsl": "4.8.1"}

    def version(name):
        if name == "quack-kernels":
            raise importlib.metadata.PackageNotFoundError(name)
        return found[name]

    for version_of in (found.__getitem__, version):
        monkeypatch.setattr(importlib.metadata, "version", version_of)
        (reason,) = fa4.installation_reasons.__wrapped__()
        assert "nvidia-cutlass-dsl 4.8.1" in reason.split("was not tested")[0]
        assert ("quack-kernels missing" in reason) == (version_of is version)
        assert "nvidia-cutlass-dsl 4.7.1, quack-kernels 0.6.5, apache-tvm-ffi 0.1.11" in reason
        assert "nvidia-cutlass-dsl 4.8.1, quack-kernels 0.6.5, apache-tvm-ffi 0.1.15.post2" in reason


@pytest.mark.parametrize("combination", fa4.TESTED_COMBINATIONS)
def test_every_tested_combination_is_accepted(combination, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", combination.__getitem__)
    monkeypatch.setattr(fa4, "_kernels", lambda: None)
    assert fa4.installation_reasons.__wrapped__() == ()


def test_an_import_error_is_a_reason(monkeypatch):
    def kernels():
        raise ImportError("an older copy hides flash-attn-4")

    monkeypatch.setattr(importlib.metadata, "version", fa4.TESTED_COMBINATIONS[0].__getitem__)
    monkeypatch.setattr(fa4, "_kernels", kernels)
    assert fa4.installation_reasons.__wrapped__() == (
        "flash-attn-4 cannot be imported: an older copy hides flash-attn-4",
    )


def test_importing_the_backend_imports_no_kernels():
    code = (
        "import sys, verl_tree.attention.fa4\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('flash_attn', 'cutlass', 'quack')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("head_dim", "key_block"), [(64, 128), (96, 128), (128, 128), (256, 64)])
def test_forest_of_the_self_test_has_every_kind_of_tile(head_dim, key_block):
    assert self_test.subtree_ends(((2, ((1, ()), (3, ()))), (1, ()))) == [6, 6, 3, 6, 6, 6, 7]
    behind_a_context = AttentionPlan.from_subtree_end(PLAN.subtree_end_T, num_context=self_test.CONTEXT_LEN)
    for plan in (PLAN, behind_a_context):
        tables = fa4.BlockTables.of_plan(plan, head_dim=head_dim)
        assert fa4.BlockTables.of_plan(plan, head_dim=head_dim) is tables
        assert tables.queries[0].shape[-1] == -(-plan.num_tokens // key_block)
        num_partial, partial, num_full, full = tables.keys
        num_blocks = num_partial.shape[-1]
        assert plan.num_queries > 256
        assert plan.num_queries % 128
        assert plan.num_tokens % 128
        assert num_full.sum() > 0
        assert num_partial.sum() > num_blocks
        num_causal = sum((plan.num_context + 128 * block + 127) // key_block + 1 for block in range(num_blocks))
        assert num_full.sum() + num_partial.sum() < num_causal  # some are skipped
        # A dimension of one has no stride of its own: the kernel compiled for it could be another one.
        assert min(table.shape[-1] for table in (partial, full, *tables.queries[1::2])) >= 2
    assert behind_a_context.num_context % 16
    assert self_test.CONTEXT_LEN in PLAN.runs.start_R + 40  # 40 tokens into a run


@pytest.mark.parametrize(("num_groups", "head_dim"), [(1, 128), (4, 96), (7, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_self_test_passes_a_kernel_that_rounds_as_flash_attention_does(dtype, num_groups, head_dim):
    variant = self_test.KernelVariant(torch.device("cpu"), dtype, head_dim, 2 * num_groups, 2)
    assert self_test.self_test(rounded_attention, variant) == []


def tree_mask():
    query_T = torch.arange(PLAN.num_tokens)
    return (query_T <= query_T[:, None]) & (query_T[:, None] < PLAN.subtree_end_T)


@pytest.mark.parametrize(("query", "key"), [(700, 700), (699, 623), (500, 0), (261, 259)])
def test_self_test_sees_one_wrong_pair(query, key):
    wrong_TT = tree_mask()
    wrong_TT[query, key] ^= True
    reasons = self_test.self_test(partial(rounded_attention, visible_TT=wrong_TT), VARIANT)
    assert reasons[0].startswith("self-test: worst relative error of output is ")
    behind = "self-test behind a context of 300 tokens: worst relative error of output is "
    assert any(reason.startswith(behind) for reason in reasons) == (query >= 300)


def test_self_test_sees_a_context_off_by_one():
    """A kernel may be right without a context and take the wrong tokens for its queries behind one."""

    def attend(q_QHD, k_THD, v_THD, plan, *, options):
        moved_TT = tree_mask().roll(1 if plan.num_context else 0, dims=0)
        return rounded_attention(q_QHD, k_THD, v_THD, plan, options=options, visible_TT=moved_TT)

    reasons = self_test.self_test(attend, VARIANT)
    assert len(reasons) == 4
    assert all(reason.startswith("self-test behind a context") for reason in reasons)


def test_self_test_sees_a_mask_off_by_one_in_the_backward_pass_alone():
    query_T = torch.arange(PLAN.num_tokens)
    late_TT = (query_T <= query_T[:, None]) & (query_T[:, None] <= PLAN.subtree_end_T)
    attend = partial(rounded_attention, visible_TT=tree_mask(), visible_in_backward_TT=late_TT)
    wrong = [reason.split("error of ")[1].split()[0] for reason in self_test.self_test(attend, VARIANT)]
    assert wrong == ["dq", "dk", "dv"] * 2


def test_self_test_sees_what_is_not_a_number():
    def attend(*inputs, options):
        return dense_attention(*inputs, options=options) * torch.nan

    assert len(self_test.self_test(attend, VARIANT)) == 8


WIDE_VARIANT = self_test.KernelVariant(torch.device("cpu"), torch.float32, 16, 6, 1)
"""One key-value head stays one, and float32 is exact enough for the CPU's flash kernel, so the test takes seconds."""


def wrong_from_program(first, *, in_repeat=None, result="output"):
    """Attention as a kernel whose programs of 128 queries and a head lose half of it from number `first` on.

    A correct kernel before that, and in all repeats but one if there is one.
    """
    repeats = itertools.count()

    def attend(q_QHD, k_THD, v_THD, plan, *, options):
        num_blocks = -(-plan.num_queries // 128)
        program_QH = torch.arange(q_QHD.shape[1]) * num_blocks + torch.arange(plan.num_queries)[:, None] // 128
        is_lost_QH1 = (program_QH >= first).unsqueeze(-1) & (in_repeat in (None, next(repeats)))
        kept_QH1 = torch.where(is_lost_QH1, 0.5, 1.0)
        if result == "dq":
            q_QHD = q_QHD * kept_QH1 + (q_QHD * (1 - kept_QH1)).detach()
        out_QHD = varlen_attention(q_QHD, k_THD, v_THD, plan, options=options)
        return out_QHD * kept_QH1 if result == "output" else out_QHD

    return attend


def test_wide_forest_starts_more_programs_than_a_gpu_runs_at_once():
    """An H200 has 132 multiprocessors. The kernels run one or two programs on each."""
    num_blocks = -(-len(self_test.subtree_ends(self_test.WIDE_TREES)) // 128)
    assert num_blocks * self_test.WIDE_HEADS > 500
    assert num_blocks * self_test.WIDE_KV_HEADS > 132
    plan = AttentionPlan.from_subtree_end(torch.tensor(self_test.subtree_ends(self_test.WIDE_TREES)))
    _, partial_11RW, _, full_11RW = fa4.BlockTables.of_plan(plan, head_dim=128).queries
    assert min(partial_11RW.shape[-1], full_11RW.shape[-1]) > 6


def test_a_right_kernel_passes_the_wide_forest():
    calls = []

    def attend(*inputs, options):
        calls.append(inputs)
        return varlen_attention(*inputs, options=options)

    assert self_test.wide_self_test(attend, WIDE_VARIANT) == []
    assert len(calls) == self_test.WIDE_REPEATS == 3


@pytest.mark.parametrize(
    ("kernel", "wrong"),
    [
        pytest.param({}, ["output", "dq", "dk", "dv"], marks=pytest.mark.long),
        ({"in_repeat": 2}, ["output", "dq", "dk", "dv"]),
        ({"result": "dq"}, ["dq"]),
    ],
    ids=["always", "third repeat", "backward"],
)
def test_a_kernel_that_is_wrong_past_the_first_wave_is_refused(kernel, wrong):
    """The small forest starts 6 blocks of 6 heads, 36 programs, and does not see it."""
    assert self_test.self_test(wrong_from_program(132, **kernel), WIDE_VARIANT) == []
    reasons = self_test.wide_self_test(wrong_from_program(132, **kernel), WIDE_VARIANT)
    assert [reason.split("error of ")[1].split()[0] for reason in reasons] == wrong
    assert all(reason.startswith("self-test of 4186 tokens, 3 times, key-value head 0") for reason in reasons)


def test_variants_ignore_heads_beyond_the_ratio():
    q, k = torch.zeros(300, 32, 64), torch.zeros(300, 8, 64)
    assert self_test.KernelVariant.of(q, k) == self_test.KernelVariant(q.device, q.dtype, 64, 8, 2)
    assert self_test.KernelVariant.of(q[:, :1], k[:, :1]) == self_test.KernelVariant(q.device, q.dtype, 64, 1, 1)


def test_a_failure_is_remembered_and_logged_once(caplog):
    calls = []

    def broken(*_, options):
        calls.append(options)
        raise RuntimeError("no kernel image")

    for _ in range(2):
        (reason,) = self_test.self_test_reasons("fa4", broken, VARIANT)
        assert reason == "self-test raised RuntimeError: no kernel image"
    assert len(calls) == len(caplog.records) == 1
    assert "no kernel image" in caplog.text


def test_a_self_test_that_finds_no_memory_runs_again():
    calls = []

    def full(*arguments, options):
        calls.append(options)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("none left")
        return varlen_attention(*arguments, options=options)

    (reason,) = self_test.self_test_reasons("fa4", full, NARROW_VARIANT)
    assert reason == "the self-test found no memory: none left"
    assert self_test.self_test_reasons("fa4", full, NARROW_VARIANT) == []


def test_self_test_is_invisible_to_the_caller():
    """It runs without autocast and inference mode.

    It saves nothing where checkpointing counts, and draws from no shared generator.
    """
    saved = []
    state = torch.get_rng_state()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda kept: kept)
    with hooks, torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert self_test.self_test_reasons("fa4", varlen_attention, NARROW_VARIANT) == []
    assert saved == []
    assert torch.equal(torch.get_rng_state(), state)


def test_graph_capture_puts_the_self_test_off(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    (reason,) = self_test.self_test_reasons("fa4", varlen_attention, NARROW_VARIANT)
    assert "graph capture" in reason
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert self_test.self_test_reasons("fa4", varlen_attention, NARROW_VARIANT) == []


FA4_FOLDER = Path(sys.prefix) / "fa4"
"""Where scripts/setup.sh puts flash-attn-4, so that no other test finds its `flash_attn` (requirements/fa4.lock)."""


COMPILED = ["96-float16-7", "128-bfloat16-4"]
"""Width of a head, dtype, query heads of a key head. A kernel takes 16 s to compile."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Compile all variants in a process of their own; return the record of each."""
    path = [FA4_FOLDER, FA4_FOLDER / "nvidia_cutlass_dsl" / "dsl_packages", *filter(None, [os.getenv("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "FLASH_ATTENTION_ARCH": "sm_90",
        "CUTE_DSL_ARCH": "sm_90a",
        "FLASH_ATTENTION_NUM_SMS": "132",
        "CUTE_DSL_KEEP": "ptx",
        "CUTE_DSL_DUMP_DIR": str(tmp_path_factory.mktemp("ptx")),
        "OMP_NUM_THREADS": "1",
    }
    program = Path(__file__).parents[2] / "support" / "compile_fa4.py"
    done = subprocess.run(
        [sys.executable, program, *COMPILED], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {record["variant"]: record for record in records}


@pytest.mark.skipif(not FA4_FOLDER.is_dir(), reason=f"{FA4_FOLDER} is missing: run scripts/setup.sh")
@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("variant", COMPILED)
def test_kernels_compile_for_hopper(variant, compiled):
    record = compiled[variant]
    for kind, axis in {"forward": None, "backward": "x", "heads_first": "y"}.items():
        ptx = record[kind]
        assert ptx["num_kernels"] == ptx["num_sm_90a"] >= 1
        assert ptx["num_wgmma"] > 0
        assert axis is None or ptx["axes_of_key_blocks"] == [axis]
    assert record["heads_first"]["num_kernels"] == 1  # what is before and after it is shared
    assert record["heads_first"]["num_wgmma"] == record["backward"]["num_wgmma"]
    assert record["num_compiled_later"] == 0
