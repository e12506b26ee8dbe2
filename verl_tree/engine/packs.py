"""The rows of a verl mini-batch as packs of their forest, and where the results of a pack belong among the rows.

A row is a trajectory. Rows that no loss reads (padding or rejected rows, whose mask is all zero) are not in the forest
and cost nothing; their outputs are zeros. verl's loss runs on the rows of one pack at a time, so its denominators count
trajectories and their tokens, never packed tokens.

If the cost model predicts that a pack is faster flat, the pack runs flat: its rows become trees of one row each, in as
many micro-batches as the capacity requires. Nothing after that differs.

Legend: B rows of the mini-batch, of which a loss reads S; F flat tokens of a pack, F_all flat tokens of the mini-batch;
T tree tokens of a pack.
"""

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from verl_tree.config import TreeConfig
from verl_tree.cost.model import CostModel, Work, runs_faster_flat
from verl_tree.functional import shared_token_weights
from verl_tree.packing import pack
from verl_tree.packing.baselines import next_fit
from verl_tree.packing.counts import ForestCounts
from verl_tree.packing.problem import UNLIMITED, Caps
from verl_tree.tree import TokenForest
from verl_tree.tree.layout import TreeLayout
from verl_tree.tree.nodes import IntArray
from verl_tree.tree.rows import ranges


@dataclass(frozen=True, slots=True, eq=False)
class ReadRows:
    """The rows of a mini-batch that a loss reads, as one forest with the leaves 0..S - 1."""

    forest: TokenForest
    rows: IntArray  # (S,) int64, each leaf's row in the mini-batch
    starts: IntArray  # (S,) int64, where each leaf starts among the F_all flat tokens
    num_trained: IntArray  # (S,) int64, tokens of each leaf that a loss reads
    trained: np.ndarray  # (F_all,) bool, the flat tokens that a loss reads
    weights: Tensor | None = None  # (F_all,) gradient weights of the flat tokens. None: all are 1

    @classmethod
    def from_batch(
        cls,
        tokens: np.ndarray,
        *,
        offsets: IntArray,
        trained: np.ndarray,
        merge_keys: Sequence[Hashable] | None = None,
    ) -> Self:
        """Build the forest of the rows that a loss reads; see `split_into_packs`."""
        num_trained = np.add.reduceat(trained, offsets[:-1], dtype=np.int64)
        rows = np.flatnonzero(num_trained)
        keys = None if merge_keys is None else [merge_keys[row] for row in rows]
        sequences = [tokens[offsets[row] : offsets[row + 1]] for row in rows]
        return cls(
            forest=TokenForest.from_sequences(sequences, merge_keys=keys),
            rows=rows,
            starts=offsets[rows],
            num_trained=num_trained[rows],
            trained=trained,
        )

    def flat_index(self, leaves: IntArray) -> IntArray:
        """Return the places of some leaves' tokens among the F_all flat tokens, leaf after leaf."""
        return ranges(self.starts[leaves], self.forest.sequence_lens[leaves])

    def weigh(self, shared_tokens: str) -> Self:
        """Add the gradient weights of an objective for shared tokens; see `shared_token_weights`.

        Leaves are counted over the whole mini-batch, so the objective does not depend on the packing.
        """
        if shared_tokens == "sum":
            return self
        whole = TreeLayout.from_forest(self.forest)
        index = self.flat_index(whole.leaves)
        weight_F = shared_token_weights(whole, torch.from_numpy(self.trained[index]), shared_tokens)
        weights = torch.zeros(len(self.trained), dtype=weight_F.dtype)
        weights[index] = weight_F
        return replace(self, weights=weights)


@dataclass(frozen=True, slots=True, eq=False)
class TreeMicroBatch:
    """One pack on the host, what it computes (`work`), and how its results map to rows."""

    rows: IntArray  # (s,) int64, the rows of the mini-batch in the pack, in the order of `layout.leaves`
    layout: TreeLayout
    wanted_T: Tensor  # (T,) bool, tokens whose log-prob a loss reads
    flat_index_F: Tensor  # (F,) int64, the place of each (leaf, position) among the F_all flat tokens of the mini-batch
    gradient_weight_F: Tensor | None  # (F,) float32, see `shared_token_weights`. None: all are 1
    work: Work
    is_flat: bool


@dataclass(frozen=True, slots=True, eq=False)
class TreeBatch:
    """The packs of one mini-batch on one rank, and the seconds spent on finding the forest and packing it.

    The dearest pack comes first, because ranks run in step and packs of similar cost should meet.
    """

    micro_batches: tuple[TreeMicroBatch, ...]
    counts: ForestCounts
    packing_s: float


