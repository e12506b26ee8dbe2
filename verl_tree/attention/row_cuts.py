"""The rows of the kernel for the gradients of keys and values, the longest of them cut into parts.

A program of that kernel owns a block of keys and walks all queries that see it, head after head of the group. The keys
of a root are seen by the whole pack: with few key-value heads, one long program runs while most processors (SMs) wait.
So a long row is cut: its list of query blocks is shared out among several programs, and a second kernel adds their sums
in the order of the list. Where to cut depends on the lists, the heads and the number of processors, on nothing that
happens on the device, so the same pack gives the same bits.

For a block of keys with the list `0 1 2 | 3` (three full tiles, one partial), cut in two, and one that stays whole::

    row     list         slot          cuts: block, first slot, one past the last
    5       0 1 |        0             5, 0, 2
    5         2 | 3      1
    7           | 3      -1 (whole: written without a slot)

The parts are float32, `2 * key_block * D * 4` bytes each, and there are at most `2 * MAX_SHARES * processors` of them
for all heads together: 138 MB on 132 processors with blocks of 128 keys and D = 128, whatever the number of tokens.

Legend: R rows, C cut blocks.
"""

import heapq
import math
from typing import NamedTuple, Self

import numpy as np
import torch

from verl_tree.attention.blocks import BlockLists, BlockRows
from verl_tree.tree.plan import AttentionPlan
from verl_tree.tree.transfer import to_device

FULL_TILE, PARTIAL_TILE = 2, 3
"""Cost of a tile for one query head, in halves of a full one. A mask adds a half (counted in machine code)."""

ROW, PART, ADDITION = 128, 64, 128
"""What a program costs beside its tiles, what it costs more if it writes a part, and what the addition of a part costs.

As many queries of one head could be computed meanwhile. Estimated from the bytes that are moved, while the tensor cores
reach 60 % of their peak: a row reads keys and values and writes gradients, 16 bits each; a part writes float32; an
addition reads it. The size of the key block and D cancel.
"""

SHARES = (1, 1.1, 1.25, 1.5, 1.75, 2, 2.25, 2.5, 3, 3.5, 4)
MAX_SHARES = SHARES[-1]
"""Cuts that are tried: rows longer than 1 / share of what each processor has to do."""

MIN_PART = 2 * PARTIAL_TILE
"""The least bound on a part. Parts of a row have at least half the bound, so each of them has a tile."""

BUSY_ENOUGH = 0.98


class KeyRows(NamedTuple):
    """The rows of all key blocks, as programs of the kernel take them."""

    # int32 (R, 5): block, start, middle, end as in `BlockRows`, and the slot of a part, or -1. The dearest come first.
    rows_R5: torch.Tensor
    indices: torch.Tensor  # that of `BlockRows`
    cuts_C3: torch.Tensor  # int32 (C, 3): block, first slot, one past the last slot
    num_slots: int

    @classmethod
    def of_plan(
        cls,
        plan: AttentionPlan,
        *,
        query_block: int,
        key_block: int,
        window: int | None,
        num_groups: int,
        num_kv_heads: int,
        num_processors: int,
    ) -> Self:
        """Return the rows of a pack on the plan's device. They are found once per pack and set of arguments."""

        def find(plan: AttentionPlan) -> Self:
            sizes = {"query_block": query_block, "key_block": key_block}
            rows = BlockLists.of_plan(plan, **sizes, window=window, on_host=True).by_key
            heads = {"num_groups": num_groups, "num_kv_heads": num_kv_heads}
            bound = choose_bound(rows, query_block=query_block, num_processors=num_processors, **heads)
            return cls.from_rows(rows, bound=bound).to(plan.subtree_end_T.device)

        sizes = (query_block, key_block, window, num_groups, num_kv_heads, num_processors)
        return plan.once(("key rows", *sizes), find)

    @classmethod
    def from_rows(cls, rows: BlockRows, *, bound: int | None) -> Self:
        """Cut every row that costs more than `bound` into the fewest parts that do not, up to a tile.

        `bound` counts the tiles of one query head, in halves of a full one. None cuts nothing.
        """
        assert bound is None or bound >= MIN_PART, bound
        rows_R4 = rows.rows_R4.numpy().astype(np.int64)
        pieces = _cut(rows_R4, bound=bound)
        block_S = pieces[0, pieces[4] >= 0]
        first_C, last_C = (np.flatnonzero(np.diff(block_S, **{side: -1})) for side in ("prepend", "append"))
        cuts_C3 = np.stack((block_S[first_C], first_C, last_C + 1), axis=1)
        return cls(_int32(_dearest_first(pieces).T), rows.indices, _int32(cuts_C3), len(block_S))

    def to(self, device: torch.device | str) -> Self:
        """Return the rows with their tensors on `device`."""
        rows_R5, indices, cuts_C3 = to_device((self.rows_R5, self.indices, self.cuts_C3), device)
        return type(self)(rows_R5, indices, cuts_C3, self.num_slots)


