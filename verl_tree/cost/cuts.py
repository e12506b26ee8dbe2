"""Cuts of groups: a part of the slowest rank is cut in two, and one side moves to another rank (docs/balance.md).

Thousands of ranks take several cuts each. So a cut looks at the two ranks that it changes, and all others stay sorted
by their load.

Legend: S leaves of a group in DFS order, K candidate cuts.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from verl_tree.cost.model import CostModel, FloatArray, WorkProfile
from verl_tree.tree.nodes import IntArray

NEAR_TIE = 0.02
"""Of the cuts this close to the best, as a share of the ranks' mean time, the one that loses fewest tokens is made."""

MAX_CUTS = 1024
"""Cuts of a part that are compared; of a longer part those around the one that moves as much as is wanted."""

OVERFILL_WEIGHT = 1.25
"""How much worse a second overloaded rank is than the same time left on the slow one: it must give work away, too."""


@dataclass(frozen=True, slots=True)
class GroupPart:
    """A range start..end of a group's leaves in DFS order (all of them if it is not cut), and its predicted time."""

    group: int
    start: int
    end: int
    cost_s: float


@dataclass(frozen=True, slots=True, eq=False)
class GroupTimes:
    """A group's profile in seconds."""

    lcp: IntArray  # (S,)
    path_s: FloatArray  # (S,) of each leaf alone
    total_s: FloatArray  # (S + 1,) of the first leaves of the order

    @classmethod
    def of(cls, profile: WorkProfile, *, model: CostModel) -> Self:
        """Predict the times of a profile."""
        path_s, total_s = model.predict_counts(profile.path_counts), model.predict_counts(profile.cumulative_counts)
        return cls(profile.lcp, path_s, total_s)

    def range_s(self, start: Any, end: Any) -> Any:
        """Predict the times of the leaves start..end, integers or arrays of them; see `WorkProfile.range_counts`."""
        return self.path_s[start] + (self.total_s[end] - self.total_s[start + 1])

    def part(self, group: int, *, start: int, end: int) -> GroupPart:
        """Return a range of the group with its time."""
        return GroupPart(group, start=start, end=end, cost_s=float(self.range_s(start, end)))


class Cuts(NamedTuple):
    """The K places to cut a part of a rank so that one side moves to another rank."""

    part: GroupPart
    held: GroupPart | None  # What the receiving rank holds of the group
    gives_start: bool  # Whether the side before the cut moves
    cut_K: IntArray
    giver_s_K: FloatArray  # Change of the time of the giving rank
    receiver_s_K: FloatArray  # Change of the time of the receiving rank
    # Tokens that are computed twice because of the cut, minus those of an earlier cut that it replaces.
    num_lost_K: IntArray

    @classmethod
    def of_part(cls, part: GroupPart, *, held: GroupPart | None, times: GroupTimes, wanted_s: float) -> list[Self]:
        """List the cuts of a part, by the side that moves; of a long one those that move about `wanted_s`.

        If the receiving rank holds nothing of the group, either side may move. Otherwise the side moves that is next to
        `held`. The receiving rank then still has one range, and the earlier cut between the two is gone.
        """
        start, end = (part.start, part.end) if held is None else (held.start, held.end)
        held_s = 0.0 if held is None else held.cost_s
        sides = []
        if held is None or held.end == part.start:
            cut_K = _places(part, lambda cut_K: times.range_s(start, cut_K) - held_s, wanted_s=wanted_s)
            num_mended = 0 if held is None else times.lcp[part.start]
            sides.append((True, cut_K, times.range_s(cut_K, part.end), times.range_s(start, cut_K), num_mended))
        if held is None or held.start == part.end:
            cut_K = _places(part, lambda cut_K: times.range_s(cut_K, end) - held_s, wanted_s=wanted_s)
            num_mended = 0 if held is None else times.lcp[part.end]
            sides.append((False, cut_K, times.range_s(part.start, cut_K), times.range_s(cut_K, end), num_mended))
        return [
            cls(
                part,
                held,
                gives_start,
                cut_K,
                giver_s_K=kept_s_K - part.cost_s,
                receiver_s_K=received_s_K - held_s,
                num_lost_K=times.lcp[cut_K] - num_mended,
            )
            for gives_start, cut_K, kept_s_K, received_s_K, num_mended in sides
        ]

    def move(self, index: int, *, times: GroupTimes) -> tuple[GroupPart, GroupPart]:
        """Return what the giving rank keeps of the part, and what the receiving rank then holds of its group."""
        part, held, cut = self.part, self.held, int(self.cut_K[index])
        if self.gives_start:
            kept, received = (cut, part.end), (part.start if held is None else held.start, cut)
        else:
            kept, received = (part.start, cut), (cut, part.end if held is None else held.end)
        return (
            times.part(part.group, start=kept[0], end=kept[1]),
            times.part(part.group, start=received[0], end=received[1]),
        )


