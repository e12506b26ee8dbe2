"""The rows of a verl mini-batch as micro-batches of their forest, and where the results belong among the rows.

A row is a trajectory. Rows that no loss reads (padding or rejected rows, whose mask is all zero) are not in the forest
and cost nothing; their outputs are zeros. Neither are rows that teach nothing (`engine.losses.live_rows`). verl's loss
runs on the rows of one micro-batch at a time, so its denominators count trajectories and their tokens, never packed
tokens.

Trees that fit the capacity are packed together. A tree that exceeds it is *relayed*, as one micro-batch of several
sections, or cut into packs: whichever the cost model predicts to be faster. If it predicts that a pack is faster flat,
the pack runs flat: its rows become trees of one row each, in as many micro-batches as the capacity requires. Nothing
after that differs.

Legend: B rows of the mini-batch, of which a loss reads S; F flat tokens of a pack, F_all flat tokens of the mini-batch;
T tree tokens of a pack.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from verl_tree.config import TreeConfig
from verl_tree.cost.model import CostModel, Work, runs_faster_flat
from verl_tree.engine.rows.computed_paths import ComputedPaths
from verl_tree.engine.rows.read_rows import ReadRows
from verl_tree.functional.images import PackImages
from verl_tree.packing import Packing, check_caps, lower_bound, pack
from verl_tree.packing.baselines import next_fit
from verl_tree.packing.counts import ForestCounts
from verl_tree.packing.problem import UNLIMITED, Caps
from verl_tree.relay.calls import RelayCalls
from verl_tree.relay.cut import MIN_SECTION_COST, Cut, cut
from verl_tree.relay.run import Mode, NumCalls
from verl_tree.tree import TokenForest
from verl_tree.tree.layout import TreeLayout
from verl_tree.tree.nodes import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class TreeMicroBatch:
    """One pack or relayed tree on the host, what it computes (`work`), and how its results map to rows."""

    rows: IntArray  # (s,) int64, the rows of the mini-batch that it holds, in the order of `layout.leaves`
    layout: TreeLayout
    cut: Cut  # One section for a pack, several for a relayed tree
    spine_cut: Cut  # That of its spine; no sections for a pack
    wanted_T: Tensor  # (T,) bool, tokens whose log-prob a loss reads
    flat_index_F: Tensor  # (F,) int64, the place of each (leaf, position) among the F_all flat tokens of the mini-batch
    gradient_weight_F: Tensor | None  # (F,) float32, see `shared_token_weights`. None: all are 1
    work: Work
    is_flat: bool
    images: PackImages | None = None  # What the model reads besides tokens, if it reads images

    @property
    def is_relayed(self) -> bool:
        """Whether it is one tree in several sections."""
        return self.cut.num_sections > 1

    def num_calls(self, mode: Mode) -> NumCalls:
        """Return how many calls of the model it takes."""
        return NumCalls.of(mode, num_sections=self.cut.num_sections, num_spine_calls=self.spine_cut.num_sections)

    def paths(self, *, scores_own_tokens: bool) -> ComputedPaths:
        """Return what it computes with gradient, in verl's terms."""
        scorer_T = self.layout.parent_T[self.wanted_T]
        num_projected = self.layout.num_tokens if scores_own_tokens else len(scorer_T[scorer_T >= 0].unique())
        return ComputedPaths.of_layout(self.layout, num_projected=num_projected)

    def calls(self, *, scores_own_tokens: bool, max_loss_terms: int | None = None) -> RelayCalls:
        """Plan its calls. A log-prob is made by the parent of its token, a value by the token itself."""
        layout = self.layout
        every = np.arange(layout.num_tokens)
        return RelayCalls.of_cut(
            self.cut,
            spine_cut=self.spine_cut,
            scorer_T=every if scores_own_tokens else layout.parent_T.numpy(),
            wanted_T=every >= 0 if scores_own_tokens else self.wanted_T.numpy(),
            tree_index_F=layout.tree_index_F.numpy(),
            leaf_offsets=layout.leaf_offsets,
            max_loss_terms=max_loss_terms,
        )


@dataclass(frozen=True, slots=True, eq=False)
class TreeBatch:
    """The micro-batches of one mini-batch on one rank, and the seconds spent on finding the forest and cutting it.

    `capacity` is that of a pack or section.

    The dearest comes first, because ranks run in step and micro-batches of similar cost should meet.
    """

    micro_batches: tuple[TreeMicroBatch, ...]
    counts: ForestCounts
    packing_s: float
    capacity: int