def choose_bound(
    rows: BlockRows, *, query_block: int, num_groups: int, num_kv_heads: int, num_processors: int
) -> int | None:
    """Return the bound of the fewest cuts that keep the processors busy enough, or of those that do best.

    The time of a cut is simulated: processors take programs in the order of the rows, one at a time.
    """
    rows_R4 = rows.rows_R4.numpy().astype(np.int64)
    cost_R = _list_cost(*rows_R4.T[1:])
    sizes = {"query_block": query_block, "num_groups": num_groups, "num_kv_heads": num_kv_heads}
    sizes["num_processors"] = num_processors
    best, best_bound = simulate(rows_R4, bound=None, **sizes), None
    share = float(cost_R.sum()) * num_kv_heads / num_processors
    for bound in (max(MIN_PART, math.ceil(share / number)) for number in SHARES):
        if best >= BUSY_ENOUGH:
            break
        busy = simulate(rows_R4, bound=bound, **sizes)
        if busy > best:
            best, best_bound = busy, bound
    return best_bound


def simulate(
    rows_R4: np.ndarray,
    *,
    bound: int | None,
    query_block: int,
    num_groups: int,
    num_kv_heads: int,
    num_processors: int,
) -> float:
    """Return the part of the processors' time that goes into the rows as they are without a cut, from 0 to 1.

    The rest is waiting for the last program, and what the cuts cost.
    """
    row, part, addition = (FULL_TILE * queries / query_block for queries in (ROW, PART, ADDITION))
    _, start, middle, end, slot = _dearest_first(_cut(rows_R4, bound=bound))
    cost = num_groups * _list_cost(start, middle, end) + row + part * (slot >= 0)
    num_slots = int((slot >= 0).sum())
    useful = cost.sum() - part * num_slots - row * (len(cost) - len(rows_R4))
    time = makespan(np.repeat(cost, num_kv_heads), num_processors=num_processors)
    return float(useful * num_kv_heads / (num_processors * time + addition * num_slots * num_kv_heads))


def makespan(costs: np.ndarray, *, num_processors: int) -> float:
    """Return when the last of the programs ends, if each processor that is free takes the next one."""
    free_at = [0.0] * num_processors
    for cost in costs.tolist():
        heapq.heapreplace(free_at, free_at[0] + cost)
    return max(free_at)


def _cut(rows_R4: np.ndarray, *, bound: int | None) -> np.ndarray:
    """Return block, start, middle, end and slot (-1: whole) of whole rows and parts, int64 (5, .).

    The parts of a row are neighbours and ascend, as do the slots.
    """
    block_R, start_R, middle_R, end_R = rows_R4.T
    cost_R = _list_cost(start_R, middle_R, end_R)
    num_parts_R = np.ones_like(cost_R) if bound is None else np.maximum(1, -(-cost_R // bound))
    row = np.repeat(np.arange(len(cost_R)), num_parts_R)
    part = np.arange(len(row)) - np.repeat(num_parts_R.cumsum() - num_parts_R, num_parts_R)

    def position(part: np.ndarray) -> np.ndarray:
        """Return the first tile of a part: the first that begins at its share of the row's cost, or behind it."""
        cost = -(-cost_R[row] * part // num_parts_R[row])
        full_cost = FULL_TILE * (middle_R - start_R)[row]
        in_full = start_R[row] - (-cost // FULL_TILE)
        in_partial = middle_R[row] - (-(cost - full_cost) // PARTIAL_TILE)
        return np.where(cost <= full_cost, in_full, in_partial)

    start, end = position(part), position(part + 1)
    is_part = num_parts_R[row] > 1
    assert (end > start)[is_part].all()
    slot = np.where(is_part, is_part.cumsum() - 1, -1)
    return np.stack((block_R[row], start, middle_R[row].clip(start, end), end, slot))


def _dearest_first(pieces: np.ndarray) -> np.ndarray:
    return pieces[:, np.argsort(-_list_cost(*pieces[1:4]), kind="stable")]


def _list_cost(start: np.ndarray, middle: np.ndarray, end: np.ndarray) -> np.ndarray:
    return FULL_TILE * (middle - start) + PARTIAL_TILE * (end - middle)


def _int32(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32))