class Ranks:
    """The ranks while groups are cut; cuts can be taken back."""

    def __init__(
        self, shares: Sequence[Sequence[GroupPart]], *, times: Mapping[int, GroupTimes], rank_num_rows: Sequence[int]
    ) -> None:
        self._times = times
        self._rank_num_rows = rank_num_rows
        self._shares = [list(share) for share in shares]
        self._loads_s = np.array([sum(part.cost_s for part in share) for share in shares], dtype=np.float64)
        self._by_load = sorted(map(self._load_key, range(len(self._shares))))
        # Per cut the two ranks with the shares that they had before.
        self._before: list[tuple[tuple[int, list[GroupPart]], ...]] = []

    @property
    def makespan_s(self) -> float:
        """Predicted time of the slowest rank."""
        return float(self._loads_s.max())

    @property
    def num_cuts(self) -> int:
        """Number of cuts that were made."""
        return len(self._before)

    def cut_slowest(self, *, min_gain_s: float) -> bool:
        """Cut a part of the slowest rank and move one side to another rank; return whether a cut gains enough."""
        giver = int(np.argmax(self._loads_s))
        groups = {part.group for part in self._shares[giver]}
        mean_s = float(self._loads_s.mean())
        has_tried_others = False
        # The least loaded rank comes first. What it already holds of the same groups may leave no cut that gains.
        for _, _, receiver in self._by_load:
            held = {part.group: part for part in self._shares[receiver] if part.group in groups}
            # Ranks that hold nothing of these groups have the same cuts, and the least loaded of them gains most.
            if receiver == giver or (has_tried_others and not held):
                continue
            has_tried_others |= not held
            wanted_s = min(mean_s - self._loads_s[receiver], self._loads_s[giver] - mean_s)
            cuts = [
                side
                for part in self._shares[giver]
                for side in Cuts.of_part(
                    part, held=held.get(part.group), times=self._times[part.group], wanted_s=wanted_s
                )
            ]
            best = _best_cut(
                cuts, loads_s=self._loads_s, mean_s=mean_s, giver=giver, receiver=receiver, min_gain_s=min_gain_s
            )
            if best is not None:
                kept, received = best[0].move(best[1], times=self._times[best[0].part.group])
                self._before.append(tuple((rank, self._shares[rank]) for rank in (giver, receiver)))
                self._replace(giver, part=kept)
                self._replace(receiver, part=received)
                return True
        return False

    def shares_after(self, num_cuts: int) -> list[list[GroupPart]]:
        """Take the last cuts back, all but the first `num_cuts`, and return the parts of every rank."""
        for before in reversed(self._before[num_cuts:]):
            for rank, share in before:
                self._shares[rank] = share
        return self._shares

    def _replace(self, rank: int, *, part: GroupPart) -> None:
        """Make a part all that the rank holds of its group."""
        del self._by_load[bisect_left(self._by_load, self._load_key(rank))]
        share = [other for other in self._shares[rank] if other.group != part.group]
        self._shares[rank] = sorted([*share, part], key=lambda part: part.group)
        self._loads_s[rank] = sum(part.cost_s for part in self._shares[rank])
        insort(self._by_load, self._load_key(rank))

    def _load_key(self, rank: int) -> tuple[float, int, int]:
        num_rows = self._rank_num_rows[rank] + sum(part.end - part.start for part in self._shares[rank])
        return float(self._loads_s[rank]), num_rows, rank


def _places(part: GroupPart, received_s: Callable[[IntArray], FloatArray], *, wanted_s: float) -> IntArray:
    """Return where a part may be cut (K,)."""
    if part.end - part.start <= MAX_CUTS:
        return np.arange(part.start + 1, part.end)
    coarse = np.linspace(part.start + 1, part.end - 1, MAX_CUTS // 2).astype(int)
    nearest = int(coarse[np.abs(received_s(coarse) - wanted_s).argmin()])
    reach = max(MAX_CUTS // 4, -(-(part.end - part.start) // len(coarse)))
    return np.arange(max(part.start + 1, nearest - reach), min(part.end, nearest + reach + 1))


def _best_cut(
    cuts: Sequence[Cuts], *, loads_s: FloatArray, mean_s: float, giver: int, receiver: int, min_gain_s: float
) -> tuple[Cuts, int] | None:
    """Return the best cut by its index; None if none lowers the slower of the two ranks by more than `min_gain_s`.

    A cut is judged by the makespan that can be reached from it: the mean of all ranks (lost tokens raise it) plus what
    either rank has above the mean, because that must be moved again.
    """
    if not cuts:
        return None
    change_s_K = np.concatenate([side.giver_s_K for side in cuts])
    received_s_K = np.concatenate([side.receiver_s_K for side in cuts])
    giver_s_K, receiver_s_K = loads_s[giver] + change_s_K, loads_s[receiver] + received_s_K
    gains = np.flatnonzero(loads_s[giver] - np.maximum(giver_s_K, receiver_s_K) > min_gain_s)
    if not len(gains):
        return None
    mean_s_K = mean_s + (change_s_K + received_s_K) / len(loads_s)
    score_K = mean_s_K + np.maximum(giver_s_K - mean_s_K, 0) + OVERFILL_WEIGHT * np.maximum(receiver_s_K - mean_s_K, 0)
    near_ties = gains[score_K[gains] <= score_K[gains].min() + NEAR_TIE * mean_s]
    num_lost_K = np.concatenate([side.num_lost_K for side in cuts])
    index = int(near_ties[np.lexsort((score_K[near_ties], num_lost_K[near_ties]))[0]])
    for side in cuts:
        if index < len(side.cut_K):
            return side, index
        index -= len(side.cut_K)
    raise AssertionError("the index is one of the cuts")