def split_into_packs(
    token_ids: np.ndarray,
    *,
    offsets: IntArray,
    trained: np.ndarray,
    capacity: int,
    config: TreeConfig,
    cost_model: CostModel,
    mode: Mode = "rows",
    keys: IntArray | None = None,
    live: np.ndarray | None = None,
) -> TreeBatch:
    """Find the forest of the rows that a loss reads and cut it; no micro-batch if no loss reads any row.

    `token_ids` (F_all,) are the rows one after another, `offsets` (B + 1,) the start of each row. `trained` (F_all,)
    bool marks the tokens that a loss reads. `mode` says which model calls a relayed tree takes. `keys` (F_all,) are the
    tokens' keys where more than the id changes a token's forward (`verl_tree.tree.row_keys`). `live` (B,) bool leaves
    the other rows out; None leaves out none.

    Raises:
        ValueError: A row exceeds a cap, or the method cannot pack the rows; see `verl_tree.packing.pack`.
    """
    started_s = time.perf_counter()
    read = ReadRows.from_batch(token_ids, offsets=offsets, trained=trained, keys=keys, live=live)
    read = read.weigh(config.shared_tokens)
    check_caps(
        read.forest,
        capacity=None,
        max_loss_terms=config.max_loss_terms,
        loss_terms=read.num_trained,
        max_path_len=config.max_path_len,
    )
    relayed = [
        micro
        for leaves in read.trees()
        if (micro := relay_tree(read, leaves, capacity=capacity, config=config, cost_model=cost_model, mode=mode))
    ]
    forest, packed = read.forest, np.arange(read.forest.num_leaves)
    if relayed:
        in_order = forest.order
        packed = in_order[~np.isin(read.rows[in_order], np.concatenate([micro.rows for micro in relayed]))]
        forest = read.forest_of(packed)
    packing = pack(
        forest,
        capacity=capacity,
        method=config.packing,
        max_loss_terms=config.max_loss_terms,
        loss_terms=read.num_trained[packed],
        max_path_len=config.max_path_len,
    )
    packing_s = time.perf_counter() - started_s

    caps = Caps(num_tokens=capacity, num_terms=UNLIMITED if config.max_loss_terms is None else config.max_loss_terms)
    micro_batches = relayed + [
        micro
        for part in packing.packs
        for micro in flat_or_tree(read, packed[part.leaves], caps=caps, gate=config.gate, cost_model=cost_model)
    ]
    micro_batches.sort(key=lambda micro: -cost_model.predict(micro.work))
    return TreeBatch(
        micro_batches=tuple(micro_batches),
        counts=_count(read, packing, micro_batches, capacity=capacity),
        packing_s=packing_s,
        capacity=capacity,
    )


def _count(read: ReadRows, packing: Packing, micro_batches: Sequence[TreeMicroBatch], *, capacity: int) -> ForestCounts:
    """Count what the micro-batches compute of a forest; `packing` is that of its trees which are not relayed."""
    forest = read.forest
    relayed = [micro for micro in micro_batches if micro.is_relayed]
    num_sections = sum(micro.cut.num_sections for micro in relayed)
    num_packs = len(micro_batches) - len(relayed)
    return ForestCounts(
        num_flat_tokens=forest.num_flat_tokens,
        num_tree_tokens=forest.num_tokens,
        num_all_tokens=read.num_all_tokens,
        num_packed_tokens=sum(micro.work.num_tokens for micro in micro_batches),
        num_nodes=forest.num_nodes,
        num_leaves=forest.num_leaves,
        num_packs=num_packs,
        num_flat_packs=sum(micro.is_flat for micro in micro_batches),
        # A relayed tree computes each of its tokens once, which is the least possible.
        num_lower_bound_tokens=packing.lower_bound + sum(micro.work.num_tokens for micro in relayed),
        num_capacity_tokens=capacity * (num_packs + num_sections),
        depth=forest.depth,
        num_sections=num_sections,
        num_spine_tokens=sum(len(micro.cut.spine) for micro in relayed),
        num_context_tokens=sum(micro.work.num_context for micro in relayed),
    )


