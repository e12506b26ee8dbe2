"""A pack of trajectories as tensors: every tree token once, in DFS preorder.

In preorder the descendants of a token are the range that follows it. So one integer per token says who may attend to
it: the key j is visible to the query i iff j <= i < subtree_end[j]. A layout on a device remembers the one on the host
that it was copied from (`on_host`), and planning reads that, so nothing is copied back.

Legend: T tree tokens of the pack, F flat tokens (sum over its trajectories), S its trajectories.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from verl_tree.tree import TokenForest
from verl_tree.tree.nodes import IntArray, NodeTable
from verl_tree.tree.transfer import to_device


@dataclass(frozen=True, slots=True, eq=False)
class TreeLayout:
    """The tensors of one pack.

    Example: a tree four tokens deep of the trajectories 0 = [5 6 7 8], 1 = [5 6 7 9], 2 = [5 6] (a strict prefix of 0
    and 1), 3 = [5 4 3] and 4 = [5 4 3] (duplicates). DFS order of the leaves: 3 4 2 0 1::

        index in the pack   0   1   2   3   4   5   6
                            5 ┬ 4 ─ 3                   3 and 4 end at index 2
                              └──────── 6 ─ 7 ┬ 8       2 ends at index 3, 0 at index 5
                                              └──── 9   1 ends at index 6

        token_ids_T         5   4   3   6   7   8   9
        position_T          0   1   2   1   2   3   3
        parent_T           -1   0   1   0   3   4   4
        subtree_end_T       7   3   3   7   7   6   7

        leaves              3       4       2     0         1
        tree_index_F        0 1 2   0 1 2   0 3   0 3 4 5   0 3 4 6
        leaf_offsets        0       3       6     8         12        16

        num_nodes           6: [5], [4 3], [6], [7], [8], [9]

    Attributes:
        token_ids_T: (T,) int64.
        position_T: (T,) int64, the token's position in its trajectories.
        parent_T: (T,) int64, index in the pack of the token before it on its path, -1 at roots.
        subtree_end_T: (T,) int32, one past the last descendant.
        tree_index_F: (F,) int64, the tree token of every (leaf, position), leaf after leaf.
        leaf_offsets: (S + 1,) int64 on the host, where each leaf starts in F.
        leaves: (S,) int64 on the host, indices of the forest's trajectories in DFS order.
        num_nodes: Nodes of the tree that these leaves alone form.
    """

    token_ids_T: Tensor
    position_T: Tensor
    parent_T: Tensor
    subtree_end_T: Tensor
    tree_index_F: Tensor
    leaf_offsets: IntArray
    leaves: IntArray
    num_nodes: int
    _host: Self | None = field(default=None, repr=False)

    @classmethod
    def from_forest(
        cls, forest: TokenForest, leaves: ArrayLike | None = None, *, device: torch.device | str = "cpu"
    ) -> Self:
        """Lay out the tree that some trajectories of a forest form alone.

        `leaves` are (S,) distinct indices of trajectories in DFS order, as in `Pack.leaves`. None: all. Empty: T = 0.

        Raises:
            ValueError: The leaves are not distinct and in DFS order.
        """
        leaves = forest.order if leaves is None else np.asarray(leaves, dtype=np.int64)
        lcp, lens = forest.subset_lcp(leaves), forest.sequence_lens[leaves]
        nodes = NodeTable.from_lcp(lens, lcp=lcp)
        # A leaf's run: the tokens that it does not share with the leaf before it. They are neighbours in preorder.
        run_lens = lens - lcp
        run_ends = np.cumsum(run_lens)
        num_tokens = int(run_lens.sum())
        index_T = np.arange(num_tokens)
        position_T = index_T - np.repeat(run_ends - lens, run_lens)
        token_ids_T = forest.tokens[np.repeat(forest.sequence_offsets[leaves], run_lens) + position_T]

        node_lens = nodes.end - nodes.start
        node_bounds = np.concatenate([[0], np.cumsum(node_lens)])
        parent_T = index_T - 1
        # The parent of a node's first token is the last token of the parent node.
        parent_T[node_bounds[:-1]] = np.where(nodes.parent >= 0, node_bounds[nodes.parent + 1] - 1, -1)

        def tensor(array: IntArray, dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(array).to(dtype)

        on_host = cls(
            token_ids_T=tensor(token_ids_T, torch.int64),
            position_T=tensor(position_T, torch.int64),
            parent_T=tensor(parent_T, torch.int64),
            subtree_end_T=tensor(np.repeat(node_bounds[nodes.subtree_end], node_lens), torch.int32),
            tree_index_F=tensor(_tree_index(lens, lcp=lcp, run_ends=run_ends), torch.int64),
            leaf_offsets=np.concatenate([[0], np.cumsum(lens)]),
            leaves=leaves,
            num_nodes=nodes.num_nodes,
        )
        return on_host.to(device)

    @property
    def num_tokens(self) -> int:
        """Tree tokens T."""
        return self.token_ids_T.shape[0]

    @property
    def num_flat_tokens(self) -> int:
        """Flat tokens F."""
        return self.tree_index_F.shape[0]

    @property
    def num_leaves(self) -> int:
        """Trajectories S."""
        return len(self.leaves)

    def path(self, leaf: int) -> Tensor:
        """Return the tree tokens of a trajectory, from its root on; `leaf` counts as `leaves` does."""
        start, end = self.leaf_offsets[leaf : leaf + 2]
        return self.tree_index_F[start:end]

    @property
    def on_host(self) -> Self:
        """The same layout with its tensors on the host, where it was made, for planning: nothing is copied back."""
        return self if self._host is None else self._host

    def with_token_ids(self, token_ids_F: Tensor) -> Self:
        """Return a layout on the host, of a forest of keys (`verl_tree.tree.row_keys`), with the ids of its tokens.

        `token_ids_F` are those of the flat tokens, leaf after leaf.
        """
        token_ids_T = torch.zeros_like(self.token_ids_T)
        token_ids_T[self.tree_index_F] = token_ids_F.long()
        return dataclasses.replace(self, token_ids_T=token_ids_T)

    def to(self, device: torch.device | str) -> Self:
        """Return the same layout with its tensors on another device; host arrays are shared."""
        host = self.on_host
        if torch.device(device).type == "cpu":
            return host
        by_token = (host.token_ids_T, host.position_T, host.parent_T, host.subtree_end_T)
        token_ids_T, position_T, parent_T, subtree_end_T, tree_index_F = to_device(
            (*by_token, host.tree_index_F), device
        )
        return dataclasses.replace(
            host,
            token_ids_T=token_ids_T,
            position_T=position_T,
            parent_T=parent_T,
            subtree_end_T=subtree_end_T,
            tree_index_F=tree_index_F,
            _host=host,
        )

    def materialize(self) -> Tensor:
        """Return the (T, T) boolean mask, queries by keys: which tokens are on the path of which.

        This is the slow oracle of tests: it follows `parent_T` token by token and does not use `subtree_end_T`.
        """
        visible = torch.eye(self.num_tokens, dtype=torch.bool)
        for query, parent in enumerate(self.on_host.parent_T.tolist()):
            if parent >= 0:
                visible[query] |= visible[parent]
        return visible.to(self.parent_T.device)


def _tree_index(lens: IntArray, *, lcp: IntArray, run_ends: IntArray) -> IntArray:
    """Return the tree token of every (leaf, position), (F,) int64; a leaf repeats what it shares with the last one."""
    tree_index = np.empty(int(lens.sum()), dtype=np.int64)
    before = tree_index[:0]
    offset = 0
    for leaf_len, shared, run_end in zip(lens.tolist(), lcp.tolist(), run_ends.tolist(), strict=True):
        here = tree_index[offset : offset + leaf_len]
        here[:shared] = before[:shared]
        here[shared:] = np.arange(run_end - (leaf_len - shared), run_end)
        before = here
        offset += leaf_len
    return tree_index
