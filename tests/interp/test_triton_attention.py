"""The Triton kernels in the interpreter: outputs and gradients of random forests against the dense backend in float64.

Memory is poisoned (see conftest.py) and every case runs twice: each element is written, and by a fixed order of sums.
"""

import copy
import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
import triton
import triton.language as tl  # noqa: F401  (the interpreter looks for it among a kernel's globals)
from torch.utils.checkpoint import checkpoint
from tree_cases import relative_error
from triton_cases import TOLERANCE, Case, draw_case, draw_inputs, draw_plan, run, worst_error

from verl_tree.attention import AttentionPlan, ScoreOptions, tree_attention, triton_kernels, triton_key_kernels
from verl_tree.attention import triton_backend as backend
from verl_tree.attention.blocks import BlockLists
from verl_tree.attention.dense import dense_attention
from verl_tree.attention.row_cuts import KeyRows
from verl_tree.attention.triton_configs import KernelConfig, KernelConfigs, choose_configs, padded_dim

NUM_CASES = 55
NUM_SECTIONS = 20


@pytest.mark.parametrize(
    ("seed", "is_section"),
    [*((seed, False) for seed in range(NUM_CASES)), *((seed, True) for seed in range(NUM_SECTIONS))],
)
def test_random_forests_equal_dense_in_float64(seed, is_section, run_triton):
    case = draw_case(seed, is_section=is_section)
    got, again = run_triton(case), run_triton(case)
    assert worst_error(got, run(dense_attention, case, dtype=torch.float64), case) < TOLERANCE
    for one, other, x in zip(got, again, (*case.inputs[:1], *case.inputs[:3]), strict=True):
        assert torch.equal(one, other)
        assert one.is_contiguous()
        assert one.shape == x.shape


def test_the_cases_reach_every_kind_of_tile():
    """Guards the fuzz test: skipped, full and partial tiles, ragged last blocks, padded head dims."""
    skipped = full = partial = ragged = padded = unequal = 0
    groups, head_dims, lengths = set(), set(), []
    for seed in range(NUM_CASES):
        case = draw_case(seed)
        num_tokens, num_heads, head_dim = case.inputs[0].shape
        groups.add(num_heads // case.inputs[1].shape[1])
        head_dims.add(head_dim)
        lengths.append(num_tokens)
        for config in (case.configs.forward, case.configs.dkv, case.configs.dq):
            rows = BlockLists.of_plan(
                case.plan, query_block=config.query_block, key_block=config.key_block
            ).by_query.rows_R4
            num_key_blocks = -(-num_tokens // config.key_block)
            full += int((rows[:, 2] - rows[:, 1]).sum() > 0)
            partial += int((rows[:, 3] - rows[:, 2]).sum() > 0)
            last_key_block = torch.minimum(
                ((rows[:, 0] + 1) * config.query_block - 1) // config.key_block, torch.tensor(num_key_blocks - 1)
            )
            skipped += int((rows[:, 3] - rows[:, 1] < last_key_block + 1).any())  # beyond what causality skips
            ragged += num_tokens % config.query_block != 0 and num_tokens > config.query_block
            unequal += config.query_block != config.key_block
        padded += padded_dim(head_dim) != head_dim
    assert groups == {1, 2, 4, 7, 8}
    assert head_dims == {16, 24, 32, 48, 64, 96, 128}
    assert min(lengths) < 5
    assert max(lengths) > 400
    counts = {"skipped": skipped, "full": full, "partial": partial, "ragged": ragged, "padded": padded}
    assert min(counts.values()) > 10, counts
    assert unequal > NUM_CASES


def test_the_sections_reach_every_kind_of_context():
    """Guards the fuzz test: none, shorter and longer than a key block, ending inside a run and inside a tile."""
    none = short = long = split = inside = 0
    for seed in range(NUM_SECTIONS):
        case = draw_case(seed, is_section=True)
        num_context, ends_T = case.plan.num_context, case.plan.subtree_end_T
        none += num_context == 0
        split += num_context > 0 and bool(ends_T[num_context - 1] == ends_T[num_context])
        for config in (case.configs.forward, case.configs.dkv, case.configs.dq):
            short += 0 < num_context < config.key_block
            long += num_context > config.key_block
            inside += num_context % config.key_block != 0
    assert none > 0
    assert min(short, long, split, inside) > 5, (short, long, split, inside)


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17, 33])
def test_edge_lengths(num_tokens, run_triton):
    """Chains, and forests whose every token is a root, so that a query sees only itself."""
    rng = np.random.default_rng(num_tokens)
    for ends in (np.full(num_tokens, num_tokens), np.arange(1, num_tokens + 1)):
        case = Case(
            plan=AttentionPlan.from_subtree_end(ends),
            configs=KernelConfigs(*(KernelConfig(16, 16, 4, 1),) * 3),
            inputs=draw_inputs(rng, num_tokens=num_tokens, num_groups=1, num_kv_heads=1, head_dim=16),
            scale=0.25,
        )
        got = run_triton(case)
        assert worst_error(got, run(dense_attention, case, dtype=torch.float64), case) < TOLERANCE
    assert torch.equal(got[0], case.inputs[2])  # the softmax over oneself


