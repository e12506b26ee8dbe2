"""A forest without its tokens: how long its trajectories are, their order, and what neighbours in it share.

Legend: S trajectories (leaves), N nodes.
"""

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
            bounds = np.stack([place_S[:-1], place_S[1:]], axis=1).ravel() + 1
            lcp[1:] = np.minimum.reduceat(np.append(self.lcp, 0), bounds)[::2]
        return lcp
