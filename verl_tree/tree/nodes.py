"""The nodes of a forest, found from the numbers of tokens that neighbouring trajectories share.

Legend: S trajectories (leaves), N nodes.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.integer]


@dataclass(frozen=True, slots=True, eq=False)
class NodeTable:
    """The nodes of a forest in DFS preorder: a node is a maximal run of tokens with one set of leaves.

    All fields are (N,) int64. `parent` is -1 and `depth` (number of ancestors) 0 at roots. A node covers the positions
    start..end of its trajectories. Its leaves are the half-open range first_leaf..last_leaf of the DFS order, and its
    tokens are those of `first_leaf`.
    """

    parent: IntArray
    start: IntArray
    end: IntArray
    first_leaf: IntArray
    last_leaf: IntArray
    depth: IntArray

    @classmethod
    def from_lcp(cls, lens: IntArray, *, lcp: IntArray) -> Self:
        """Find the nodes of trajectories of `lens` (S,) tokens in DFS order; no node is empty.

        `lcp` (S,) are the tokens that each trajectory shares with the one before it; lcp[0] = 0.
        """
        # Leaf i brings the new tokens lcp[i]..lens[i]. They are cut into nodes where later leaves depart from them. So
        # each node has one leaf that brings it, its first. Preorder sorts by first leaf, then by position.
        departed_from = _previous_smaller(lcp)
        is_cut = departed_from >= 0
        is_cut[is_cut] = lcp[is_cut] < lens[departed_from[is_cut]]
        has_new = lens > lcp
        first_leaf = np.concatenate([np.flatnonzero(has_new), departed_from[is_cut]])
        start = np.concatenate([lcp[has_new], lcp[is_cut]])
        # (first leaf, start) sort as one integer. Several leaves may make the same cut, so only unique ones stay.
        stride = int(lens.max(initial=0)) + 1
        first_leaf, start = np.divmod(np.unique(first_leaf * stride + start), stride)
        end = lens[first_leaf]
        is_followed = first_leaf[1:] == first_leaf[:-1]
        end[:-1][is_followed] = start[1:][is_followed]
        parent, last_leaf, depth = _walk(first_leaf, start=start, num_leaves=len(lens))
        return cls(parent=parent, start=start, end=end, first_leaf=first_leaf, last_leaf=last_leaf, depth=depth)

    @property
    def num_nodes(self) -> int:
        """Number of nodes N."""
        return len(self.parent)

    @property
    def subtree_end(self) -> IntArray:
        """(N,) int64, one past the last descendant: node n has the descendants n + 1..subtree_end[n]."""
        return np.searchsorted(self.first_leaf, self.last_leaf)


def _previous_smaller(values: IntArray) -> IntArray:
    """Find the nearest index to the left that holds a smaller value, else -1. (S,) -> (S,) int64."""
    result, stack, items = [], [], values.tolist()
    for index, value in enumerate(items):
        while stack and items[stack[-1]] >= value:
            stack.pop()
        result.append(stack[-1] if stack else -1)
        stack.append(index)
    return np.array(result, dtype=np.int64)


def _walk(first_leaf: IntArray, *, start: IntArray, num_leaves: int) -> tuple[IntArray, IntArray, IntArray]:
    """Walk the nodes in preorder with the current path on a stack: parent, last leaf and depth, (N,) int64 each."""
    parent, depth, last_leaf = [], [], [num_leaves] * len(first_leaf)
    stack, starts = [], start.tolist()
    for node, (leaf, position) in enumerate(zip(first_leaf.tolist(), starts, strict=True)):
        while stack and starts[stack[-1]] >= position:
            last_leaf[stack.pop()] = leaf
        parent.append(stack[-1] if stack else -1)
        depth.append(len(stack))
        stack.append(node)
    return np.array(parent, np.int64), np.array(last_leaf, np.int64), np.array(depth, np.int64)
