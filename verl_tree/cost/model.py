"""What a pack costs in seconds: a linear model of the work in it, fitted online to measured pack times.

A pack takes time for its tokens (everything but attention is linear in them), for its visible pairs (attention),
for its segments (a fragmented tree needs more attention calls for the same pairs), for its scored positions (logits)
and once for itself (launches, collectives). All of these are counted on the host before anything is computed, so
whoever places work (which rank, tree or flat) can ask for its time in advance::

    WorkProfile ──range_work──▶ Work ──CostModel.predict──▶ seconds
                                 │                             ▲
                  measured time ─┴──CostFitter.add──fit────────┘

Until enough packs are measured (`verl_tree.cost.fit`) `CostModel.prior` stands in; its numbers are relative, which is
all that balancing needs.

Legend: S trajectories (leaves), N nodes, K ranges; 5 stands for the fields of `Work`, in their order.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from typing import Self

import numpy as np
from numpy.typing import NDArray

from verl_tree.tree import TokenForest
from verl_tree.tree.nodes import IntArray

FloatArray = NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class Work:
    """What is computed; `sum(works, Work())` adds any number of them.

    Attributes:
        num_tokens: tree tokens.
        num_visible_pairs: (query, key) pairs that attention computes: the sum over the tokens of their position + 1.
        num_scored: tokens whose log-prob a loss reads.
        num_segments: maximal runs of tokens without a branch, the nodes of the tree.
        num_packs: forward/backward passes; 1 for a pack, 0 for nothing.
    """

    num_tokens: int = 0
    num_visible_pairs: int = 0
    num_scored: int = 0
    num_segments: int = 0
    num_packs: int = 0

    def __add__(self, other: Self) -> Self:
        return type(self)(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True, eq=False)
class WorkProfile:
    """The work of the trajectories of a forest, added up leaf by leaf in DFS order.

    The work of any range of the order, taken as a forest of its own, is read off in constant time: its first leaf pays
    for its whole path and every other leaf for its run, the tokens that the leaf before it does not have.

    Example: 0 = [1 2 3 4], 1 = [1 2 5], 2 = [1 2] have the order 2 0 1, lens 2 4 3 and lcp 0 2 2. The range 1..3 (the
    trajectories 0 and 1) has 4 + (3 - 2) = 5 tokens and 10 + 3 = 13 visible pairs. Alone, the range 2..3 has 3 tokens:
    a cut before it computes lcp[2] = 2 tokens twice.

    Attributes:
        order: (S,) int64, the trajectories in DFS order.
        lens: (S,) int64 lengths in tokens, in DFS order.
        lcp: (S,) int64 tokens that each shares with the one before it; lcp[0] = 0.
        path_counts: (S, 5) int64 work of each leaf alone.
        cumulative_counts: (S + 1, 5) int64 work of the first leaves of the order, one pack not counted.
    """

    order: IntArray
    lens: IntArray
    lcp: IntArray
    path_counts: IntArray
    cumulative_counts: IntArray

    @classmethod
    def from_forest(cls, forest: TokenForest, *, trained: Sequence[np.ndarray] | None = None) -> Self:
        """Profiles a forest.

        Args:
            forest: the trajectories.
            trained: per trajectory, in the order they were given, (len,) bool: the tokens whose log-prob a loss reads.
                The first is never counted, nothing can score it. None: all others.

        Returns:
            The profile. Two of its numbers are estimates. Scored tokens: a shared token counts if the first leaf of
            the range that has it trains it, so one trained only by a later leaf is missed. Segments: exact for the
            whole forest and for one leaf; a range misses the branch points on its first leaf's path where an earlier
            leaf, outside of it, had branched off or ended before.

        Raises:
            ValueError: `trained` does not fit the trajectories.
        """
        order, lcp = forest.order, forest.lcp
        lens = forest.sequence_lens[order]
        path_scored, run_scored = _count_scored(forest, trained)
        # A node that starts inside a run was cut off by the leaf that follows its last one; see NodeTable.from_lcp.
        is_cut = forest.node_start > lcp[forest.node_first_leaf]
        num_cuts = np.bincount(forest.node_last_leaf[is_cut], minlength=len(order))
        pairs, shared_pairs = (num * (num + 1) // 2 for num in (lens, lcp))
        one, none = np.ones_like(lens), np.zeros_like(lens)
        run_counts = np.stack([lens - lcp, pairs - shared_pairs, run_scored, (lens > lcp) + num_cuts, none], axis=1)
        cumulative_counts = np.zeros((len(order) + 1, 5), dtype=np.int64)
        np.cumsum(run_counts, axis=0, out=cumulative_counts[1:])
        return cls(
            order=order,
            lens=lens,
            lcp=lcp,
            path_counts=np.stack([lens, pairs, path_scored, one, one], axis=1),
            cumulative_counts=cumulative_counts,
        )

    @property
    def num_leaves(self) -> int:
        """Number of trajectories S."""
        return len(self.order)

    def range_counts(self, starts: IntArray, ends: IntArray) -> IntArray:
        """The work of many ranges of the DFS order, each as one pack.

        Args:
            starts: (K,) first leaves.
            ends: (K,) one past the last leaves; no range is empty.

        Returns:
            (K, 5) int64.
        """
        starts, ends = np.asarray(starts), np.asarray(ends)
        assert ((starts >= 0) & (starts < ends) & (ends <= self.num_leaves)).all()
        return self.path_counts[starts] + self.cumulative_counts[ends] - self.cumulative_counts[starts + 1]

    def range_work(self, start: int, end: int) -> Work:
        """The work of the leaves start..end of the DFS order as one pack; see `range_counts`."""
        return Work(*self.range_counts(np.array([start]), np.array([end]))[0].tolist())

    def flat_works(self) -> tuple[Work, ...]:
        """The work of every trajectory alone, as a pack of its own, in the order the trajectories were given."""
        counts = np.empty_like(self.path_counts)
        counts[self.order] = self.path_counts
        return tuple(Work(*row) for row in counts.tolist())

    def lost_tokens(self, cut: int) -> int:
        """Tokens that are computed twice where the order is cut before the leaf `cut`."""
        return int(self.lcp[cut])


def _count_scored(forest: TokenForest, trained: Sequence[np.ndarray] | None) -> tuple[IntArray, IntArray]:
    """Scored tokens of each leaf's path and of its run, (S,) int64 each, in DFS order."""
    lens = forest.sequence_lens[forest.order]
    first_new = np.maximum(forest.lcp, 1)
    if trained is None:
        return lens - 1, lens - first_new
    if [np.shape(mask) for mask in trained] != [(length,) for length in forest.sequence_lens.tolist()]:
        raise ValueError(
            f"trained has masks of shapes {[np.shape(mask) for mask in trained][:8]} for trajectories of "
            f"{forest.sequence_lens[:8].tolist()} tokens (the first eight): give one mask per trajectory, one entry "
            "per token"
        )
    masks = [np.asarray(trained[index], dtype=bool) for index in forest.order]
    path = [np.count_nonzero(mask[1:]) for mask in masks]
    run = [np.count_nonzero(mask[start:]) for mask, start in zip(masks, first_new, strict=True)]
    return np.array(path, dtype=np.int64), np.array(run, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a unit of work; all are finite and at least 0. The fields follow those of `Work`.

    Attributes:
        s_per_token: seconds per tree token.
        s_per_pair: seconds per visible pair.
        s_per_scored: seconds per scored token.
        s_per_segment: seconds per segment.
        s_per_pack: seconds per pack.

    Raises:
        ValueError: a coefficient is negative or not finite.
    """

    s_per_token: float
    s_per_pair: float
    s_per_scored: float
    s_per_segment: float
    s_per_pack: float

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value} is not a time: give a finite number of seconds, at least 0")

    @classmethod
    def prior(cls) -> Self:
        """The model before anything was measured: relative costs, in units of a token and not of a second.

        Forward and backward cost 6 FLOPs per parameter and token, and 14 per pair, head, head dimension and layer (4
        forward, 10 backward with recomputed scores). A layer of hidden size h has about 12 h^2 parameters and
        attention as wide as h, so a pair costs 14 h / (72 h^2) of a token: one 21,000th at h = 4096. The rest is taken
        to be free; with that a tree is never slower than its flat trajectories.
        """
        return cls(s_per_token=1.0, s_per_pair=1 / 20_000, s_per_scored=0.0, s_per_segment=0.0, s_per_pack=0.0)

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, float], *, prefix: str = "cost_model") -> Self:
        """Reads what `as_metrics` wrote.

        Raises:
            ValueError: a coefficient is missing, or is not a time.
        """
        names = [field.name for field in fields(cls)]
        missing = [f"{prefix}/{name}" for name in names if f"{prefix}/{name}" not in metrics]
        if missing:
            raise ValueError(f"the metrics lack {missing}: give those that CostModel.as_metrics({prefix!r}) wrote")
        return cls(**{name: float(metrics[f"{prefix}/{name}"]) for name in names})

    def as_metrics(self, prefix: str = "cost_model") -> dict[str, float]:
        """The coefficients under the names `{prefix}/s_per_token` and so on."""
        return {f"{prefix}/{name}": value for name, value in asdict(self).items()}

    def predict(self, work: Work) -> float:
        """Seconds that the work takes."""
        return sum(amount * seconds for amount, seconds in zip(astuple(work), astuple(self), strict=True))

    def predict_counts(self, counts: IntArray) -> FloatArray:
        """Seconds of many works. (K, 5), as from `WorkProfile.range_counts` -> (K,) float64."""
        return counts @ np.array(astuple(self), dtype=np.float64)


def runs_faster_flat(model: CostModel, *, tree: Work, flat: Work) -> bool:
    """Whether trajectories are predicted to be trained faster flat than as a tree; ties go to the tree.

    Args:
        model: the cost model.
        tree: the work of the tree's packs.
        flat: the work of the trajectories one by one, with the flat path's number of micro-batches as `num_packs`.
    """
    return model.predict(flat) < model.predict(tree)
