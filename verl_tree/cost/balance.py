"""Groups are dealt to ranks so that the ranks come out even in predicted time, and cut where that is not enough.

Whole groups are dealt first, the longest first. Then, while it pays, a group of the slowest rank is cut into two ranges
of its DFS order, and one range moves to the least loaded rank. Both ranges compute the tokens that they share, so among
the cuts that balance about equally well, the one that shares least is made. See docs/balance.md.

Example, 2 ranks, group A with leaves of 6, 6 and 6 tokens in DFS order (lcp 0 1 5), group B with 4 tokens::

    dealt whole    rank 0: A (6 + 5 + 1 = 12)           rank 1: B (4)            12 | 4
    cut at 2       rank 0: A[0:2] (6 + 5 = 11)          rank 1: B, A[2:3] (6)    11 | 10, 5 tokens lost
    cut at 1       rank 0: A[1:3] (6 + 1 = 7)           rank 1: B, A[0:1] (6)     7 | 10, 1 token lost, taken

Legend: K candidate cuts.
"""

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from verl_tree.cost.model import CostModel, FloatArray, WorkProfile
from verl_tree.tree.nodes import IntArray

MIN_GAIN = 0.01
"""Smallest gain for which groups are cut, as a share of the ranks' mean time."""

NEAR_TIE = 0.02
"""Of the cuts this close to the best, as a share of the ranks' mean time, the one that loses fewest tokens is made."""

CUTS_PER_RANK = 4
"""Cuts that are tried, at most, per rank."""

OVERFILL_WEIGHT = 1.25
"""How much worse a second overloaded rank is than the same time left on the slow one: it must give work away, too."""


@dataclass(frozen=True, slots=True)
class GroupPart:
    """A range start..end of a group's leaves in DFS order (all of them if it is not cut), and its predicted time."""

    group: int
    start: int
    end: int
    cost_s: float


@dataclass(frozen=True, slots=True)
class Balance:
    """The parts that each rank computes of one mini-batch, at most one of a group, and each rank's predicted time."""

    shares: tuple[tuple[GroupPart, ...], ...]
    loads_s: tuple[float, ...]

    @classmethod
    def from_shares(cls, shares: Sequence[Sequence[GroupPart]]) -> Self:
        """Sort and add up the parts of every rank."""
        return cls(
            shares=tuple(tuple(sorted(share, key=lambda part: part.group)) for share in shares),
            loads_s=tuple(sum(part.cost_s for part in share) for share in shares),
        )

    @property
    def makespan_s(self) -> float:
        """Predicted time of the slowest rank."""
        return max(self.loads_s)

    @property
    def num_cut_groups(self) -> int:
        """Number of groups that are on more than one rank."""
        num_parts = Counter(part.group for share in self.shares for part in share)
        return sum(num > 1 for num in num_parts.values())

    def num_lost_tokens(self, profiles: Sequence[WorkProfile]) -> int:
        """Count the tokens that are computed twice because of the cuts: what a part shares with the leaf before it."""
        return sum(int(profiles[part.group].lcp[part.start]) for share in self.shares for part in share)