def shifted(plan, by):
    """Return the plan with every `subtree_end` moved; a token's own position stays inside."""
    own = torch.arange(plan.num_tokens, dtype=torch.int32)
    ends = (plan.subtree_end_T + by).clamp(max=plan.num_tokens)
    moved = copy.copy(plan)
    moved.subtree_end_T = torch.maximum(ends, own + 1)
    return moved


@triton.jit
def _sees_one_too_many(query, key, end):
    return (key <= query) & (query <= end)


@pytest.mark.parametrize("mutation", ["end + 1", "end - 1", "query <= end"])
def test_a_mutated_bound_is_found(mutation, run_triton, monkeypatch):
    """A mask that is off by one, in the plan or in the kernels, is far outside of the tolerance of the fuzz test."""
    cases = [case for case in map(draw_case, range(40)) if 20 < case.plan.num_tokens < 120]
    sections = map(partial(draw_case, is_section=True), range(40))
    branching = [case for case in cases if len(case.plan.subtree_end_T.unique()) > 4][:3]
    branching.append(next(case for case in sections if 10 < case.plan.num_context < case.plan.num_queries < 100))
    assert len(branching) == 4
    if mutation == "query <= end":
        for module in (triton_kernels, triton_key_kernels):
            monkeypatch.setattr(module, "is_visible", _sees_one_too_many)
    for case in branching:
        plan = {"end + 1": shifted(case.plan, 1), "end - 1": shifted(case.plan, -1)}.get(mutation, case.plan)
        want = run(dense_attention, case, dtype=torch.float64)
        assert worst_error(run_triton(case, plan=plan), want, case) > 1000 * TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(6))
def test_16_bit_errors_are_those_of_rounding(dtype, seed, run_triton):
    """Against float64 on the same rounded inputs, relative to the dense backend, which rounds only its results."""
    case = draw_case(1000 + seed)
    case = dataclasses.replace(case, inputs=tuple(x.to(dtype) for x in case.inputs))
    want = run(dense_attention, case, dtype=torch.float64)
    plain, got = run(dense_attention, case, dtype=dtype), run_triton(case, dtype=dtype)
    for got_one, plain_one, want_one in zip(got, plain, want, strict=True):
        assert got_one.dtype == dtype
        if want_one.norm() > 0:
            assert relative_error(got_one.double(), want_one) <= 2.5 * relative_error(plain_one.double(), want_one)


@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_any_scale(scale, run_triton):
    case = dataclasses.replace(draw_case(11), scale=scale)
    assert worst_error(run_triton(case), run(dense_attention, case, dtype=torch.float64), case) < TOLERANCE


def test_a_row_that_sees_nothing_in_its_first_tiles(run_triton):
    """Two roots share a query block: the second's queries find the first's keys invisible, tile after tile."""
    num_tokens = 120
    ends = np.r_[np.full(96, 96), np.full(num_tokens - 96, num_tokens)]
    configs = KernelConfigs(*(KernelConfig(128, 16, 4, 1),) * 3)
    inputs = draw_inputs(np.random.default_rng(0), num_tokens=num_tokens, num_groups=1, num_kv_heads=1, head_dim=16)
    case = Case(plan=AttentionPlan.from_subtree_end(ends), configs=configs, inputs=inputs, scale=0.25)
    assert worst_error(run_triton(case), run(dense_attention, case, dtype=torch.float64), case) < TOLERANCE


def test_large_scores_do_not_overflow(run_triton):
    """Invisible pairs with huge scores: their probabilities are infinite before the mask, and zero after it."""
    ends = np.r_[np.full(40, 40), np.full(40, 80)]
    configs = KernelConfigs(*(KernelConfig(32, 16, 4, 1),) * 3)
    q, k, v, grad_out = draw_inputs(np.random.default_rng(1), num_tokens=80, num_groups=1, num_kv_heads=1, head_dim=16)
    q, k = q.clone(), k.clone()
    q[40:, :, 0] = 30.0
    k[:40, :, 0] = 30.0
    case = Case(AttentionPlan.from_subtree_end(ends), configs, (q, k, v, grad_out), scale=1.0)
    assert worst_error(run_triton(case), run(dense_attention, case, dtype=torch.float64), case) < 5 * TOLERANCE


