"""Lists of the tiles of the tree mask that a kernel has to visit.

A kernel works on tiles of (query block, key block). It skips a tile without a visible pair, computes a *full* tile
without a mask, and a *partial* tile with one. The largest and smallest `subtree_end` of each key block decide. For
blocks of two tokens and the forest `a0 a1 a2 | b0 b1 | c0` (b and c are children of a; `subtree_end` 6 6 6 5 5 6)::

    queries   keys a0a1   a2b0      b1c0        list of the query block
    a0 a1     partial     -         -           partial 0
    a2 b0     full        partial   -           full 0, partial 1
    b1 c0     full        partial   partial     full 0, partial 1, partial 2

The lists of a key block, for the gradients of keys and values, are the columns of the table.

With a sliding window, the smallest and largest position of each block decide, too. A tile is skipped if they prove
that every pair is too far apart, and full only if they prove that none is.

Where the first P tokens are context, the blocks of queries begin with token P, those of keys with token 0.

Legend: T tokens, R blocks of one direction (rows), C blocks of the other (columns), W the longest list.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
import torch

from verl_tree.tree.plan import AttentionPlan
from verl_tree.tree.runs import Runs
from verl_tree.tree.transfer import to_device

CHUNK_TILES = 1 << 22
"""Tiles compared at once; bounds the memory of planning."""

_Index = tuple[slice | None, slice | None]
"""Index of row or column blocks. Its None is the axis of the other kind."""


class BlockRows(NamedTuple):
    """The tiles of one direction: for every row block, the column blocks it needs."""

    # int32 (R, 4): block, start, middle, end. `indices[start:middle]` are the block's full tiles and
    # `indices[middle:end]` its partial ones, each ascending. Rows with the longest lists come first, so that
    # programs started in this order finish together.
    rows_R4: torch.Tensor
    indices: torch.Tensor  # int32, one entry per visible tile

    def to(self, device: torch.device | str) -> Self:
        """Return the lists with their tensors on `device`."""
        return type(self)(*to_device(self, device))

    def tables(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return padded tables in block order, as FlexAttention's `BlockMask` and flash-attn-4 take them.

        They are the number of partial tiles (1, 1, R), their columns (1, 1, R, W), the number of full tiles (1, 1, R)
        and their columns (1, 1, R, W'). All are int32; columns ascend, unused entries are 0, W and W' are at least 1.
        The lists, and so the tables, are on the host.
        """
        rows_R4, indices = self.rows_R4.numpy(), self.indices.numpy()
        _, start_R, middle_R, end_R = rows_R4[np.argsort(rows_R4[:, 0])].T
        tables = (*_padded_table(indices, middle_R, end_R), *_padded_table(indices, start_R, middle_R))
        num_partial, partial, num_full, full = (torch.from_numpy(table)[None, None] for table in tables)
        return num_partial, partial, num_full, full


