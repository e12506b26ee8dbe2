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

import numpy as np
import torch
from torch import Tensor

from verl_tree.cost_model import CostModel, Work, runs_faster_flat
from verl_tree.functional import shared_token_weights
from verl_tree.layout import TreeLayout
from verl_tree.metrics import ForestCounts
from verl_tree.packing import Pack, pack
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


@dataclass(frozen=True, slots=True)
class PackOptions:
    """How a mini-batch is cut.

    Attributes:
        capacity: tree tokens a pack may hold; None for one pack.
        method: of `verl_tree.packing.pack`.
        max_loss_terms: trained tokens of a pack, counted on every leaf; None for no limit.
        max_path_len: tokens of the longest row; None for no limit.
        gate: which packs run flat: `auto`, `always` or `never`.
        shared_tokens: `sum`, `mean` or `once`, see design "Shared tokens". Counted over the whole mini-batch, so it
            does not depend on the packing.
        model: what packs cost; None before anything was measured: `auto` then runs every pack as a tree.
    """

    capacity: int | None
    method: str = "auto"
    max_loss_terms: int | None = None
    max_path_len: int | None = None
    gate: str = "auto"
    shared_tokens: str = "sum"
    model: CostModel | None = None


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
    options: PackOptions,
    merge_keys: Sequence[Hashable] | None = None,
) -> TreeBatch:
    """Finds the forest of the rows that a loss reads and cuts it into packs.

    Args:
        tokens: (F_all,) the rows' token ids, one row after another.
        offsets: (B + 1,) where each row starts.
        trained: (F_all,) bool, the flat tokens that a loss reads.
        options: how to cut.
        merge_keys: (B,) what besides the tokens changes a row's forward.

    Returns:
        The packs and their counts; no packs where no loss reads any row.

    Raises:
        ValueError: a row exceeds a cap, or the method cannot pack the rows; see `verl_tree.packing.pack`.
    """
    started_s = time.perf_counter()
    num_trained = np.add.reduceat(trained, offsets[:-1], dtype=np.int64)
    rows = np.flatnonzero(num_trained)
    sequences = [tokens[offsets[row] : offsets[row + 1]] for row in rows]
    keys = None if merge_keys is None else [merge_keys[row] for row in rows]
    forest = TokenForest.from_sequences(sequences, merge_keys=keys)
    packing = pack(
        forest,
        capacity=options.capacity,
        method=options.method,
        max_loss_terms=options.max_loss_terms,
        loss_terms=num_trained[rows],
        max_path_len=options.max_path_len,
    )
    packing_s = time.perf_counter() - started_s
    cutter = _Cutter(forest, rows=rows, offsets=offsets, trained=trained, options=options)
    micro_batches, num_flat_packs = [], 0
    for one in packing.packs:
        tree = cutter.micro_batch(forest, leaves=one.leaves, rows=rows)
        flat_packs = cutter.flat_packs(one)
        if cutter.runs_flat(tree, flat_packs):
            micro_batches.extend(cutter.flat_micro_batch(leaves) for leaves in flat_packs)
            num_flat_packs += len(flat_packs)
        else:
            micro_batches.append(tree)
    model = CostModel.prior() if options.model is None else options.model
    micro_batches.sort(key=lambda micro: -model.predict(micro.work))
    counts = replace(
        ForestCounts.from_packing(packing, forest=forest),
        num_packed_tokens=sum(micro.work.num_tokens for micro in micro_batches),
        num_packs=len(micro_batches),
        num_flat_packs=num_flat_packs,
        num_capacity_tokens=(options.capacity or 0) * len(micro_batches),
    )
    return TreeBatch(micro_batches=tuple(micro_batches), counts=counts, packing_s=packing_s)


