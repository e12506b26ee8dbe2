"""What the packing methods share: the caps of a pack, a forest or one tree as a list of items, and the result.

In DFS order, a tree is two columns: the length of every leaf and the tokens that it shares with the leaf before it. The
tokens of any set of leaves follow from them, so the methods need nothing else. They work on *items*: one leaf, or
several neighbours that stay together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Self

import numpy as np

from verl_tree.tree import TokenForest, lcp_of_subset
from verl_tree.tree.nodes import IntArray, NodeTable

UNLIMITED = 2**62


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """The trajectories of one forward/backward (`leaves`: (s,) int64 indices, in DFS order) and their tree tokens."""

    leaves: IntArray
    num_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """A partition of the trajectories of a forest into packs.

    Attributes:
        packs: Every trajectory is in exactly one of them.
        num_tokens: Packed tokens.
        num_flat_tokens: Flat tokens.
        lower_bound: Lower bound on the packed tokens of any packing under these caps.
        num_capacity_tokens: Tokens that all packs could hold. None: no capacity.
    """

    packs: tuple[Pack, ...]
    num_tokens: int
    num_flat_tokens: int
    lower_bound: int
    num_capacity_tokens: int | None

    @property
    def effective_reuse_ratio(self) -> float:
        """1 - packed tokens / flat tokens; 0.0 if there is nothing to pack."""
        return 1.0 - self.num_tokens / self.num_flat_tokens if self.num_flat_tokens else 0.0

    @property
    def compression(self) -> float:
        """Flat tokens / packed tokens; 1.0 if there is nothing to pack."""
        return self.num_flat_tokens / self.num_tokens if self.num_tokens else 1.0

    @property
    def gap(self) -> float:
        """Packed tokens / lower bound - 1: the distance from the optimum is at most this; 0.0 proves the optimum."""
        return self.num_tokens / self.lower_bound - 1.0 if self.lower_bound else 0.0

    @property
    def fill(self) -> float:
        """Packed tokens / capacity of all packs; 1.0 without a capacity."""
        return self.num_tokens / self.num_capacity_tokens if self.num_capacity_tokens else 1.0


@dataclass(frozen=True, slots=True)
class Caps:
    """The tree tokens and the loss terms that one pack may hold."""

    num_tokens: int = UNLIMITED
    num_terms: int = UNLIMITED

    def hold(self, num_tokens: int, num_terms: int) -> bool:
        """Return whether one pack can have this many tokens and loss terms."""
        return num_tokens <= self.num_tokens and num_terms <= self.num_terms


@dataclass(frozen=True, eq=False)  # without slots: cached properties need a __dict__
class Items:
    """The m items of a forest or of one of its trees, in DFS order."""

    lens: IntArray  # (m,) int64, tokens of the item with its whole root path
    lcp: IntArray  # (m,) int64, tokens shared with the item before; 0 where a tree starts
    terms: IntArray  # (m,) int64, loss terms
    first_leaf: IntArray  # (m,) int64, first of the item's leaves in the DFS order of the forest
    last_leaf: IntArray  # (m,) int64, one past the last

    @classmethod
    def from_forest(cls, forest: TokenForest, *, terms: IntArray) -> Self:
        """Make one item of each leaf; `terms` (S,) are the loss terms of the trajectories in the order given."""
        return cls(
            lens=forest.sequence_lens[forest.order],
            lcp=forest.lcp,
            terms=terms[forest.order],
            first_leaf=np.arange(forest.num_leaves),
            last_leaf=np.arange(forest.num_leaves) + 1,
        )

    @property
    def num_tokens(self) -> int:
        """Tree tokens of all items together."""
        return int(self.lens.sum() - self.lcp.sum())

    @property
    def num_terms(self) -> int:
        """Loss terms of all items together."""
        return int(self.terms.sum())

    @cached_property
    def nodes(self) -> NodeTable:
        """The nodes of the tree; their leaves are items."""
        return NodeTable.from_lcp(self.lens, lcp=self.lcp)

    @cached_property
    def end_node(self) -> IntArray:
        """(m,) int64, the node in which each item ends."""
        # A duplicate has no node of its own: it ends in the last node of the item before it.
        return np.searchsorted(self.nodes.first_leaf, np.arange(len(self)), side="right") - 1

    def __len__(self) -> int:
        return len(self.lens)

    def trees(self) -> list[Self]:
        """Part a forest into its trees."""
        starts = [*np.flatnonzero(self.lcp == 0).tolist(), len(self)]
        return [self.subset(np.arange(start, end)) for start, end in pairwise(starts)]

    def subset(self, index: IntArray) -> Self:
        """Keep some items, given in ascending order, as if there were no others."""
        return replace(
            self,
            lens=self.lens[index],
            lcp=lcp_of_subset(self.lcp, index),
            terms=self.terms[index],
            first_leaf=self.first_leaf[index],
            last_leaf=self.last_leaf[index],
        )

    def leaves(self, items: Sequence[int]) -> IntArray:
        """Return the leaves of some items, places in the DFS order of the forest."""
        return np.concatenate([np.arange(self.first_leaf[item], self.last_leaf[item]) for item in items])

    def union_tokens(self, items: Sequence[int] | IntArray) -> int:
        """Count the tree tokens of some items, given in ascending order."""
        index = np.asarray(items, dtype=np.int64)
        return int(self.lens[index].sum() - lcp_of_subset(self.lcp, index).sum())

    def merged(self, starts: IntArray) -> Self:
        """Make one item of every stretch of neighbours.

        `starts` (k,) has the first item of each stretch, ascending; starts[0] = 0. The items of a stretch must share at
        least as much with each other as with those outside.
        """
        return replace(
            self,
            lens=np.add.reduceat(self.lens - self.lcp, starts) + self.lcp[starts],
            lcp=self.lcp[starts],
            terms=np.add.reduceat(self.terms, starts),
            first_leaf=self.first_leaf[starts],
            last_leaf=self.last_leaf[np.append(starts[1:], len(self)) - 1],
        )

    def without_prefixes(self) -> Self:
        """Join every item that is a prefix or duplicate of the next one to it, because together they cost no more.

        Only for packs whose loss terms are not capped.
        """
        is_start = np.ones(len(self), dtype=bool)
        is_start[1:] = self.lens[:-1] != self.lcp[1:]
        return self if is_start.all() else self.merged(np.flatnonzero(is_start))

    def coarsened(self, *, caps: Caps) -> Self:
        """Join small subtrees, and small sibling subtrees, to items of one tree.

        `caps` are those of an item; its tokens count below the node that its leaves share.
        """
        nodes, end_node = self.nodes, self.end_node.tolist()
        first, last, parent = nodes.first_leaf.tolist(), nodes.last_leaf.tolist(), nodes.parent.tolist()
        subtree_end = nodes.subtree_end.tolist()
        tokens_before = np.append(0, np.cumsum(nodes.end - nodes.start)).tolist()
        terms_before = np.append(0, np.cumsum(self.terms)).tolist()
        starts: list[int] = []
        group_tokens = group_terms = node = 0
        group_parent = -2
        while node < nodes.num_nodes:
            tokens = tokens_before[subtree_end[node]] - tokens_before[node]
            terms = terms_before[last[node]] - terms_before[first[node]]
            if caps.hold(tokens, terms):
                if parent[node] == group_parent and caps.hold(group_tokens + tokens, group_terms + terms):
                    group_tokens, group_terms = group_tokens + tokens, group_terms + terms
                else:
                    starts.append(first[node])
                    group_tokens, group_terms, group_parent = tokens, terms, parent[node]
                node = subtree_end[node]
                continue
            # Items that end in a node that is parted stand alone.
            leaf = first[node]
            while leaf < last[node] and end_node[leaf] == node:
                starts.append(leaf)
                leaf += 1
            group_parent = -2
            node += 1
        return self.merged(np.array(starts, dtype=np.int64))
