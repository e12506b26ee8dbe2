"""Rows of a verl mini-batch become packs of their forest, and per-token results find their way back to the rows.

A row is a trajectory. Rows that no loss reads (their mask is all zero: padding rows, rejected rows) are left out of
the forest and cost nothing; their outputs are zeros. verl's own loss then runs on the rows of one pack at a time, so
its denominators count trajectories and their tokens, never packed tokens.

Legend: B rows of the mini-batch, F flat tokens of a pack, F_all flat tokens of the mini-batch, T tree tokens of a pack.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verl_tree.functional import shared_token_weights
from verl_tree.layout import TreeLayout
from verl_tree.metrics import ForestCounts
from verl_tree.packing import pack
from verl_tree.tree import IntArray, TokenForest


@dataclass(frozen=True, slots=True, eq=False)
class TreeMicroBatch:
    """One pack, with what is needed to read its results for the rows that it holds.

    Attributes:
        rows: (S,) int64 on the host, the rows of the mini-batch, in the order of `layout.leaves`.
        layout: the pack, on the host; its leaves are the rows.
        wanted_T: (T,) bool, tokens whose log-prob a loss reads.
        flat_index_F: (F,) int64, where each (leaf, position) stands among the F_all flat tokens of the mini-batch.
        gradient_weight_F: (F,) float32 or None (all ones): see `shared_token_weights`.
    """

    rows: IntArray
    layout: TreeLayout
    wanted_T: Tensor
    flat_index_F: Tensor
    gradient_weight_F: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class TreeBatch:
    """The packs of one mini-batch on one rank, and what they save."""

    micro_batches: tuple[TreeMicroBatch, ...]
    counts: ForestCounts


def trained_tokens(mask: Tensor, *, sequence_lens: IntArray) -> np.ndarray:
    """Which flat tokens a loss reads, from verl's mask.

    Args:
        mask: jagged (B, j) mask, aligned with the end of every row: the response part (RL), or the whole row (SFT).
        sequence_lens: (B,) lengths in tokens of the rows.

    Returns:
        (F_all,) bool.

    Raises:
        ValueError: a row's mask is longer than the row.
    """
    values = mask.values().cpu().numpy().astype(bool)
    mask_lens = mask.offsets().diff().cpu().numpy()
    if (mask_lens > sequence_lens).any():
        row = int(np.argmax(mask_lens > sequence_lens))
        raise ValueError(
            f"the loss mask of row {row} has {mask_lens[row]} entries and its input_ids {sequence_lens[row]}: "
            "a mask covers the response or the whole row"
        )
    ends = np.cumsum(sequence_lens)
    first = np.repeat(ends - mask_lens, mask_lens)
    within = np.arange(len(values)) - np.repeat(np.cumsum(mask_lens) - mask_lens, mask_lens)
    trained = np.zeros(int(sequence_lens.sum()), dtype=bool)
    trained[first + within] = values
    # The first token of a row has no logits before it: nothing can score it.
    trained[ends - sequence_lens] = False
    return trained


def split_into_packs(
    tokens: np.ndarray,
    *,
    offsets: IntArray,
    trained: np.ndarray,
    capacity: int | None,
    method: str,
    shared_tokens: str,
    merge_keys: Sequence[Hashable] | None = None,
) -> TreeBatch:
    """Finds the forest of the rows that a loss reads and cuts it into packs.

    Args:
        tokens: (F_all,) the rows' token ids, one row after another.
        offsets: (B + 1,) where each row starts.
        trained: (F_all,) bool, the flat tokens that a loss reads.
        capacity: tree tokens a pack may hold; None for one pack.
        method: of `verl_tree.packing.pack`.
        shared_tokens: `sum`, `mean` or `once`, see design "Shared tokens". Counted over the whole mini-batch, so it
            does not depend on the packing.
        merge_keys: (B,) what besides the tokens changes a row's forward.

    Returns:
        The packs and their counts; no packs where no loss reads any row.
    """
    lens = np.diff(offsets)
    rows = np.flatnonzero(np.add.reduceat(trained, offsets[:-1], dtype=np.int64))
    sequences = [tokens[offsets[row] : offsets[row + 1]] for row in rows]
    keys = None if merge_keys is None else [merge_keys[row] for row in rows]
    forest = TokenForest.from_sequences(sequences, merge_keys=keys)
    packing = pack(forest, capacity=capacity, method=method)
    weights = None
    if shared_tokens != "sum" and len(rows):
        whole = TreeLayout.from_forest(forest)
        flat_index = _flat_index(offsets[rows[whole.leaves]], lens=lens[rows[whole.leaves]])
        weight = shared_token_weights(whole, torch.from_numpy(trained[flat_index]), shared_tokens)
        weights = torch.zeros(len(tokens), dtype=weight.dtype)
        weights[flat_index] = weight

    micro_batches = []
    for one in packing.packs:
        layout = TreeLayout.from_forest(forest, one.leaves)
        pack_rows = rows[layout.leaves]
        flat_index = _flat_index(offsets[pack_rows], lens=lens[pack_rows])
        wanted_T = torch.zeros(layout.num_tokens, dtype=torch.bool)
        wanted_T[layout.tree_index_F[torch.from_numpy(trained[flat_index])]] = True
        flat_index_F = torch.from_numpy(flat_index)
        micro_batches.append(
            TreeMicroBatch(
                rows=pack_rows,
                layout=layout,
                wanted_T=wanted_T,
                flat_index_F=flat_index_F,
                gradient_weight_F=None if weights is None else weights[flat_index_F],
            )
        )
    return TreeBatch(micro_batches=tuple(micro_batches), counts=ForestCounts.from_packing(packing, forest=forest))


def _flat_index(starts: IntArray, *, lens: IntArray) -> IntArray:
    """The runs starts[i]..starts[i] + lens[i], one after another."""
    return np.arange(int(lens.sum())) + np.repeat(starts - (np.cumsum(lens) - lens), lens)


def first_token_pack(token: int) -> TreeLayout:
    """The smallest pack with a scored token: what a rank computes while others still have packs left."""
    return TreeLayout.from_forest(TokenForest.from_sequences([[token, token]]))