@pytest.mark.parametrize("is_section", [False, True])
def test_other_branches_change_nothing_bit_for_bit(is_section, run_triton):
    cases = map(partial(draw_case, is_section=is_section), range(40))
    case = next(case for case in cases if 60 < case.plan.num_tokens < 120 and (case.plan.num_context > 9) == is_section)
    position = torch.arange(case.plan.num_tokens)
    visible_TT = (position <= position[:, None]) & (position[:, None] < case.plan.subtree_end_T)
    before = run_triton(case)[0]
    for token in (1, case.plan.num_tokens // 2, case.plan.num_tokens - 1):
        moved = [x.clone() for x in case.inputs]
        for x in moved[1:3]:
            x[token] += 3.0
        after = run_triton(dataclasses.replace(case, inputs=tuple(moved)))[0]
        sees = visible_TT[case.plan.num_context :, token]
        assert torch.equal(before[~sees], after[~sees])
        assert not torch.equal(before[sees], after[sees])


@pytest.mark.parametrize("head_dim", [16, 96, 256])
def test_shipped_configurations_in_the_interpreter(head_dim):
    """The registry's way in, with the configurations of the table; 256 is the largest head dim."""
    rng = np.random.default_rng(head_dim)
    plan = draw_plan(rng, num_tokens=40)
    inputs = draw_inputs(rng, num_tokens=40, num_groups=2, num_kv_heads=1, head_dim=head_dim)
    case = Case(plan, choose_configs(inputs[0], options=ScoreOptions(scale=1.0)), inputs, scale=head_dim**-0.5)

    def attend(q, k, v, plan, *, options):
        return tree_attention(q, k, v, plan, scale=options.scale, backend="triton")

    assert worst_error(run(attend, case), run(dense_attention, case, dtype=torch.float64), case) < TOLERANCE


@pytest.mark.parametrize("num_context", [0, 7])
def test_the_op_is_registered_in_full(num_context):
    """Schema, fake implementation and autograd agree with the op (torch.library.opcheck)."""
    rng = np.random.default_rng(0)
    # Tokens 0 to 8 are a path, below which two branches end at 15 and 20.
    plan = AttentionPlan.from_subtree_end(np.repeat([20, 15, 20], [9, 6, 5]), num_context=num_context)
    sizes = {"num_groups": 2, "num_kv_heads": 1, "head_dim": 16}
    q, k, v, _ = draw_inputs(rng, num_tokens=20, num_context=num_context, **sizes)
    lists = BlockLists.of_plan(plan, query_block=16, key_block=16)
    by_query, (*by_key, num_slots) = list(lists.by_query), KeyRows.from_rows(lists.by_key, bound=None)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    args = (*leaves, plan.subtree_end_T, by_query, by_key, by_query, [16, 16, 4, 1] * 3, num_slots, 0.25, *[None] * 4)
    torch.library.opcheck(backend.tree_attention_triton, args)
    out, lse = backend.tree_attention_triton(*args)
    scores_HQT = torch.einsum("qhd,td->hqt", q, k[:, 0]) * 0.25
    position = torch.arange(20)
    visible_TT = (position <= position[:, None]) & (position[:, None] < plan.subtree_end_T)
    want = scores_HQT.masked_fill(~visible_TT[num_context:], -torch.inf).logsumexp(-1)
    assert relative_error(lse, want) < 1e-6
    assert not lse.requires_grad
    assert out.requires_grad


def test_an_expanded_gradient(run_triton):
    """The gradient of `out.sum()` has strides of zero."""
    case = draw_case(4)
    ones = torch.ones(()).expand(case.inputs[0].shape)
    case = dataclasses.replace(case, inputs=(*case.inputs[:3], ones))
    assert worst_error(run_triton(case), run(dense_attention, case, dtype=torch.float64), case) < TOLERANCE


def test_gradient_checkpointing_recomputes_the_same_bits(run_triton):
    case = next(case for case in map(draw_case, range(40)) if 20 < case.plan.num_tokens < 80)

    def checkpointed(*args, options):
        return checkpoint(
            lambda *qkv: backend.triton_attention(*qkv, args[3], options=options), *args[:3], use_reentrant=False
        )

    plain = run_triton(case)
    for one, other in zip(run(checkpointed, case), plain, strict=True):
        assert torch.equal(one, other)