def balance(
    members: Sequence[int],
    *,
    profiles: Sequence[WorkProfile],
    model: CostModel,
    rank_num_rows: Sequence[int],
    cut_groups: bool,
) -> Balance:
    """Deal the groups of one mini-batch (`members`, indices into `profiles`) to the ranks.

    Of equally loaded ranks the one with fewest rows (`rank_num_rows` and those dealt) is served first, which keeps
    padding rows few.

    Invariants:
        - every leaf of every group is in one part; a rank's leaves of a group are one range of its DFS order;
        - without cuts no rank exceeds the mean by more than the largest group;
        - cuts never raise the makespan, and are made only if together they lower it by more than `MIN_GAIN`;
        - the same arguments give the same answer.
    """
    wholes = [
        _part(group, start=0, end=profiles[group].num_leaves, profiles=profiles, model=model) for group in members
    ]
    best = current = _deal_whole(wholes, profiles=profiles, rank_num_rows=rank_num_rows)
    if not cut_groups or best.makespan_s == 0:
        return best
    num_ranks = len(rank_num_rows)
    min_gain_s = MIN_GAIN * sum(best.loads_s) / num_ranks
    # One cut gains nothing while another rank is as slow. So cuts are tried ahead and kept once they pay together.
    for _ in range(CUTS_PER_RANK * num_ranks):
        following = _cut_slowest(
            current, profiles=profiles, model=model, rank_num_rows=rank_num_rows, min_gain_s=min_gain_s
        )
        if following is None:
            break
        current = following
        if best.makespan_s - current.makespan_s > min_gain_s:
            best = current
    return best


def _part(group: int, *, start: int, end: int, profiles: Sequence[WorkProfile], model: CostModel) -> GroupPart:
    return GroupPart(group, start=start, end=end, cost_s=model.predict(profiles[group].range_work(start, end)))


def _deal_whole(
    wholes: Sequence[GroupPart], *, profiles: Sequence[WorkProfile], rank_num_rows: Sequence[int]
) -> Balance:
    """Give the dearest group that is left to the least loaded rank, until none is left."""
    shares: list[list[GroupPart]] = [[] for _ in rank_num_rows]
    heap = [(0.0, num_rows, rank) for rank, num_rows in enumerate(rank_num_rows)]
    heapq.heapify(heap)
    for part in sorted(wholes, key=lambda part: -part.cost_s):
        load_s, num_rows, rank = heapq.heappop(heap)
        shares[rank].append(part)
        heapq.heappush(heap, (load_s + part.cost_s, num_rows + profiles[part.group].num_leaves, rank))
    return Balance.from_shares(shares)


def _cut_slowest(
    current: Balance,
    *,
    profiles: Sequence[WorkProfile],
    model: CostModel,
    rank_num_rows: Sequence[int],
    min_gain_s: float,
) -> Balance | None:
    """Cut a part of the slowest rank and move one side to another rank; None if no cut gains enough."""
    num_rows = [
        num_before + sum(part.end - part.start for part in share)
        for num_before, share in zip(rank_num_rows, current.shares, strict=True)
    ]
    giver = int(np.argmax(current.loads_s))
    others = [rank for rank in range(len(num_rows)) if rank != giver]
    # The least loaded rank comes first. What it already holds of the same groups may leave no cut that gains.
    for receiver in sorted(others, key=lambda rank: (current.loads_s[rank], num_rows[rank])):
        held = {part.group: part for part in current.shares[receiver]}
        cuts = _Cuts.of_share(current.shares[giver], held=held, profiles=profiles, model=model)
        index = _best_cut(cuts, loads_s=current.loads_s, giver=giver, receiver=receiver, min_gain_s=min_gain_s)
        if index is not None:
            group = int(cuts.group_K[index])
            shares = [list(share) for share in current.shares]
            for rank, ranges_K2 in ((giver, cuts.kept_K2), (receiver, cuts.received_K2)):
                start, end = ranges_K2[index].tolist()
                shares[rank] = [part for part in shares[rank] if part.group != group]
                shares[rank].append(_part(group, start=start, end=end, profiles=profiles, model=model))
            return Balance.from_shares(shares)
    return None


