"""The nodes of a forest, read off the numbers of tokens that neighbouring trajectories share.

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

    All fields are (N,) int64. Roots have parent -1 and depth 0. A node covers the positions start..end of its
    trajectories, and its leaves are the half-open range first_leaf..last_leaf of the DFS order; its tokens
    are those of the leaf `first_leaf`.
    """

    parent: IntArray
    start: IntArray
    end: IntArray
    first_leaf: IntArray
    last_leaf: IntArray
    depth: IntArray

    @classmethod
    def from_lcp(cls, lens: IntArray, *, lcp: IntArray) -> Self:
        """Finds the nodes.

        The leaf i brings the new tokens lcp[i]..lens[i], its run. Every node is a piece of one run, and a run
        is cut where a later leaf leaves it. Preorder is the order of the runs, and within a run that of the
        positions.

        Args:
            lens: (S,) lengths in tokens of the trajectories in DFS order.
            lcp: (S,) tokens that each shares with the one before it; lcp[0] = 0.

        Returns:
            The nodes; none of them is empty, also where trajectories are duplicates.
        """
        num_leaves = len(lens)
        left_run = _previous_smaller(lcp)
        is_cut = left_run >= 0
        is_cut[is_cut] = lcp[is_cut] < lens[left_run[is_cut]]
        has_run = lens > lcp
        run = np.concatenate([np.flatnonzero(has_run), left_run[is_cut]])
        start = np.concatenate([lcp[has_run], lcp[is_cut]])
        # Sorted as one integer, (run, start) is preorder; unique drops the cuts that several leaves make.
        stride = int(lens.max(initial=0)) + 1
        run, start = np.divmod(np.unique(run * stride + start), stride)
        end = lens[run]
        is_same_run = run[1:] == run[:-1]
        end[:-1][is_same_run] = start[1:][is_same_run]
        parent, last_leaf, depth = _walk(run, start=start, num_leaves=num_leaves)
        return cls(parent=parent, start=start, end=end, first_leaf=run, last_leaf=last_leaf, depth=depth)

    @property
    def num_nodes(self) -> int:
        """Number of nodes N."""
        return len(self.parent)

    @property
    def subtree_end(self) -> IntArray:
        """(N,) one past the last descendant: those of node n are the nodes n+1..subtree_end[n]."""
        return np.searchsorted(self.first_leaf, self.last_leaf)


def _previous_smaller(values: IntArray) -> IntArray:
    """The nearest index to the left that holds a smaller value, -1 where none does. (S,) -> (S,) int64."""
    result, stack, items = [], [], values.tolist()
    for index, value in enumerate(items):
        while stack and items[stack[-1]] >= value:
            stack.pop()
        result.append(stack[-1] if stack else -1)
        stack.append(index)
    return np.array(result, dtype=np.int64)


def _walk(run: IntArray, *, start: IntArray, num_leaves: int) -> tuple[IntArray, IntArray, IntArray]:
    """Walks the nodes in preorder, the current path on a stack: parent, last leaf and depth, (N,) each."""
    parent, depth, last_leaf = [], [], [num_leaves] * len(run)
    stack, starts = [], start.tolist()
    for node, (leaf, position) in enumerate(zip(run.tolist(), starts, strict=True)):
        while stack and starts[stack[-1]] >= position:
            last_leaf[stack.pop()] = leaf
        parent.append(stack[-1] if stack else -1)
        depth.append(len(stack))
        stack.append(node)
    return tuple(np.array(column, dtype=np.int64) for column in (parent, last_leaf, depth))
