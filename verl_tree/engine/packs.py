"""Rows of a verl mini-batch become packs of their forest, and per-token results find their way back to the rows.

A row is a trajectory. Rows that no loss reads (their mask is all zero: padding rows, rejected rows) are left out of
the forest and cost nothing; their outputs are zeros. verl's own loss then runs on the rows of one pack at a time, so
its denominators count trajectories and their tokens, never packed tokens.

A pack that the cost model predicts to be faster flat runs flat: the same rows as trees of one row each, in as many
micro-batches as the capacity asks for. Only the sharing is given up; everything behind it is the same code.

Legend: B rows of the mini-batch, F flat tokens of a pack, F_all flat tokens of the mini-batch, T tree tokens of a pack.
"""

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from verl_tree.config import TreeConfig
from verl_tree.cost.model import CostModel, Work, WorkProfile, runs_faster_flat
from verl_tree.functional import shared_token_weights
from verl_tree.packing import pack
from verl_tree.packing.baselines import next_fit
from verl_tree.packing.counts import ForestCounts
from verl_tree.packing.problem import UNLIMITED, Caps
from verl_tree.tree import TokenForest
from verl_tree.tree.layout import TreeLayout
from verl_tree.tree.nodes import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class TreeMicroBatch:
    """One pack, with what is needed to read its results for the rows that it holds.

    Attributes:
        rows: (S,) int64 on the host, the rows of the mini-batch, in the order of `layout.leaves`.
        layout: the pack, on the host; its leaves are the rows.
        wanted_T: (T,) bool, tokens whose log-prob a loss reads.
        flat_index_F: (F,) int64, where each (leaf, position) stands among the F_all flat tokens of the mini-batch.
        gradient_weight_F: (F,) float32 or None (all ones): see `shared_token_weights`.
        work: what the model computes, for the cost model.
    """

    rows: IntArray
    layout: TreeLayout
    wanted_T: Tensor
    flat_index_F: Tensor
    gradient_weight_F: Tensor | None
    work: Work


@dataclass(frozen=True, slots=True, eq=False)
class TreeBatch:
    """The packs of one mini-batch on one rank, and what they save.

    Attributes:
        micro_batches: the packs, the dearest first: ranks run them in step, so packs of like cost should meet.
        counts: their metrics.
        packing_s: seconds spent on finding the forest and packing it.
    """

    micro_batches: tuple[TreeMicroBatch, ...]
    counts: ForestCounts
    packing_s: float


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
    capacity: int,
    tree: TreeConfig,
    model: CostModel | None = None,
    merge_keys: Sequence[Hashable] | None = None,
) -> TreeBatch:
    """Finds the forest of the rows that a loss reads and cuts it into packs.

    Args:
        tokens: (F_all,) the rows' token ids, one row after another.
        offsets: (B + 1,) where each row starts.
        trained: (F_all,) bool, the flat tokens that a loss reads.
        capacity: tree tokens that a pack may hold.
        tree: packing method, further caps, gate and objective. Shared tokens are counted over the whole mini-batch, so
            the objective does not depend on the packing.
        model: what packs cost; None before anything was measured: the gate `auto` then runs every pack as a tree.
        merge_keys: (B,) what besides the tokens changes a row's forward.

    Returns:
        The packs and their counts; no packs where no loss reads any row.

    Raises:
        ValueError: a row exceeds a cap, or the method cannot pack the rows; see `verl_tree.packing.pack`.
    """
    started_s = time.perf_counter()
    num_trained = np.add.reduceat(trained, offsets[:-1], dtype=np.int64)
    rows = np.flatnonzero(num_trained)
    keys = None if merge_keys is None else [merge_keys[row] for row in rows]
    forest = TokenForest.from_sequences([tokens[offsets[row] : offsets[row + 1]] for row in rows], merge_keys=keys)
    packing = pack(
        forest,
        capacity=capacity,
        method=tree.packing,
        max_loss_terms=tree.max_loss_terms,
        loss_terms=num_trained[rows],
        max_path_len=tree.max_path_len,
    )
    packing_s = time.perf_counter() - started_s
    maker = _MicroBatchMaker(
        forest, rows=rows, offsets=offsets, trained=trained, weights=_row_weights(forest, rows, offsets, trained, tree)
    )
    gate = _Gate(maker, loss_terms=num_trained[rows], capacity=capacity, tree=tree, model=model)
    micro_batches, num_flat_packs = [], 0
    for one in packing.packs:
        micro = maker.tree(one.leaves)
        flat_packs = gate.flat_packs(micro)
        micro_batches.extend(map(maker.flat, flat_packs) if flat_packs else [micro])
        num_flat_packs += len(flat_packs)
    order_model = CostModel.prior() if model is None else model
    micro_batches.sort(key=lambda micro: -order_model.predict(micro.work))
    counts = replace(
        ForestCounts.from_packing(packing, forest=forest),
        num_packed_tokens=sum(micro.work.num_tokens for micro in micro_batches),
        num_packs=len(micro_batches),
        num_flat_packs=num_flat_packs,
        num_capacity_tokens=capacity * len(micro_batches),
    )
    return TreeBatch(micro_batches=tuple(micro_batches), counts=counts, packing_s=packing_s)