def _best_cut(cuts: "_Cuts", *, loads_s: Sequence[float], giver: int, receiver: int, min_gain_s: float) -> int | None:
    """Return the index of the best cut; None if none lowers the slower of the two ranks by more than `min_gain_s`.

    A cut is judged by the makespan that can be reached from it: the mean of all ranks (lost tokens raise it) plus what
    either rank has above the mean, because that must be moved again.
    """
    giver_s_K = loads_s[giver] + cuts.change_s_K2[:, 0]
    receiver_s_K = loads_s[receiver] + cuts.change_s_K2[:, 1]
    gains = np.flatnonzero(loads_s[giver] - np.maximum(giver_s_K, receiver_s_K) > min_gain_s)
    if not len(gains):
        return None
    mean_s = sum(loads_s) / len(loads_s)
    mean_s_K = mean_s + cuts.change_s_K2.sum(axis=1) / len(loads_s)
    score_K = mean_s_K + np.maximum(giver_s_K - mean_s_K, 0) + OVERFILL_WEIGHT * np.maximum(receiver_s_K - mean_s_K, 0)
    near_ties = gains[score_K[gains] <= score_K[gains].min() + NEAR_TIE * mean_s]
    return int(near_ties[np.lexsort((score_K[near_ties], cuts.num_lost_K[near_ties]))[0]])


@dataclass(frozen=True, slots=True, eq=False)
class _Cuts:
    """Ways to cut one part of a rank and to hand one side to another rank."""

    group_K: IntArray  # (K,) group whose part is cut
    kept_K2: IntArray  # (K, 2) start and end of what the giving rank keeps
    received_K2: IntArray  # (K, 2) start and end of what the receiving rank then holds of the group
    change_s_K2: FloatArray  # (K, 2) change of the times of the giving and of the receiving rank
    # (K,) tokens that are computed twice because of the cut, minus those of an earlier cut that it replaces.
    num_lost_K: IntArray

    @classmethod
    def of_share(
        cls,
        share: Sequence[GroupPart],
        *,
        held: Mapping[int, GroupPart],
        profiles: Sequence[WorkProfile],
        model: CostModel,
    ) -> Self:
        """List all cuts of the parts of a rank, given the parts that the receiving rank holds (`held`, by group)."""
        columns = [
            _cuts_of_part(part, held=held.get(part.group), profile=profiles[part.group], model=model) for part in share
        ]
        return cls(*(np.concatenate(column) for column in zip(*columns, strict=True)))


def _cuts_of_part(
    part: GroupPart, *, held: GroupPart | None, profile: WorkProfile, model: CostModel
) -> tuple[IntArray, IntArray, IntArray, FloatArray, IntArray]:
    """Compute the columns of `_Cuts` for one part.

    If the receiving rank holds nothing of the group, either side of a cut may move. Otherwise the side moves that is
    next to `held`. The receiving rank then still has one range, and the earlier cut between the two is gone.
    """
    cut = np.arange(part.start + 1, part.end)
    ranges, num_lost = [], []
    if held is None or held.end == part.start:
        first = part.start if held is None else held.start
        ranges.append(np.stack([cut, np.full_like(cut, part.end), np.full_like(cut, first), cut], axis=1))
        num_lost.append(profile.lcp[cut] - (0 if held is None else profile.lcp[part.start]))
    if held is None or held.start == part.end:
        last = part.end if held is None else held.end
        ranges.append(np.stack([np.full_like(cut, part.start), cut, cut, np.full_like(cut, last)], axis=1))
        num_lost.append(profile.lcp[cut] - (0 if held is None else profile.lcp[part.end]))
    ranges_K4 = np.concatenate([np.empty((0, 4), dtype=np.int64), *ranges])
    kept_K2, received_K2 = ranges_K4[:, :2], ranges_K4[:, 2:]
    before_s = (part.cost_s, 0.0 if held is None else held.cost_s)
    change_s_K2 = np.stack(
        [
            model.predict_counts(profile.range_counts(side_K2[:, 0], side_K2[:, 1])) - cost_s
            for side_K2, cost_s in zip((kept_K2, received_K2), before_s, strict=True)
        ],
        axis=1,
    )
    num_lost_K = np.concatenate([np.empty(0, dtype=np.int64), *num_lost])
    return np.full(len(ranges_K4), part.group), kept_K2, received_K2, change_s_K2, num_lost_K
