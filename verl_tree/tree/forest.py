"""Trajectories form a forest of prefix trees: sort them, compare neighbours, read off the nodes.

In lexicographic order, trajectories that share a prefix are neighbours. So the number of tokens that each shares with
the one before it (`lcp`) holds the whole forest. The leaves under a token are a range of the order, the tokens of any
subset of leaves are counted from it, and one pass over it gives the nodes. No token becomes a Python object.

Legend: F flat tokens, S trajectories (leaves), N nodes.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from verl_tree.tree.nodes import IntArray, NodeTable


@dataclass(frozen=True, slots=True, eq=False)
class TokenForest:
    """The prefix trees of trajectories. Every trajectory is a leaf, also duplicates and strict prefixes.

    Example: the trajectories 0 = [1 2 3 4], 1 = [1 2 5], 2 = [1 2], 3 = [1 2 3 4], 4 = [7]::

        node 0: 1 2 ──┬── node 1: 3 4      DFS order of the leaves: 2, 0, 3, 1, 4
                      └── node 2: 5        (2 ends in node 0; 0 and 3 are duplicates and end in node 1)
        node 3: 7

        order            2 0 3 1 4         node_parent      -1  0  0 -1
        lcp              0 2 4 2 0         node_start        0  2  2  0
        sequence_lens    4 3 2 4 1         node_end          2  4  3  1
        dfs_rank         1 3 0 2 4         node_first_leaf   0  1  3  4
                                           node_last_leaf    4  3  4  5
        num_tokens       6                 node_depth        0  1  1  0
        num_flat_tokens  14                node_sequence     2  0  1  4

    The fields node_* are (N,) int64: `node_sequence` is a trajectory that carries the node's tokens, the others are
    those of `NodeTable`.

    Attributes:
        tokens: (F,) the trajectories one after another; int32 where all were given so, else int64.
        sequence_offsets: (S + 1,) int64, where each trajectory starts in `tokens`.
        sequence_lens: (S,) int64, lengths in tokens.
        order: (S,) int64, the trajectories in DFS order: by merge key in order of first appearance, then by token ids,
            strict prefixes before their extensions, duplicates by index.
        dfs_rank: (S,) int64, the inverse of `order`.
        lcp: (S,) int64, tokens that order[i] shares with order[i - 1]; lcp[0] = 0.
    """

    tokens: IntArray
    sequence_offsets: IntArray
    sequence_lens: IntArray
    order: IntArray
    dfs_rank: IntArray
    lcp: IntArray
    node_parent: IntArray
    node_start: IntArray
    node_end: IntArray
    node_first_leaf: IntArray
    node_last_leaf: IntArray
    node_sequence: IntArray
    node_depth: IntArray

    @classmethod
    def from_sequences(cls, sequences: Sequence[ArrayLike], *, merge_keys: Sequence[Hashable] | None = None) -> Self:
        """Find the forest of a list of trajectories from their tokens alone; an empty list gives an empty forest.

        Args:
            sequences: S one-dimensional integer arrays or lists, each with at least one token.
            merge_keys: One per trajectory: what besides the tokens changes the forward (images, LoRA slot, position
                scheme). Trajectories with different keys share no token. None: all may share.

        Raises:
            ValueError: A trajectory is empty, not one-dimensional or not of integers; or the number of merge keys is
                not S.
        """
        if merge_keys is not None and len(merge_keys) != len(sequences):
            raise ValueError(
                f"merge_keys has {len(merge_keys)} entries for {len(sequences)} sequences: give one for each"
            )
        tokens, offsets = _concatenate(sequences)
        lens = np.diff(offsets)
        key_ids = _key_ids(merge_keys if merge_keys is not None else [None] * len(lens))
        order = _lexicographic_order(tokens, offsets=offsets, key_ids=key_ids)
        lcp = _neighbour_lcp(tokens, offsets=offsets, order=order, key_ids=key_ids)
        dfs_rank = np.empty_like(order)
        dfs_rank[order] = np.arange(len(order))
        nodes = NodeTable.from_lcp(lens[order], lcp=lcp)
        return cls(
            tokens=tokens,
            sequence_offsets=offsets,
            sequence_lens=lens,
            order=order,
            dfs_rank=dfs_rank,
            lcp=lcp,
            node_parent=nodes.parent,
            node_start=nodes.start,
            node_end=nodes.end,
            node_first_leaf=nodes.first_leaf,
            node_last_leaf=nodes.last_leaf,
            node_sequence=order[nodes.first_leaf],
            node_depth=nodes.depth,
        )

    @property
    def num_leaves(self) -> int:
        """Number of trajectories, S."""
        return len(self.order)

    @property
    def num_nodes(self) -> int:
        """Number of nodes, N."""
        return len(self.node_parent)

    @property
    def num_roots(self) -> int:
        """Number of trees in the forest."""
        return int((self.node_parent < 0).sum())

    @property
    def depth(self) -> int:
        """Nodes on the longest path, 1 where nothing branches; 0 for an empty forest."""
        return int(self.node_depth.max(initial=-1)) + 1

    @property
    def num_flat_tokens(self) -> int:
        """Sum of the trajectory lengths, F."""
        return len(self.tokens)

    @property
    def num_tokens(self) -> int:
        """Number of tree tokens."""
        return self.num_flat_tokens - int(self.lcp.sum())

    @property
    def potential_overlap_ratio(self) -> float:
        """1 - tree tokens / flat tokens; 0.0 for an empty forest."""
        return 1.0 - self.num_tokens / self.num_flat_tokens if self.num_flat_tokens else 0.0

    def sequence(self, index: int) -> IntArray:
        """Return a view of the tokens of one trajectory."""
        return self.tokens[self.sequence_offsets[index] : self.sequence_offsets[index + 1]]

    def subset_lcp(self, leaves: ArrayLike) -> IntArray:
        """Return the `lcp` of some trajectories alone, (s,) int64: the tokens that each shares with the one before it.

        Raises:
            ValueError: The leaves are not distinct and in DFS order.
        """
        ranks = self.dfs_rank[np.asarray(leaves, dtype=np.int64)]
        if (np.diff(ranks) <= 0).any():
            raise ValueError(
                "leaves must be distinct and in DFS order: sort them by forest.dfs_rank, "
                "for example leaves[np.argsort(forest.dfs_rank[leaves])]"
            )
        return lcp_of_subset(self.lcp, ranks)


def lcp_of_subset(lcp: IntArray, ranks: IntArray) -> IntArray:
    """Count the tokens that each leaf of a subset shares with the one before it, (s,) int64; the first is 0.

    `lcp` (S,) is the same for all leaves in DFS order, `ranks` (s,) the subset as ascending places in that order.
    """
    shared = np.zeros(len(ranks), dtype=np.int64)
    if len(ranks) > 1:
        # Two leaves share what all neighbours between them share: min(lcp[previous + 1 : next + 1]).
        shared[1:] = np.minimum.reduceat(lcp[: ranks[-1] + 1], ranks[:-1] + 1)
    return shared


def as_token_ids(given: ArrayLike, *, name: str) -> IntArray:
    """Return token ids as an array, (L,), which may be empty; `name` is what an error calls it.

    Raises:
        ValueError: They are not one-dimensional or not integers of 64 bits at most.
    """
    array = np.asarray(given)
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}: give one-dimensional token ids")
    if array.size == 0:
        return np.empty(0, dtype=np.int64)  # numpy makes floats of an empty list
    if array.dtype.kind not in "iu" or not np.can_cast(array.dtype, np.int64):
        raise ValueError(f"{name} has dtype {array.dtype}: token ids are int32 or int64")
    return array


def _concatenate(sequences: Sequence[ArrayLike]) -> tuple[IntArray, IntArray]:
    """Check the trajectories and lay them one after another: tokens (F,) and offsets (S + 1,) int64."""
    arrays = [as_token_ids(sequence, name=f"sequence {index}") for index, sequence in enumerate(sequences)]
    for index, array in enumerate(arrays):
        if array.size == 0:
            raise ValueError(f"sequence {index} is empty: a trajectory has at least one token, leave it out")
    offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
    np.cumsum([array.size for array in arrays], out=offsets[1:])
    is_int32 = all(np.can_cast(dtype, np.int32) for dtype in {array.dtype for array in arrays})
    tokens = np.empty(offsets[-1], dtype=np.int32 if is_int32 and arrays else np.int64)
    if arrays:
        np.concatenate(arrays, out=tokens)
    return tokens, offsets


def _key_ids(merge_keys: Sequence[Hashable]) -> IntArray:
    """Give each merge key a number in order of first appearance, (S,) int64."""
    number_of = {key: number for number, key in enumerate(dict.fromkeys(merge_keys))}
    return np.array([number_of[key] for key in merge_keys], dtype=np.int64)


def _lexicographic_order(tokens: IntArray, *, offsets: IntArray, key_ids: IntArray) -> IntArray:
    """Sort the trajectories by merge key, then tokens, then index, (S,) int64."""
    # Big-endian bytes compare like the numbers that they encode. So two trajectories are compared by one memcmp, and a
    # strict prefix comes before its extensions.
    bounds = offsets.tolist()
    if tokens.min(initial=0) >= 0 and tokens.max(initial=0) < 2**32:
        rows = [tokens[start:end].astype(">u4").tobytes() for start, end in pairwise(bounds)]
    else:
        sign = np.int64(-(2**63))  # flipped, so that signed numbers compare like unsigned ones
        rows = [(tokens[start:end].astype(np.int64) ^ sign).astype(">i8").tobytes() for start, end in pairwise(bounds)]
    order = sorted(range(len(rows)), key=rows.__getitem__)
    order.sort(key=key_ids.tolist().__getitem__)
    return np.array(order, dtype=np.int64)


def _neighbour_lcp(tokens: IntArray, *, offsets: IntArray, order: IntArray, key_ids: IntArray) -> IntArray:
    """Count the tokens shared with the trajectory before in the order, (S,) int64; 0 across merge keys."""
    lcp = np.zeros(len(order), dtype=np.int64)
    for index in range(1, len(order)):
        before, here = order[index - 1], order[index]
        if key_ids[before] == key_ids[here]:
            first = tokens[offsets[before] : offsets[before + 1]]
            second = tokens[offsets[here] : offsets[here + 1]]
            longest = min(len(first), len(second))
            # The first place at which they differ, or the end of the shorter one.
            lcp[index] = np.append(first[:longest] != second[:longest], True).argmax()
    return lcp
