"""Cuts of the rows of dK/dV: the drawn example by hand, coverage of random lists, and the simulated schedule."""

import numpy as np
import pytest
import torch
from tree_cases import layout_of, random_sequences

from verl_tree.attention import AttentionPlan
from verl_tree.attention.blocks import BlockLists, BlockRows
from verl_tree.attention.row_cuts import MAX_SHARES, MIN_PART, KeyRows, choose_bound, makespan, simulate


def rows_of(*lists):
    """Make rows of (number of full tiles, number of partial tiles), block after block."""
    num_full, num_partial = np.array(lists).T
    end = np.cumsum(num_full + num_partial)
    start = end - num_full - num_partial
    rows_R4 = np.stack((np.arange(len(lists)), start, start + num_full, end), axis=1).astype(np.int32)
    return BlockRows(torch.from_numpy(rows_R4), torch.arange(int(end[-1]), dtype=torch.int32))


def test_the_drawn_rows():
    """Costs 9 and 3 in halves of a tile: a bound of 6 cuts the first in two, where 4.5 halves are done: at tile 3."""
    rows = KeyRows.from_rows(rows_of((3, 1), (0, 1)), bound=6)
    assert rows.rows_R5.tolist() == [[0, 0, 3, 3, 0], [0, 3, 3, 4, 1], [1, 4, 4, 5, -1]]
    assert rows.cuts_C3.tolist() == [[0, 0, 2]]
    assert rows.num_slots == 2
    assert rows.rows_R5.dtype == rows.cuts_C3.dtype == torch.int32


def test_parts_of_full_and_of_partial_tiles():
    """Ten full tiles and five partial cost 35. Of three parts the second begins at 12 halves, the third at 24."""
    rows = KeyRows.from_rows(rows_of((10, 5)), bound=14)
    by_slot = rows.rows_R5[rows.rows_R5[:, 4].argsort()].tolist()
    assert by_slot == [[0, 0, 6, 6, 0], [0, 6, 10, 12, 1], [0, 12, 12, 15, 2]]
    assert rows.rows_R5[:, 4].tolist() == [1, 0, 2]  # 14, 12 and 9 halves: the dearest first


def test_no_bound_cuts_nothing():
    rows = KeyRows.from_rows(rows_of((0, 1), (50, 9)), bound=None)
    assert rows.rows_R5.tolist() == [[1, 1, 51, 60, -1], [0, 0, 0, 1, -1]]
    assert rows.cuts_C3.shape == (0, 3)
    assert rows.num_slots == 0


@pytest.mark.parametrize("seed", range(30))
def test_parts_of_random_rows_are_the_rows(seed):
    """Each tile is in one part, full or partial as it was; no part is empty or far above the bound; slots ascend."""
    rng = np.random.default_rng(seed)
    rows = rows_of(*rng.integers(0, 40, size=(20, 2)))
    bound = int(rng.integers(MIN_PART, 60))
    cut = KeyRows.from_rows(rows, bound=bound)
    parts = {block: [] for block in range(20)}
    for block, start, middle, end, slot in cut.rows_R5.tolist():
        assert 2 * (middle - start) + 3 * (end - middle) < bound + 3
        assert end > start or slot < 0
        parts[block].append((start, middle, end, slot))
    cuts = {block: (first, last) for block, first, last in cut.cuts_C3.tolist()}
    for block, start, middle, end in rows.rows_R4.tolist():
        found = sorted(parts[block])
        if 2 * (middle - start) + 3 * (end - middle) <= bound:
            assert found == [(start, middle, end, -1)]
            continue
        assert [slot for *_, slot in found] == list(range(*cuts.pop(block)))
        full = [tile for part in found for tile in range(part[0], part[1])]
        partial = [tile for part in found for tile in range(part[1], part[2])]
        assert (full, partial) == (list(range(start, middle)), list(range(middle, end)))
    assert not cuts
    assert cut.num_slots == int((cut.rows_R5[:, 4] >= 0).sum())


def test_the_time_until_the_last_program_ends():
    assert makespan(np.array([5, 4, 3, 3]), num_processors=2) == 8  # 5 + 3 and 4 + 3
    assert makespan(np.array([3, 3, 4, 5]), num_processors=2) == 8
    assert makespan(np.array([3, 3, 3]), num_processors=2) == 6


def test_how_busy_two_processors_are():
    """One row of 128 full tiles of 128 queries, for one head: 256 halves and 2 for the row.

    Uncut, one processor does all of it. Cut in two, each part costs 128 + 2 + 1 halves, and each addition 2.
    """
    rows_R4 = rows_of((128, 0)).rows_R4.numpy().astype(np.int64)
    sizes = {"query_block": 128, "num_groups": 1, "num_kv_heads": 1, "num_processors": 2}
    assert simulate(rows_R4, bound=None, **sizes) == pytest.approx(0.5)
    assert simulate(rows_R4, bound=128, **sizes) == pytest.approx(258 / (2 * 131 + 2 * 2))


def test_a_busy_machine_cuts_nothing_and_one_long_row_is_cut():
    sizes = {"query_block": 64, "num_groups": 2, "num_kv_heads": 2}
    assert choose_bound(rows_of(*[(30, 2)] * 64), num_processors=8, **sizes) is None
    assert choose_bound(rows_of(*[(30, 2)] * 64), num_processors=1, **sizes) is None
    rows = rows_of((800, 2), *[(3, 2)] * 64)
    bound = choose_bound(rows, num_processors=8, **sizes)
    assert bound is not None
    before, after = (
        simulate(rows.rows_R4.numpy().astype(np.int64), bound=one, num_processors=8, **sizes) for one in (None, bound)
    )
    assert before < 0.4
    assert after > 0.95


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
def test_the_number_of_parts_is_bounded(num_kv_heads):
    """However long the rows are."""
    for tokens in (1_000, 30_000):
        ends = np.full(tokens, tokens)
        rows = BlockLists.of_plan(AttentionPlan.from_subtree_end(ends), query_block=64, key_block=128).by_key
        sizes = {"query_block": 64, "num_groups": 4, "num_kv_heads": num_kv_heads, "num_processors": 20}
        num_slots = KeyRows.from_rows(rows, bound=choose_bound(rows, **sizes)).num_slots
        assert num_slots * num_kv_heads <= 2 * MAX_SHARES * 20


def test_the_plan_finds_the_rows_once_for_all_layers():
    layout = layout_of(random_sequences(np.random.default_rng(0), num_sequences=8, mean_len=200))
    plan = AttentionPlan.from_layout(layout)
    sizes = {"query_block": 16, "key_block": 64, "window": None, "num_groups": 7, "num_kv_heads": 1}
    rows = KeyRows.of_plan(plan, num_processors=64, **sizes)
    assert rows is KeyRows.of_plan(plan, num_processors=64, **sizes)
    assert rows.num_slots > 0
    assert KeyRows.of_plan(plan, num_processors=1, **sizes).num_slots == 0
    assert rows.to("meta").rows_R5.device.type == "meta"