def split_into_packs(
    tokens: np.ndarray,
    *,
    offsets: IntArray,
    trained: np.ndarray,
    capacity: int,
    config: TreeConfig,
    cost_model: CostModel,
    merge_keys: Sequence[Hashable] | None = None,
) -> TreeBatch:
    """Find the forest of the rows that a loss reads and cut it into packs; none if no loss reads any row.

    `tokens` (F_all,) are the rows one after another, `offsets` (B + 1,) the start of each row. `trained` (F_all,) bool
    marks the tokens that a loss reads. `merge_keys` (B,) is what besides the tokens changes a row's forward.

    Raises:
        ValueError: A row exceeds a cap, or the method cannot pack the rows; see `verl_tree.packing.pack`.
    """
    started_s = time.perf_counter()
    read = ReadRows.from_batch(tokens, offsets=offsets, trained=trained, merge_keys=merge_keys)
    packing = pack(
        read.forest,
        capacity=capacity,
        method=config.packing,
        max_loss_terms=config.max_loss_terms,
        loss_terms=read.num_trained,
        max_path_len=config.max_path_len,
    )
    packing_s = time.perf_counter() - started_s
    read = read.weigh(config.shared_tokens)
    caps = Caps(num_tokens=capacity, num_terms=UNLIMITED if config.max_loss_terms is None else config.max_loss_terms)
    micro_batches = [
        micro
        for packed in packing.packs
        for micro in flat_or_tree(read, packed.leaves, caps=caps, gate=config.gate, cost_model=cost_model)
    ]
    micro_batches.sort(key=lambda micro: -cost_model.predict(micro.work))
    counts = replace(
        ForestCounts.from_packing(packing, forest=read.forest),
        num_packed_tokens=sum(micro.work.num_tokens for micro in micro_batches),
        num_packs=len(micro_batches),
        num_flat_packs=sum(micro.is_flat for micro in micro_batches),
        num_capacity_tokens=capacity * len(micro_batches),
    )
    return TreeBatch(micro_batches=tuple(micro_batches), counts=counts, packing_s=packing_s)


def flat_or_tree(
    read: ReadRows, leaves: IntArray, *, caps: Caps, gate: str, cost_model: CostModel
) -> list[TreeMicroBatch]:
    """Lay out one pack, its leaves in DFS order, as a tree; or flat if the gate says so.

    The gate is `never`, `always`, or `auto`: flat if the cost model predicts that to be faster (its prior never does).
    Flat micro-batches keep `caps`, counted without sharing.
    """
    tree = lay_out_tree(read, leaves)
    if gate == "never":
        return [tree]
    bins = next_fit(
        read.forest.sequence_lens[leaves], shared=np.zeros_like(leaves), terms=read.num_trained[leaves], caps=caps
    )
    num_scored = int(read.num_trained[leaves].sum())
    flat = Work.flat(read.forest.sequence_lens[leaves], num_scored=num_scored, num_packs=len(bins))
    if gate == "auto" and not runs_faster_flat(cost_model, tree=tree.work, flat=flat):
        return [tree]
    return [lay_out_flat(read, leaves[members]) for members in bins]


def lay_out_tree(read: ReadRows, leaves: IntArray) -> TreeMicroBatch:
    """Lay out some leaves of the forest as one tree."""
    return _micro_batch(read, TreeLayout.from_forest(read.forest, leaves), leaves=leaves, is_flat=False)


def lay_out_flat(read: ReadRows, leaves: IntArray) -> TreeMicroBatch:
    """Lay out some leaves of the forest, each as a tree of its own."""
    sequences = [read.forest.sequence(leaf) for leaf in leaves.tolist()]
    layout = TreeLayout.from_forest(TokenForest.from_sequences(sequences, merge_keys=range(len(sequences))))
    return _micro_batch(read, layout, leaves=leaves[layout.leaves], is_flat=True)


def _micro_batch(read: ReadRows, layout: TreeLayout, *, leaves: IntArray, is_flat: bool) -> TreeMicroBatch:
    """Attach a layout to its rows. `leaves` are the forest's, in the order of `layout.leaves`."""
    flat_index = read.flat_index(leaves)
    wanted_T = torch.zeros(layout.num_tokens, dtype=torch.bool)
    wanted_T[layout.tree_index_F[torch.from_numpy(read.trained[flat_index])]] = True
    flat_index_F = torch.from_numpy(flat_index)
    return TreeMicroBatch(
        rows=read.rows[leaves],
        layout=layout,
        wanted_T=wanted_T,
        flat_index_F=flat_index_F,
        gradient_weight_F=None if read.weights is None else read.weights[flat_index_F],
        work=Work(
            num_tokens=layout.num_tokens,
            num_visible_pairs=int(layout.position_T.sum()) + layout.num_tokens,
            num_scored=int(wanted_T.sum()),
            num_nodes=layout.num_nodes,
            num_packs=1,
        ),
        is_flat=is_flat,
    )


def first_token_pack(token: int) -> TreeLayout:
    """Lay out the smallest pack with a scored token, for a rank that runs out of packs before the others."""
    return TreeLayout.from_forest(TokenForest.from_sequences([[token, token]]))