def relay_tree(
    read: ReadRows, leaves: IntArray, *, capacity: int, config: TreeConfig, cost_model: CostModel, mode: Mode
) -> TreeMicroBatch | None:
    """Lay out one tree, its leaves in DFS order, to be relayed; None if it is better packed.

    A tree that fits is packed. One that does not is relayed where `tree.relay` says so or a trajectory leaves no other
    way. With `auto`, it is relayed unless packs are predicted to be faster. Their lower bound stands for the packs,
    which are within a few percent of it.
    """
    lens = read.forest.sequence_lens[leaves]
    num_tokens = int(lens.sum() - read.forest.subset_lcp(leaves).sum())
    is_forced = lens.max(initial=0) > capacity
    if num_tokens <= capacity or config.relay == "never" or (config.gate == "always" and not is_forced):
        return None
    relayed = lay_out_relayed(read, leaves, capacity=capacity, cost_model=cost_model, mode=mode)
    if config.relay == "always" or is_forced:
        return relayed
    least = lower_bound(
        read.forest_of(leaves),
        capacity=capacity,
        max_loss_terms=config.max_loss_terms,
        loss_terms=read.num_trained[leaves],
    )
    work = relayed.work
    packs = replace(
        work,
        num_tokens=least,
        # A token that is computed again sees its path again.
        num_visible_pairs=work.num_visible_pairs * least // num_tokens,
        num_packs=-(-least // capacity),
        num_spine=0,
        num_context=0,
    )
    return None if cost_model.predict(packs) < cost_model.predict(work) else relayed


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


def lay_out_relayed(
    read: ReadRows, leaves: IntArray, *, capacity: int, cost_model: CostModel, mode: Mode = "rows"
) -> TreeMicroBatch:
    """Lay out some leaves of the forest as one tree in sections of at most `capacity` tokens."""
    whole = lay_out_tree(read, leaves)
    fixed = cost_model.s_per_pack / cost_model.s_per_token if cost_model.s_per_token else 0.0
    sections = cut(
        whole.layout.subtree_end_T.numpy(),
        whole.layout.position_T.numpy(),
        capacity=capacity,
        section_cost=max(fixed, MIN_SECTION_COST * capacity),
    )
    spine_cut = sections.spine_cut(capacity)
    # Tokens that go forward once more, without gradient, and context that is gathered for them.
    once_more = {
        "forward": (0, 0),
        "rows": (len(sections.spine), spine_cut.num_context_tokens),
        "joint": (whole.layout.num_tokens, sections.num_context_tokens),
    }
    num_spine, num_context = once_more[mode] if sections.num_sections > 1 else (0, 0)
    work = replace(
        whole.work,
        num_packs=sections.num_sections,
        num_spine=num_spine,
        num_context=sections.num_context_tokens + num_context,
    )
    return replace(whole, cut=sections, spine_cut=spine_cut, work=work)


def lay_out_flat(read: ReadRows, leaves: IntArray) -> TreeMicroBatch:
    """Lay out some leaves of the forest, each as a tree of its own."""
    sequences = [read.forest.sequence(leaf) for leaf in leaves.tolist()]
    layout = TreeLayout.from_forest(TokenForest.from_sequences(sequences, merge_keys=range(len(sequences))))
    return _micro_batch(read, layout, leaves=leaves[layout.leaves], is_flat=True)


def _micro_batch(read: ReadRows, layout: TreeLayout, *, leaves: IntArray, is_flat: bool) -> TreeMicroBatch:
    """Attach a layout to its rows. `leaves` are the forest's, in the order of `layout.leaves`."""
    flat_index = read.flat_index(leaves)
    layout = layout.with_token_ids(torch.from_numpy(read.token_ids[flat_index]))
    wanted_T = torch.zeros(layout.num_tokens, dtype=torch.bool)
    wanted_T[layout.tree_index_F[torch.from_numpy(read.trained[flat_index])]] = True
    flat_index_F = torch.from_numpy(flat_index)
    whole = Cut.whole(layout.subtree_end_T.numpy())
    return TreeMicroBatch(
        rows=read.rows[leaves],
        layout=layout,
        cut=whole,
        spine_cut=whole.spine_cut(layout.num_tokens),
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
    """Lay out the smallest pack with a scored token, for a rank that runs out of micro-batches before the others."""
    return TreeLayout.from_forest(TokenForest.from_sequences([[token, token]]))