class _Cutter:
    """Makes micro-batches of packs, as trees or flat."""

    def __init__(
        self, forest: TokenForest, *, rows: IntArray, offsets: IntArray, trained: np.ndarray, options: PackOptions
    ) -> None:
        self.forest, self.rows, self.offsets, self.trained, self.options = forest, rows, offsets, trained, options
        self.lens = np.diff(offsets)
        self.num_trained = np.add.reduceat(trained, offsets[:-1], dtype=np.int64)[rows]
        self.weights = self._weights() if options.shared_tokens != "sum" and len(rows) else None

    def _weights(self) -> Tensor:
        """(F_all,) gradient weights of all rows."""
        whole = TreeLayout.from_forest(self.forest)
        flat_index = self._flat_index(self.rows[whole.leaves])
        trained_F = torch.from_numpy(self.trained[flat_index])
        weight_F = shared_token_weights(whole, trained_F, self.options.shared_tokens)
        weights = torch.zeros(len(self.trained), dtype=weight_F.dtype)
        weights[flat_index] = weight_F
        return weights

    def _flat_index(self, rows: IntArray) -> IntArray:
        return _flat_index(self.offsets[rows], lens=self.lens[rows])

    def micro_batch(self, forest: TokenForest, *, leaves: IntArray | None, rows: IntArray) -> TreeMicroBatch:
        """Some leaves of a forest whose trajectories are the given rows of the mini-batch."""
        layout = TreeLayout.from_forest(forest, leaves)
        pack_rows = rows[layout.leaves]
        flat_index = self._flat_index(pack_rows)
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

    def flat_packs(self, one: Pack) -> list[IntArray]:
        """The leaves of a pack in runs whose flat tokens and loss terms keep the caps."""
        lens, terms = self.forest.sequence_lens, self.num_trained
        max_tokens, max_terms = self.options.capacity, self.options.max_loss_terms
        runs: list[list[int]] = []
        num_tokens = num_terms = 0
        for leaf in one.leaves.tolist():
            num_tokens, num_terms = num_tokens + int(lens[leaf]), num_terms + int(terms[leaf])
            is_over = (max_tokens is not None and num_tokens > max_tokens) or (
                max_terms is not None and num_terms > max_terms
            )
            if not runs or is_over:
                runs.append([])
                num_tokens, num_terms = int(lens[leaf]), int(terms[leaf])
            runs[-1].append(leaf)
        return [np.array(run) for run in runs]

    def runs_flat(self, tree: TreeMicroBatch, flat_packs: list[IntArray]) -> bool:
        """Whether the gate opens for a pack."""
        if self.options.gate != "auto":
            return self.options.gate == "always"
        if self.options.model is None or tree.layout.num_tokens == tree.layout.num_flat_tokens:
            return False
        leaves = tree.layout.leaves
        lens = self.forest.sequence_lens[leaves]
        flat = Work(
            num_tokens=int(lens.sum()),
            num_visible_pairs=int((lens * (lens + 1) // 2).sum()),
            num_scored=int(self.num_trained[leaves].sum()),
            num_segments=len(leaves),
            num_packs=len(flat_packs),
        )
        return runs_faster_flat(self.options.model, tree=tree.work, flat=flat)

    def flat_micro_batch(self, leaves: IntArray) -> TreeMicroBatch:
        """Some rows as one tree each."""
        sequences = [self.forest.sequence(leaf) for leaf in leaves.tolist()]
        apart = TokenForest.from_sequences(sequences, merge_keys=range(len(sequences)))
        return self.micro_batch(apart, leaves=None, rows=self.rows[leaves])


def _flat_index(starts: IntArray, *, lens: IntArray) -> IntArray:
    """The runs starts[i]..starts[i] + lens[i], one after another."""
    return np.arange(int(lens.sum())) + np.repeat(starts - (np.cumsum(lens) - lens), lens)


def first_token_pack(token: int) -> TreeLayout:
    """The smallest pack with a scored token: what a rank computes while others still have packs left."""
    return TreeLayout.from_forest(TokenForest.from_sequences([[token, token]]))