def _row_weights(
    forest: TokenForest, rows: IntArray, offsets: IntArray, trained: np.ndarray, tree: TreeConfig
) -> Tensor | None:
    """(F_all,) gradient weights of the flat tokens; None where all are 1."""
    if tree.shared_tokens == "sum" or not len(rows):
        return None
    whole = TreeLayout.from_forest(forest)
    whole_rows = rows[whole.leaves]
    flat_index = _flat_index(offsets[whole_rows], lens=np.diff(offsets)[whole_rows])
    weight_F = shared_token_weights(whole, torch.from_numpy(trained[flat_index]), tree.shared_tokens)
    weights = torch.zeros(len(trained), dtype=weight_F.dtype)
    weights[flat_index] = weight_F
    return weights


class _MicroBatchMaker:
    """Lays packs out, as trees or flat."""

    def __init__(
        self,
        forest: TokenForest,
        *,
        rows: IntArray,
        offsets: IntArray,
        trained: np.ndarray,
        weights: Tensor | None,
    ) -> None:
        self.forest, self.rows, self.offsets, self.trained, self.weights = forest, rows, offsets, trained, weights
        self.lens = np.diff(offsets)

    def tree(self, leaves: IntArray) -> TreeMicroBatch:
        """Some leaves of the forest as one tree."""
        return self._micro_batch(TreeLayout.from_forest(self.forest, leaves), rows=self.rows)

    def flat(self, leaves: IntArray) -> TreeMicroBatch:
        """Some leaves of the forest as one tree each."""
        sequences = [self.forest.sequence(leaf) for leaf in leaves.tolist()]
        apart = TokenForest.from_sequences(sequences, merge_keys=range(len(sequences)))
        return self._micro_batch(TreeLayout.from_forest(apart), rows=self.rows[leaves])

    def _micro_batch(self, layout: TreeLayout, *, rows: IntArray) -> TreeMicroBatch:
        """A layout whose leaves are these rows of the mini-batch."""
        pack_rows = rows[layout.leaves]
        flat_index = _flat_index(self.offsets[pack_rows], lens=self.lens[pack_rows])
        wanted_T = torch.zeros(layout.num_tokens, dtype=torch.bool)
        wanted_T[layout.tree_index_F[torch.from_numpy(self.trained[flat_index])]] = True
        flat_index_F = torch.from_numpy(flat_index)
        return TreeMicroBatch(
            rows=pack_rows,
            layout=layout,
            wanted_T=wanted_T,
            flat_index_F=flat_index_F,
            gradient_weight_F=None if self.weights is None else self.weights[flat_index_F],
            work=Work(
                num_tokens=layout.num_tokens,
                num_visible_pairs=int(layout.position_T.sum()) + layout.num_tokens,
                num_scored=int(wanted_T.sum()),
                num_segments=layout.num_nodes,
                num_packs=1,
            ),
        )

    @cached_property
    def flat_works(self) -> tuple[Work, ...]:
        """The work of every row of the forest alone."""
        trained = [self.trained[self.offsets[row] : self.offsets[row + 1]] for row in self.rows]
        return WorkProfile.from_forest(self.forest, trained=trained).flat_works()


class _Gate:
    """Decides which packs run flat."""

    def __init__(
        self,
        maker: _MicroBatchMaker,
        *,
        loss_terms: IntArray,
        capacity: int,
        tree: TreeConfig,
        model: CostModel | None,
    ) -> None:
        self.maker, self.loss_terms, self.model, self.mode = maker, loss_terms, model, tree.gate
        max_terms = UNLIMITED if tree.max_loss_terms is None else tree.max_loss_terms
        self.caps = Caps(num_tokens=capacity, num_terms=max_terms)

    def flat_packs(self, micro: TreeMicroBatch) -> list[IntArray]:
        """The leaves of a pack in runs that keep the caps without sharing; empty where it runs as a tree."""
        is_shared = micro.layout.num_tokens < micro.layout.num_flat_tokens
        if self.mode == "never" or (self.mode == "auto" and (self.model is None or not is_shared)):
            return []
        leaves = micro.layout.leaves
        runs = next_fit(
            self.maker.forest.sequence_lens[leaves],
            shared=np.zeros_like(leaves),
            terms=self.loss_terms[leaves],
            caps=self.caps,
        )
        if self.mode == "auto":
            works = self.maker.flat_works
            flat = replace(sum((works[leaf] for leaf in leaves), Work()), num_packs=len(runs))
            if not runs_faster_flat(self.model, tree=micro.work, flat=flat):
                return []
        return [leaves[run] for run in runs]


def _flat_index(starts: IntArray, *, lens: IntArray) -> IntArray:
    """The runs starts[i]..starts[i] + lens[i], one after another."""
    return np.arange(int(lens.sum())) + np.repeat(starts - (np.cumsum(lens) - lens), lens)


def first_token_pack(token: int) -> TreeLayout:
    """The smallest pack with a scored token: what a rank computes while others still have packs left."""
    return TreeLayout.from_forest(TokenForest.from_sequences([[token, token]]))
