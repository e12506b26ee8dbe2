"""What the packing methods share: the caps of a pack, one tree as a list of items, and the result.

In DFS order, a tree is two columns: the length of every leaf and the tokens that it shares with the leaf before it.
The tokens of any set of leaves follow from them (`TokenForest.subset_lcp`), so the methods need nothing else. They
work on *items*: one leaf, or several neighbours that no method wants to part.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from verl_tree.tree import TokenForest, lcp_of_subset
from verl_tree.tree.nodes import IntArray, NodeTable

UNLIMITED = 2**62


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """The trajectories of one forward/backward.

    Attributes:
        leaves: (s,) int64 indices of trajectories, in DFS order.
        num_tokens: tree tokens of the pack, the union of the root paths of its leaves.
    """

    leaves: IntArray
    num_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """A partition of the trajectories of a forest into packs.

    Attributes:
        packs: every trajectory is in exactly one of them.
        num_tokens: packed tokens, the sum over the packs.
        num_flat_tokens: sum of the trajectory lengths.
        lower_bound: tokens that no packing under these caps can go below.
        num_capacity_tokens: what all packs could hold, None where the capacity is not limited.
    """

    packs: tuple[Pack, ...]
    num_tokens: int
    num_flat_tokens: int
    lower_bound: int
    num_capacity_tokens: int | None

    @property
    def effective_reuse_ratio(self) -> float:
        """1 - packed tokens / flat tokens; 0.0 where there is nothing to pack."""
        return 1.0 - self.num_tokens / self.num_flat_tokens if self.num_flat_tokens else 0.0

    @property
    def compression(self) -> float:
        """Flat tokens / packed tokens; 1.0 where there is nothing to pack."""
        return self.num_flat_tokens / self.num_tokens if self.num_tokens else 1.0

    @property
    def gap(self) -> float:
        """How far from the optimum this can be at most: packed tokens / lower bound - 1; 0.0 proves the optimum."""
        return self.num_tokens / self.lower_bound - 1.0 if self.lower_bound else 0.0

    @property
    def fill(self) -> float:
        """Packed tokens / capacity of all packs; 1.0 where the capacity is not limited."""
        return self.num_tokens / self.num_capacity_tokens if self.num_capacity_tokens else 1.0


@dataclass(frozen=True, slots=True)
class Caps:
    """What one pack may hold.

    Attributes:
        num_tokens: tree tokens.
        num_terms: loss terms.
    """

    num_tokens: int = UNLIMITED
    num_terms: int = UNLIMITED


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """One tree: what is to be distributed to packs, in DFS order.

    Legend: m items.

    Attributes:
        lens: (m,) int64 tokens of the item with its whole root path.
        lcp: (m,) int64 tokens shared with the item before; lcp[0] = 0.
        terms: (m,) int64 loss terms.
        bounds: (m + 1,) int64, item i holds the leaves bounds[i]..bounds[i + 1] of the DFS order of the forest.
    """

    lens: IntArray
    lcp: IntArray
    terms: IntArray
    bounds: IntArray

    @classmethod
    def from_forest(cls, forest: TokenForest, *, terms: IntArray, start: int, end: int) -> Self:
        """The leaves start..end of the DFS order, one item each; they must be one tree. terms: (S,) in DFS order."""
        lcp = forest.lcp[start:end].copy()
        lcp[:1] = 0
        lens = forest.sequence_lens[forest.order[start:end]]
        return cls(lens=lens, lcp=lcp, terms=terms[start:end], bounds=np.arange(start, end + 1))

    @property
    def num_tokens(self) -> int:
        """Tree tokens of all items together."""
        return int(self.lens.sum() - self.lcp.sum())

    def __len__(self) -> int:
        return len(self.lens)

    def nodes(self) -> NodeTable:
        """The nodes of the tree; their leaves are items."""
        return NodeTable.from_lcp(self.lens, lcp=self.lcp)

    def end_node(self, nodes: NodeTable) -> IntArray:
        """(m,) int64 the node in which each item ends."""
        # A duplicate has no run of its own: the last node of the leaf before it is its node too.
        return np.searchsorted(nodes.first_leaf, np.arange(len(self)), side="right") - 1

    def union_tokens(self, items: Sequence[int]) -> int:
        """Tree tokens of some items, given in ascending order."""
        index = np.asarray(items, dtype=np.int64)
        return int(self.lens[index].sum() - self.shared(index).sum())

    def shared(self, index: IntArray) -> IntArray:
        """Tokens that each of some items (ascending) shares with the one before it; the first is 0."""
        return lcp_of_subset(self.lcp, index)

    def merged(self, starts: IntArray) -> Self:
        """Makes one item of each run of neighbours.

        Args:
            starts: (k,) ascending item indices, the first of each run; starts[0] = 0. The items of a run must share
                at least as much with each other as with what is outside.
        """
        tokens = np.add.reduceat(self.lens - self.lcp, starts) + self.lcp[starts]
        return replace(
            self,
            lens=tokens,
            lcp=self.lcp[starts],
            terms=np.add.reduceat(self.terms, starts),
            bounds=np.append(self.bounds[starts], self.bounds[-1]),
        )

    def without_prefixes(self) -> Self:
        """Joins every item that is a prefix of the next one (or its duplicate) to it: together they cost no token more.

        Only for packs whose loss terms are not capped.
        """
        is_start = np.ones(len(self), dtype=bool)
        is_start[1:] = self.lens[:-1] != self.lcp[1:]
        return self if is_start.all() else self.merged(np.flatnonzero(is_start))

    def coarsened(self, *, max_tokens: int, max_terms: int) -> Self:
        """Joins small subtrees, and runs of small sibling subtrees, to items.

        Args:
            max_tokens: tokens of an item below the node that its leaves share.
            max_terms: its loss terms.
        """
        nodes = self.nodes()
        own = nodes.end - nodes.start
        below = own.copy()
        for node in range(nodes.num_nodes - 1, 0, -1):
            below[nodes.parent[node]] += below[node]
        terms = np.concatenate(([0], np.cumsum(self.terms)))
        starts: list[int] = []
        group_tokens = group_terms = 0
        group_parent = -2
        first, last, parent = nodes.first_leaf.tolist(), nodes.last_leaf.tolist(), nodes.parent.tolist()
        subtree_tokens, subtree_end = below.tolist(), nodes.subtree_end.tolist()
        end_node = self.end_node(nodes).tolist()
        node = 0
        while node < nodes.num_nodes:
            tokens = subtree_tokens[node]
            num_terms = int(terms[last[node]] - terms[first[node]])
            if tokens <= max_tokens and num_terms <= max_terms:
                is_sibling = parent[node] == group_parent
                if is_sibling and group_tokens + tokens <= max_tokens and group_terms + num_terms <= max_terms:
                    group_tokens, group_terms = group_tokens + tokens, group_terms + num_terms
                else:
                    starts.append(first[node])
                    group_tokens, group_terms, group_parent = tokens, num_terms, parent[node]
                node = subtree_end[node]
                continue
            # Items that end in a node which is parted stand alone.
            leaf = first[node]
            while leaf < last[node] and end_node[leaf] == node:
                starts.append(leaf)
                leaf += 1
            group_parent = -2
            node += 1
        return self.merged(np.array(starts, dtype=np.int64))
