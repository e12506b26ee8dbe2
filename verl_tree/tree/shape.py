"""A forest without its tokens: how long its trajectories are, their order, and what neighbours in it share.

Legend: S trajectories (leaves), N nodes.
"""

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from verl_tree.tree.forest import TokenForest
from verl_tree.tree.nodes import IntArray, NodeTable


@dataclass(frozen=True, eq=False)
class ForestShape:
    """The shape of a forest; see `TokenForest` for an example.

    Attributes:
        order: (S,) int64, the trajectories in DFS order.
        sequence_lens: (S,) int64, lengths in tokens, in the order given.
        lcp: (S,) int64, tokens that order[i] shares with order[i - 1]; lcp[0] = 0.
    """

    order: IntArray
    sequence_lens: IntArray
    lcp: IntArray

    @classmethod
    def of(cls, forest: TokenForest) -> Self:
        """Return the shape of a forest."""
        return cls(forest.order, forest.sequence_lens, forest.lcp)

    @property
    def num_leaves(self) -> int:
        """Number of trajectories, S."""
        return len(self.order)

    @cached_property
    def nodes(self) -> NodeTable:
        """The nodes, in DFS preorder."""
        return NodeTable.from_lcp(self.sequence_lens[self.order], lcp=self.lcp)

    def keep(self, is_kept: np.ndarray) -> Self:
        """Return the shape without some trajectories; `is_kept` (S,) is in DFS order. Their numbers stay."""
        place_S = np.flatnonzero(is_kept)
        return type(self)(self.order[place_S], self.sequence_lens, self._shared_by(place_S))

    def share_at_most(self, num_S: IntArray) -> Self:
        """Return the shape in which a trajectory shares none but its first tokens, `num_S` (S,) in the order given.

        Example: 0 = [1 2 3 4], 1 = [1 2 3 5] and 2 = [1 2 3 6] that share at most 3, 1 and 3 tokens. So 1 has only the
        token 1 in common with the others, and comes first: order 1 0 2, lcp 0 1 3.
        """
        num_in_order_S = num_S[self.order]
        # Cut off there, the trajectories are sorted by the first one that passes the cut, then by their lengths.
        first_S = _first_sharing(self.lcp, np.maximum(num_in_order_S, 1))
        place_S = np.lexsort((num_in_order_S, first_S))
        lcp = self._shared_by(place_S)
        lcp[1:] = np.minimum(lcp[1:], np.minimum(num_in_order_S[place_S[1:]], num_in_order_S[place_S[:-1]]))
        return type(self)(self.order[place_S], self.sequence_lens, lcp)

    def split(self, merge_keys: Sequence[Hashable]) -> Self:
        """Return the shape in which trajectories share tokens only if they have the same merge key, too.

        `merge_keys` has one key per trajectory, in the order given.
        """
        number_of = {key: number for number, key in enumerate(dict.fromkeys(merge_keys))}
        key_S = np.array([number_of[key] for key in merge_keys], dtype=np.int64)[self.order]
        place_S = np.argsort(key_S, kind="stable")
        lcp = self._shared_by(place_S)
        lcp[1:][np.diff(key_S[place_S]) != 0] = 0
        return type(self)(self.order[place_S], self.sequence_lens, lcp)

    def _shared_by(self, place_S: IntArray) -> IntArray:
        """Return what the leaf at each place in DFS order shares with the one at the place before it in `place_S`."""
        lcp = np.zeros(len(place_S), dtype=np.int64)
        if len(place_S) > 1:
            # Two leaves share what all neighbours between them share: min(lcp[previous + 1 : next + 1]). Pairs of
            # bounds are reduced, and the ranges from one pair to the next are thrown away.
            bounds = np.sort(np.stack([place_S[:-1], place_S[1:]], axis=1), axis=1).ravel() + 1
            lcp[1:] = np.minimum.reduceat(np.append(self.lcp, 0), bounds)[::2]
        return lcp


def _first_sharing(lcp: IntArray, num_S: IntArray) -> IntArray:
    """Return the first place in DFS order whose trajectory shares at least `num_S` tokens with that at each place."""
    first_S = np.arange(len(lcp))
    # From place starts[i] on, the trajectories share shared[i] tokens with the one at hand; both lists ascend.
    starts: list[int] = []
    shared: list[int] = []
    for place, (num_shared, num) in enumerate(zip(lcp.tolist(), num_S.tolist(), strict=True)):
        start = place - 1
        while shared and shared[-1] >= num_shared:
            start = starts.pop()
            shared.pop()
        if place:
            starts.append(start)
            shared.append(num_shared)
        found = bisect_left(shared, num)
        if found < len(shared):
            first_S[place] = starts[found]
    return first_S