@dataclass(frozen=True, eq=False)  # no slots, for the cached properties
class BlockLists:
    """Visible tiles of one pack, each `query_block` queries by `key_block` keys, on `device`.

    Each direction is found when asked, in O(T^2 / (query_block * key_block)) integer comparisons on the host. The last
    tile may reach past T. Such a tile is never full.
    """

    runs: Runs
    query_block: int
    key_block: int
    window: int | None
    device: torch.device

    @classmethod
    def of_plan(
        cls, plan: AttentionPlan, *, query_block: int, key_block: int, window: int | None = None, on_host: bool = False
    ) -> Self:
        """Return the lists of a pack, found once per pair of sizes and window.

        They are on the plan's device, or on the host for what is made of them before it goes to the device.

        Raises:
            ValueError: A block size is not positive.
        """
        if query_block < 1 or key_block < 1:
            raise ValueError(f"query_block={query_block}, key_block={key_block}: blocks need at least one token")
        device = torch.device("cpu") if on_host else plan.subtree_end_T.device
        wanted = (query_block, key_block, window, device)
        return plan.once(("block lists", *wanted), lambda plan: cls(plan.runs, *wanted))

    @cached_property
    def by_query(self) -> BlockRows:
        """Key blocks of every query block, for the forward pass and the gradient of the queries."""
        return self._find(by_query=True)

    @cached_property
    def by_key(self) -> BlockRows:
        """Query blocks of every key block, for the gradients of keys and values."""
        return self._find(by_query=False)

    def _find(self, *, by_query: bool) -> BlockRows:
        query_block, key_block, window = self.query_block, self.key_block, self.window
        num_tokens, num_context = len(self.runs.subtree_end_T), self.runs.num_context
        num_query_blocks, num_key_blocks = -(-(num_tokens - num_context) // query_block), -(-num_tokens // key_block)
        first_query = num_context + np.arange(num_query_blocks, dtype=np.int32) * query_block
        first_key = np.arange(num_key_blocks, dtype=np.int32) * key_block
        last_query, last_key = first_query + query_block - 1, first_key + key_block - 1
        ends = np.zeros((num_key_blocks, key_block), dtype=np.int32)  # keys past T end at 0: visible to no query
        ends.flat[:num_tokens] = self.runs.subtree_end_T
        largest, smallest = ends.max(1), ends.min(1)
        position_T = self.runs.position_T
        least_of_query, most_of_query = _extremes(position_T[num_context:], num_query_blocks, size=query_block)
        least_of_key, most_of_key = _extremes(position_T, num_key_blocks, size=key_block)

        def classify(query: _Index, key: _Index) -> tuple[np.ndarray, np.ndarray]:
            visible = (first_key[key] <= last_query[query]) & (first_query[query] < largest[key])
            full = (last_key[key] <= first_query[query]) & (last_query[query] < smallest[key])
            if window is not None:
                visible &= least_of_query[query] - most_of_key[key] < window
                full &= most_of_query[query] - least_of_key[key] < window
            return visible, full

        every = (None, slice(None))
        if by_query:
            rows = _find_rows(lambda rows: classify((rows, None), every), num_query_blocks, num_key_blocks)
        else:
            rows = _find_rows(lambda rows: classify(every, (rows, None)), num_key_blocks, num_query_blocks)
        return rows.to(self.device)


def _extremes(position_T: np.ndarray, num_blocks: int, *, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest and largest position in each block. The last token stands for all places past T."""
    blocks = np.pad(position_T, (0, num_blocks * size - len(position_T)), mode="edge").reshape(num_blocks, size)
    return blocks.min(1), blocks.max(1)


def _find_rows(
    classify: Callable[[slice], tuple[np.ndarray, np.ndarray]], num_rows: int, num_columns: int
) -> BlockRows:
    """Find the lists of all rows. `classify(rows)` gives (rows, columns) booleans of the visible and the full tiles."""
    num_full_R, num_visible_R = np.empty(num_rows, dtype=np.int64), np.empty(num_rows, dtype=np.int64)
    indices = []
    step = max(1, CHUNK_TILES // num_columns)
    for start in range(0, num_rows, step):
        rows = slice(start, min(start + step, num_rows))
        visible, full = classify(rows)
        num_full_R[rows], num_visible_R[rows] = full.sum(1), visible.sum(1)
        # With the full columns left of the partial ones, the row-major order of the nonzeros is that of the lists.
        found = np.flatnonzero(np.concatenate((full, visible & ~full), axis=1))
        indices.append((found % num_columns).astype(np.int32))
    end_R = num_visible_R.cumsum()
    assert end_R[-1] < 2**31
    start_R = end_R - num_visible_R
    rows_R4 = np.stack((np.arange(num_rows), start_R, start_R + num_full_R, end_R), axis=1).astype(np.int32)
    longest_first = np.argsort(-num_visible_R, kind="stable")
    return BlockRows(torch.from_numpy(rows_R4[longest_first]), torch.from_numpy(np.concatenate(indices)))


def _padded_table(indices: np.ndarray, start_R: np.ndarray, end_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the lengths of the rows' lists (R,), and the lists padded with 0 (R, W)."""
    num_R = end_R - start_R
    table_RW = np.zeros((len(num_R), max(1, int(num_R.max()))), dtype=np.int32)
    used_RW = np.arange(table_RW.shape[1]) < num_R[:, None]
    table_RW[used_RW] = indices[(start_R[:, None] + np.arange(table_RW.shape[1]))[used_RW]]
    return num_R.astype(np.int32), table_RW
