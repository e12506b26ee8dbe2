"""Cut rows of the dK/dV kernel, interpreted: against the dense backend in float64, and bit for bit twice."""

import dataclasses

import numpy as np
import pytest
import torch
import triton.language as tl  # noqa: F401  (the interpreter looks for it among a kernel's globals)
from triton_cases import TOLERANCE, Case, draw_inputs, draw_plan, draw_section_plan, run, worst_error

from verl_tree.attention import AttentionPlan, row_cuts, triton_ops
from verl_tree.attention.blocks import BlockLists
from verl_tree.attention.dense import dense_attention
from verl_tree.attention.row_cuts import MIN_PART, KeyRows
from verl_tree.attention.triton_configs import KernelConfig, KernelConfigs

GROUPS = (1, 2, 3, 4, 5, 6, 7, 8)
NUM_CASES = 2 * len(GROUPS)


@pytest.fixture
def run_cut(run_triton, monkeypatch):
    """`run_triton`, but every row that can be cut is."""
    monkeypatch.setattr(row_cuts, "choose_bound", lambda *_, **__: MIN_PART)
    return run_triton


def draw_cut_case(index):
    """Draw a forest, or a section behind a context, with long lists of small query blocks."""
    rng = np.random.default_rng(index)
    is_section = index >= len(GROUPS)
    num_groups = GROUPS[index % len(GROUPS)]
    plan = (draw_section_plan if is_section else draw_plan)(rng, num_tokens=int(rng.integers(40, 110)))
    sizes = {"num_groups": num_groups, "num_kv_heads": 1 + (num_groups < 3), "head_dim": int(rng.choice([16, 24]))}
    inputs = draw_inputs(rng, num_tokens=plan.num_tokens, num_context=plan.num_context, **sizes)
    coarse = KernelConfig(128, 128, 4, 1)
    return Case(
        plan=plan,
        configs=KernelConfigs(coarse, KernelConfig(16, int(rng.choice([16, 32, 64, 128])), 4, 1), coarse),
        inputs=inputs,
        scale=0.3,
        window=int(rng.integers(2, 40)) if index % 4 == 1 else None,
        sinks_H=torch.from_numpy(rng.standard_normal(inputs[0].shape[1])).float() if index % 4 == 2 else None,
    )


def rows_of(case):
    config = case.configs.dkv
    sizes = {"query_block": config.query_block, "key_block": config.key_block}
    rows = BlockLists.of_plan(case.plan, window=case.window, **sizes).by_key
    return KeyRows.from_rows(rows, bound=MIN_PART)


@pytest.mark.parametrize("index", range(NUM_CASES))
def test_random_forests_with_cut_rows_equal_dense_in_float64(index, run_cut):
    case = draw_cut_case(index)
    got, again = run_cut(case), run_cut(case)
    assert worst_error(got, run(dense_attention, case, dtype=torch.float64), case) < TOLERANCE
    assert all(torch.equal(one, other) for one, other in zip(got, again, strict=True))


def test_the_cases_reach_every_kind_of_row():
    """Guards the test above: whole rows beside cut ones, rows in two and in many parts, ragged last blocks."""
    whole = two = many = ragged = windowed = with_sinks = behind_context = 0
    for case in map(draw_cut_case, range(NUM_CASES)):
        rows = rows_of(case)
        num_parts = (rows.cuts_C3[:, 2] - rows.cuts_C3[:, 1]).tolist()
        whole += bool(num_parts) and int((rows.rows_R5[:, 4] < 0).sum()) > 0
        two += 2 in num_parts
        many += max(num_parts, default=0) > 2
        last_block = case.plan.num_tokens // case.configs.dkv.key_block
        ragged += last_block in rows.cuts_C3[:, 0].tolist()
        windowed += bool(num_parts) and case.window is not None
        with_sinks += bool(num_parts) and case.sinks_H is not None
        behind_context += bool(num_parts) and case.plan.num_context > 0
    counts = (whole, two, many, ragged, windowed, with_sinks, behind_context)
    assert min(counts) > 1, counts


