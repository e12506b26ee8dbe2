"""Groups are dealt to ranks so that the ranks come out even in predicted time, and cut where that is not enough.

Whole groups are dealt first, the longest first. Then, while it pays, a group of the slowest rank is cut into two ranges
of its DFS order, and one range moves to the least loaded rank. Both ranges compute the tokens that they share, so among
the cuts that balance about equally well, the one that shares least is made. See docs/balance.md.

Example, 2 ranks, group A with leaves of 6, 6 and 6 tokens in DFS order (lcp 0 1 5), group B with 4 tokens::

    dealt whole    rank 0: A (6 + 5 + 1 = 12)           rank 1: B (4)            12 | 4
    cut at 2       rank 0: A[0:2] (6 + 5 = 11)          rank 1: B, A[2:3] (6)    11 | 10, 5 tokens lost
    cut at 1       rank 0: A[1:3] (6 + 1 = 7)           rank 1: B, A[0:1] (6)     7 | 10, 1 token lost, taken
"""

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from verl_tree.cost.cuts import GroupPart, GroupTimes, Ranks
from verl_tree.cost.model import CostModel, WorkProfile

MIN_GAIN = 0.01
"""Smallest gain for which groups are cut, as a share of the ranks' mean time."""

CUTS_PER_RANK = 4
"""Cuts that are tried, at most, per rank."""


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
    times = {group: GroupTimes.of(profiles[group], model=model) for group in members}
    wholes = [times[group].part(group, start=0, end=profiles[group].num_leaves) for group in members]
    whole = _deal_whole(wholes, profiles=profiles, rank_num_rows=rank_num_rows)
    if not cut_groups or whole.makespan_s == 0:
        return whole
    num_ranks = len(rank_num_rows)
    min_gain_s = MIN_GAIN * sum(whole.loads_s) / num_ranks
    ranks = Ranks(whole.shares, times=times, rank_num_rows=rank_num_rows)
    # One cut gains nothing while another rank is as slow. So cuts are tried ahead and kept once they pay together.
    best_s, num_kept = whole.makespan_s, 0
    for _ in range(CUTS_PER_RANK * num_ranks):
        if not ranks.cut_slowest(min_gain_s=min_gain_s):
            break
        if best_s - ranks.makespan_s > min_gain_s:
            best_s, num_kept = ranks.makespan_s, ranks.num_cuts
    return Balance.from_shares(ranks.shares_after(num_kept))


def _deal_whole(
    wholes: Sequence[GroupPart], *, profiles: Sequence[WorkProfile], rank_num_rows: Sequence[int]
) -> Balance:
    """Give the dearest group that is left to the least loaded rank, until none is left.

    Groups that cost nothing, because an update leaves them out, go to the ranks with fewest rows: their old log-probs
    are computed, and one rank would get them all.
    """
    shares: list[list[GroupPart]] = [[] for _ in rank_num_rows]
    heap = [(0.0, num_rows, rank) for rank, num_rows in enumerate(rank_num_rows)]
    heapq.heapify(heap)
    for part in sorted((each for each in wholes if each.cost_s), key=lambda part: -part.cost_s):
        load_s, num_rows, rank = heapq.heappop(heap)
        shares[rank].append(part)
        heapq.heappush(heap, (load_s + part.cost_s, num_rows + profiles[part.group].num_leaves, rank))
    by_rows = [(num_rows, rank) for _, num_rows, rank in heap]
    heapq.heapify(by_rows)
    idle = [each for each in wholes if not each.cost_s]
    for part in sorted(idle, key=lambda part: -profiles[part.group].num_leaves):
        num_rows, rank = heapq.heappop(by_rows)
        shares[rank].append(part)
        heapq.heappush(by_rows, (num_rows + profiles[part.group].num_leaves, rank))
    return Balance.from_shares(shares)
