"""The cost of a pack or a section in seconds: a linear model of its work, fitted to measured times while training runs.

A pack takes time for its tokens (everything but attention), its visible pairs (attention), its nodes (many short nodes
need more attention calls for the same pairs), its scored tokens (logits) and once for itself (launches, collectives).
A tree that is relayed takes time for its spine and for the context of its sections, too, and one with images for the
vision tower. The host counts all of this before anything is computed, so the time can be predicted when the rank and
the form (tree, flat or relay) are chosen.
See docs/balance.md::

    WorkProfile ──range_work──▶ Work ──CostModel.predict──▶ seconds
                                 │                             ▲
                  measured time ─┴──CostFitter.add──fit────────┘

Legend: S trajectories (leaves), N nodes, K ranges, W fields of `Work`, in their order.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from verl_tree.tree import TokenForest
from verl_tree.tree.nodes import IntArray
from verl_tree.tree.shape import ForestShape

FloatArray = NDArray[np.floating]

COEFFICIENT_METRICS = (
    "s_per_token",
    "s_per_pair",
    "s_per_scored",
    "s_per_segment",
    "s_per_pack",
    "s_per_spine",
    "s_per_context",
    "s_per_feature",
)
"""Metric names of the fields of `CostModel`, in their order; `segment` stands for node."""


@dataclass(frozen=True, slots=True)
class Work:
    """Amounts of what is computed; `sum(works, Work())` adds any number of them."""

    num_tokens: int = 0  # Tree tokens
    num_visible_pairs: int = 0  # (query, key) pairs of attention: the sum of position + 1 over the tokens
    num_scored: int = 0  # Tokens whose log-prob a loss reads
    num_nodes: int = 0
    num_packs: int = 0  # Forward/backward passes: 1 for a pack or a section, 0 for nothing
    # Tokens forwarded once more, without gradient: the spine, or all in the joint form. Their pairs count once only.
    num_spine: int = 0
    num_context: int = 0  # Context tokens whose keys and values are gathered: the sum over sections and spine forwards
    num_features: int = 0  # What the vision tower makes: an image's in every pack and section that shows it, once each

    @classmethod
    def flat(cls, lens: IntArray, *, num_scored: int, num_packs: int) -> Self:
        """Count the work of trajectories of `lens` tokens (S,) that share nothing."""
        return cls(
            num_tokens=int(lens.sum()),
            num_visible_pairs=int(_num_pairs(lens).sum()),
            num_scored=num_scored,
            num_nodes=len(lens),
            num_packs=num_packs,
        )

    def __add__(self, other: Self) -> Self:
        return type(self)(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True, eq=False)
class WorkProfile:
    """The work of the trajectories of a forest, added up leaf by leaf in DFS order.

    It gives the work of any range of the order, as a forest of its own, in constant time. The first leaf of the range
    pays for its whole path, every other leaf for the tokens that it does not share with the leaf before it.

    Example: 0 = [1 2 3 4], 1 = [1 2 5], 2 = [1 2] have the order 2 0 1, lens 2 4 3 and lcp 0 2 2. The range 1..3 (the
    trajectories 0 and 1) has 4 + (3 - 2) = 5 tokens and 10 + 3 = 13 visible pairs. Alone, the range 2..3 has 3 tokens:
    a cut before it computes lcp[2] = 2 tokens twice.

    Attributes:
        order: (S,) int64, the trajectories in DFS order.
        lcp: (S,) int64, tokens that each shares with the one before it in DFS order; lcp[0] = 0.
        path_counts: (S, W) int64, work of each leaf alone. No spine: a rank decides later which trees it relays.
        cumulative_counts: (S + 1, W) int64, work of the first leaves of the order, with `num_packs` 0.
    """

    order: IntArray
    lcp: IntArray
    path_counts: IntArray
    cumulative_counts: IntArray

    @classmethod
    def from_forest(cls, forest: TokenForest, *, trained: Sequence[np.ndarray] | None = None) -> Self:
        """Profile a forest.

        `trained` has one (len,) bool array per trajectory, in the order given: the tokens whose log-prob a loss reads.
        The first token never counts, because nothing can score it. None: all others count.

        Two numbers of a range are estimates. A shared token is scored if the first leaf of the range that has it trains
        it; one that only a later leaf trains is missed. Nodes are exact for the whole forest and for one leaf; another
        range misses a branch point on the path of its first leaf if a leaf before the range branches off or ends there.

        Raises:
            ValueError: `trained` does not fit the trajectories.
        """
        path_scored, new_scored = _count_scored(forest, trained)
        return cls.from_shape(ForestShape.of(forest), path_scored=path_scored, new_scored=new_scored)

    @classmethod
    def from_shape(
        cls,
        shape: ForestShape,
        *,
        path_scored: IntArray,
        new_scored: IntArray,
        path_features: IntArray | None = None,
        new_features: IntArray | None = None,
    ) -> Self:
        """Profile a forest whose tokens are elsewhere; see `from_forest`.

        `path_scored` and `new_scored` (S,) count the scored tokens of each leaf, in DFS order: of its whole path, and
        of what it does not share with the leaf before it. `path_features` and `new_features` count its image tokens in
        the same way; an image that stands at several places of the tree is then counted at each. None: no images.
        """
        order, lcp, nodes = shape.order, shape.lcp, shape.nodes
        lens = shape.sequence_lens[order]
        # Where a node starts inside its first leaf's new tokens, the leaf after its last one departs; see NodeTable.
        is_cut = nodes.start > lcp[nodes.first_leaf]
        num_cuts = np.bincount(nodes.last_leaf[is_cut], minlength=len(order))
        pairs = _num_pairs(lens)
        one, none = np.ones_like(lens), np.zeros_like(lens)
        num_nodes = (lens > lcp) + num_cuts
        path_features = none if path_features is None else path_features
        new_features = none if new_features is None else new_features
        new_counts = np.stack(
            [lens - lcp, pairs - _num_pairs(lcp), new_scored, num_nodes, none, none, none, new_features], axis=1
        )
        cumulative_counts = np.zeros((len(order) + 1, new_counts.shape[1]), dtype=np.int64)
        np.cumsum(new_counts, axis=0, out=cumulative_counts[1:])
        return cls(
            order=order,
            lcp=lcp,
            path_counts=np.stack([lens, pairs, path_scored, one, one, none, none, path_features], axis=1),
            cumulative_counts=cumulative_counts,
        )

    def split(self, sizes: Sequence[int]) -> list[Self]:
        """Cut the profile of several forests, one after another, into theirs; the `order` of each starts at 0 again.

        `sizes` has the number of trajectories of each forest. Those that the profile lacks are idle: they cost nothing,
        and are last in the order, so that no range of the others costs more or less.
        """
        bounds = np.cumsum([0, *sizes])
        num_read = np.bincount(np.searchsorted(bounds, self.order, side="right") - 1, minlength=len(sizes))
        ends = np.cumsum(num_read)
        starts = ends - num_read
        assert not self.lcp[starts[num_read > 0]].any(), "forests share nothing"
        return [
            type(self)(
                order=self.order[start:end] - first,
                lcp=self.lcp[start:end],
                path_counts=self.path_counts[start:end],
                cumulative_counts=self.cumulative_counts[start : end + 1] - self.cumulative_counts[start],
            )._with_idle_leaves(size)
            for start, end, first, size in zip(starts.tolist(), ends.tolist(), bounds[:-1].tolist(), sizes, strict=True)
        ]

    def _with_idle_leaves(self, num_leaves: int) -> Self:
        """Return the profile of `num_leaves` trajectories, of which those that are not in this one are idle."""
        if num_leaves == self.num_leaves:
            return self
        idle = np.setdiff1d(np.arange(num_leaves), self.order)
        none = np.zeros((len(idle), self.path_counts.shape[1]), dtype=np.int64)
        return type(self)(
            order=np.concatenate([self.order, idle]),
            lcp=np.concatenate([self.lcp, np.zeros_like(idle)]),
            path_counts=np.concatenate([self.path_counts, none]),
            cumulative_counts=np.concatenate([self.cumulative_counts, self.cumulative_counts[-1] + none]),
        )

    @property
    def num_leaves(self) -> int:
        """Number of trajectories S."""
        return len(self.order)

    def range_counts(self, starts: IntArray, ends: IntArray) -> IntArray:
        """Count the work of the non-empty ranges starts..ends (K,) of the DFS order, each as one pack: (K, W) int64."""
        starts, ends = np.asarray(starts), np.asarray(ends)
        assert ((starts >= 0) & (starts < ends) & (ends <= self.num_leaves)).all()
        return self.path_counts[starts] + self.cumulative_counts[ends] - self.cumulative_counts[starts + 1]

    def range_work(self, start: int, end: int) -> Work:
        """Count the work of the leaves start..end of the DFS order as one pack."""
        return Work(*self.range_counts(np.array([start]), np.array([end]))[0].tolist())


def _num_pairs(lens: IntArray) -> IntArray:
    return lens * (lens + 1) // 2


def _count_scored(forest: TokenForest, trained: Sequence[np.ndarray] | None) -> tuple[IntArray, IntArray]:
    """Count the scored tokens of each leaf's path and of its new tokens, (S,) int64 each, in DFS order."""
    lens = forest.sequence_lens[forest.order]
    first_new = np.maximum(forest.lcp, 1)
    if trained is None:
        return lens - 1, lens - first_new
    shapes = [np.shape(mask) for mask in trained]
    if shapes != [(length,) for length in forest.sequence_lens.tolist()]:
        raise ValueError(
            f"trained has masks of shapes {shapes[:8]} for trajectories of {forest.sequence_lens[:8].tolist()} tokens "
            "(the first eight): give one mask per trajectory, one entry per token"
        )
    masks = [np.asarray(trained[index], dtype=bool) for index in forest.order]
    path = [np.count_nonzero(mask[1:]) for mask in masks]
    new = [np.count_nonzero(mask[start:]) for mask, start in zip(masks, first_new, strict=True)]
    return np.array(path, dtype=np.int64), np.array(new, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds per unit of work, finite and at least 0. The fields follow those of `Work`.

    Raises:
        ValueError: A coefficient is negative or not finite.
    """

    s_per_token: float
    s_per_pair: float
    s_per_scored: float
    s_per_node: float
    s_per_pack: float
    s_per_spine: float
    s_per_context: float
    s_per_feature: float

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value} is not a time: give a finite number of seconds, at least 0")

    @classmethod
    def prior(cls) -> Self:
        """Return the model that is used before there is a fit. Its unit is a token, not a second.

        Forward and backward cost 6 FLOPs per parameter and token, and 14 per pair, head, head dimension and layer (4
        forward, 10 backward with recomputed scores). A layer of hidden size h has about 12 h^2 parameters and attention
        as wide as h, so a pair costs 14 h / (72 h^2) of a token: one 21,000th at h = 4096.

        A forward is a third of forward and backward, and so is a spine token. A context token is moved, not computed:
        with h / 4 numbers each of keys and values in 2 bytes, 4 bytes a number forward (read, written) and 10 backward
        (the gradient read, its float32 sum read and written), that is 7 h bytes per layer. A GPU does some 150 FLOPs
        of a projection while it moves a byte, so this takes as long as 1,050 h of the 72 h^2: one 280th at h = 4096.

        A tower computes a feature from four patches. It has a twelfth of the parameters of the text part (0.6 of 7.6
        billion in Qwen2.5-VL-7B), so a feature costs a third of a token.

        Everything else is free. Under this model a tree is never slower than its flat trajectories.
        """
        return cls(
            s_per_token=1.0,
            s_per_pair=1 / 20_000,
            s_per_scored=0.0,
            s_per_node=0.0,
            s_per_pack=0.0,
            s_per_spine=1 / 3,
            s_per_context=1 / 300,
            s_per_feature=1 / 3,
        )

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, float], *, prefix: str = "cost_model") -> Self:
        """Read the coefficients that `as_metrics` wrote.

        Raises:
            ValueError: A coefficient is missing, negative or not finite.
        """
        names = [f"{prefix}/{name}" for name in COEFFICIENT_METRICS]
        missing = [name for name in names if name not in metrics]
        if missing:
            raise ValueError(f"the metrics lack {missing}: give those that CostModel.as_metrics({prefix!r}) wrote")
        return cls(*(float(metrics[name]) for name in names))

    def as_metrics(self, prefix: str = "cost_model") -> dict[str, float]:
        """Return the coefficients under the names `{prefix}/s_per_token` and so on."""
        return {f"{prefix}/{name}": value for name, value in zip(COEFFICIENT_METRICS, astuple(self), strict=True)}

    def predict(self, work: Work) -> float:
        """Predict the seconds of some work."""
        return sum(amount * seconds for amount, seconds in zip(astuple(work), astuple(self), strict=True))

    def predict_counts(self, counts: IntArray) -> FloatArray:
        """Predict the seconds of many works: (K, W), as from `WorkProfile.range_counts`, to (K,) float64."""
        return counts @ np.array(astuple(self), dtype=np.float64)


def runs_faster_flat(model: CostModel, *, tree: Work, flat: Work) -> bool:
    """Return whether trajectories are predicted to be faster flat than as a tree. Ties go to the tree."""
    return model.predict(flat) < model.predict(tree)