def draw_chain(num_tokens, *, num_groups=2):
    """Draw a chain in blocks of 64 keys and 16 queries: up to four partial tiles a row, and the full ones below."""
    sizes = {"num_tokens": num_tokens, "num_groups": num_groups, "num_kv_heads": 1, "head_dim": 16}
    return Case(
        plan=AttentionPlan.from_subtree_end(np.full(num_tokens, num_tokens)),
        configs=KernelConfigs(*(KernelConfig(16, 64, 4, 1),) * 3),
        inputs=draw_inputs(np.random.default_rng(num_tokens), **sizes),
        scale=0.25,
    )


@pytest.mark.parametrize("num_tokens", [33, 48, 63, 64, 65, 97])
def test_edge_lengths(num_tokens, run_cut):
    """The last key block holds 1 to 64 keys; in one tile or two it is whole, in three or four cut."""
    case = draw_chain(num_tokens)
    assert rows_of(case).num_slots > 0
    assert worst_error(run_cut(case), run(dense_attention, case, dtype=torch.float64), case) < TOLERANCE


def test_a_forest_whose_every_row_is_cut(run_cut):
    case = draw_chain(128, num_groups=3)
    rows = rows_of(case)
    assert (rows.rows_R5[:, 4] >= 0).all()
    assert rows.cuts_C3[:, 0].tolist() == [0, 1]
    assert worst_error(run_cut(case), run(dense_attention, case, dtype=torch.float64), case) < TOLERANCE


def test_a_key_block_that_no_query_sees(run_cut):
    """The window hides the beginning of the context: its list is empty and its gradient zero."""
    case = draw_chain(150, num_groups=1)
    plan = AttentionPlan.from_subtree_end(np.full(150, 150), num_context=80)
    inputs = tuple(x[80:] if position in (0, 3) else x for position, x in enumerate(case.inputs))
    case = dataclasses.replace(case, plan=plan, inputs=inputs, window=9)
    assert 0 in (rows_of(case).rows_R5[:, 3] - rows_of(case).rows_R5[:, 1])
    got = run_cut(case)
    assert worst_error(got, run(dense_attention, case, dtype=torch.float64), case) < TOLERANCE
    assert not got[2][:64].any()


def forget_a_part(rows):
    rows.cuts_C3[0, 2] -= 1
    return rows


def add_a_part_twice(rows):
    rows.cuts_C3[1, 1] -= 1
    return rows


def begin_late(rows):
    rows.rows_R5[rows.rows_R5[:, 4] == 1, 1] += 1
    return rows


def swap_slots(rows):
    rows.rows_R5[:, 4] = rows.num_slots - 1 - rows.rows_R5[:, 4]
    return rows


@pytest.mark.parametrize("mutate", [forget_a_part, add_a_part_twice, begin_late, swap_slots])
def test_a_wrong_cut_is_found(mutate, run_cut, monkeypatch):
    case = draw_chain(128, num_groups=1)
    rows = mutate(rows_of(case))
    monkeypatch.setattr(KeyRows, "from_rows", lambda *_, **__: rows)
    assert worst_error(run_cut(case), run(dense_attention, case, dtype=torch.float64), case) > 1000 * TOLERANCE


def test_the_op_with_cut_rows_is_registered_in_full():
    """Schema, fake implementation and autograd agree with the op (torch.library.opcheck)."""
    case = draw_chain(70, num_groups=1)
    lists = BlockLists.of_plan(case.plan, query_block=16, key_block=64)
    by_query, (*by_key, num_slots) = list(lists.by_query), rows_of(case)
    assert num_slots == 3
    leaves = [x.detach().requires_grad_() for x in case.inputs[:3]]
    configs = [16, 64, 4, 1] * 3
    args = (*leaves, case.plan.subtree_end_T, by_query, by_key, by_query, configs, num_slots, 0.25, *[None] * 4)
    torch.library.opcheck(triton_ops.tree_attention_triton, args)
