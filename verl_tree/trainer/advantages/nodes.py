"""One advantage per node of a session's token tree: `treerl` and `treepo` (docs/advantages.md).

The trajectories of a session, prompt and response, form a token tree, of which only the shape is needed. The value V of
a node is the mean reward of the leaves below it. Above the roots of a prompt's sessions stands the group with all their
leaves::

    group  ──┬── session 0 ── P a ─┬─ b    r = 1          V(group) = 2/3, 3 leaves
             │                     └─ c    r = 0          V(P a) = 1/2, 2 leaves
             └── session 1 ── P d          r = 1          V(b) = V(P d) = 1, V(c) = 0

Sessions never share a node, even where they sampled the same tokens. In both papers the trees are those of the search,
and different trees are independent samples, as in GRPO.

Legend: R rows (leaves), N nodes, G groups.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from verl_tree.trainer.advantages.leaves import EPSILON, compare_in_groups, dense_ids, leaf_weights, one_per_leaf
from verl_tree.tree import TokenForest
from verl_tree.tree.nodes import IntArray
from verl_tree.tree.shape import ForestShape


@dataclass(frozen=True, slots=True, eq=False)
class SessionTrees:
    """The token trees of all sessions, with the values of their nodes and groups.

    A trajectory that is a strict prefix of another ends in an inner node, and duplicates end in one node. Their rewards
    count in that node's value, and their tokens get the advantages of the nodes on their path.
    """

    shape: ForestShape  # The trees
    value_N: np.ndarray  # (N,) mean reward below each node
    num_leaves_N: IntArray  # (N,) leaves below it
    group_value_N: np.ndarray  # (N,) mean reward of the node's group, over leaves or sessions
    group_num_leaves_N: IntArray  # (N,) leaves of the group
    group_std_N: np.ndarray  # (N,) unbiased standard deviation of their rewards; 1 where the group has one leaf

    @classmethod
    def from_leaves(
        cls,
        sequences: Sequence[ArrayLike],
        *,
        rewards: ArrayLike,
        groups: Sequence[Hashable],
        sessions: Sequence[Hashable],
        weigh_sessions: bool = False,
    ) -> Self:
        """Build the trees of all groups from R trajectories (token ids of prompt and response).

        Sessions are distinct within a group and may repeat between groups. With `weigh_sessions` mean and standard
        deviation of a group are those of `leaf_advantages`, in which every session weighs the same.

        Raises:
            ValueError: The arguments differ in length.
        """
        one_per_leaf(rewards, sequences=sequences, groups=groups, sessions=sessions)
        shape = ForestShape.of(TokenForest.from_sequences(sequences))
        return cls.from_shape(shape, rewards=rewards, groups=groups, sessions=sessions, weigh_sessions=weigh_sessions)

    @classmethod
    def from_shape(
        cls,
        shape: ForestShape,
        *,
        rewards: ArrayLike,
        groups: Sequence[Hashable],
        sessions: Sequence[Hashable],
        weigh_sessions: bool,
    ) -> Self:
        """Build the trees from the shape of any forest of the trajectories; see `from_leaves`."""
        rewards_R = one_per_leaf(rewards, order=shape.order.tolist(), groups=groups, sessions=sessions)
        shape = shape.split(list(zip(groups, sessions, strict=True)))
        nodes = shape.nodes
        group_R = dense_ids(groups)
        num_leaves_G = np.bincount(group_R)
        weight_R = leaf_weights(groups, sessions) if weigh_sessions else 1.0 / num_leaves_G[group_R]
        relative_R, value_G, std_G = compare_in_groups(rewards_R, group_R=group_R, weight_R=weight_R)
        # Sums over first_leaf..last_leaf. The zero at the end is for a last_leaf of R.
        bounds = np.stack([nodes.first_leaf, nodes.last_leaf], axis=1).ravel()
        sum_N = np.add.reduceat(np.append(relative_R[shape.order], 0.0), bounds)[::2]
        num_leaves_N = nodes.last_leaf - nodes.first_leaf
        group_N = group_R[shape.order[nodes.first_leaf]]
        return cls(
            shape=shape,
            value_N=sum_N / num_leaves_N,
            num_leaves_N=num_leaves_N,
            group_value_N=value_G[group_N],
            group_num_leaves_N=num_leaves_G[group_N],
            group_std_N=std_G[group_N],
        )

    def on_responses(self, values_N: np.ndarray, *, response_lens: Sequence[int], width: int) -> np.ndarray:
        """Return the value of each response token's node: (R, width) float64, 0 after the responses.

        `values_N` (N,) is one number per node. The last `response_lens` tokens of each sequence are its response.
        """
        shape, nodes = self.shape, self.shape.nodes
        spans = list(zip(nodes.start.tolist(), nodes.end.tolist(), strict=True))
        first_nodes = np.searchsorted(nodes.first_leaf, np.arange(shape.num_leaves + 1)).tolist()
        result = np.zeros((shape.num_leaves, width))
        # In DFS order a row has the values of the row before it, except on nodes that begin with this row.
        values = np.zeros(shape.sequence_lens.max(initial=0))
        for row, (start, end) in zip(shape.order.tolist(), pairwise(first_nodes), strict=True):
            for node in range(start, end):
                values[slice(*spans[node])] = values_N[node]
            row_len, response_len = shape.sequence_lens[row], response_lens[row]
            assert response_len <= min(row_len, width)
            result[row, :response_len] = values[row_len - response_len : row_len]
        return result


def treerl_advantages(trees: SessionTrees, *, normalize_by_std: bool = True, epsilon: float = EPSILON) -> np.ndarray:
    """Compare each node with its group and its parent, divided by the square root of its number of leaves (TreeRL).

    A(n) = ((V(n) - V(group)) + (V(n) - V(parent))) / (2 sqrt(leaves of n)), the parent of a root being the group.

    Source: TreeRL, arXiv 2506.11902, process supervision by global and local advantage. Half of the paper's sum,
    divided by the group's standard deviation: this makes it GRPO where every session has one leaf.

    The result is (N,) float64, exactly 0 in a group of equal rewards. `normalize_by_std` divides by the group's
    standard deviation plus `epsilon`.
    """
    parent_N = trees.shape.nodes.parent
    parent_value_N = np.where(parent_N >= 0, trees.value_N[parent_N], trees.group_value_N)
    total_N = (trees.value_N - trees.group_value_N) + (trees.value_N - parent_value_N)
    advantages_N = total_N / (2.0 * np.sqrt(trees.num_leaves_N))
    return advantages_N / (trees.group_std_N + epsilon) if normalize_by_std else advantages_N


def treepo_advantages(trees: SessionTrees, *, normalize_by_std: bool = True, epsilon: float = EPSILON) -> np.ndarray:
    """Compare each node with the subgroups above it, larger subgroups counting more (TreePO).

    A(n) = sum(|g| (V(n) - V(g))) / sum(|g|) over the subgroups g above n: its group and its ancestors, |g| leaves each.
    A root that holds all leaves of its group is the same subgroup and counts once.

    Source: TreePO, arXiv 2508.17445, tree-based advantage estimation weighted by subgroup size (`group_size` in the
    authors' `compute_tree_reinforce_plus_plus_baseline_outcome_advantage`). The paper gives one number per trajectory;
    tokens that only this trajectory has get that number here. A shared token gets the formula of the subtree below it.
    Numbers are normalised per group as in GRPO; the authors whiten over the batch.

    Arguments and result are those of `treerl_advantages`.
    """
    nodes = trees.shape.nodes
    is_group_N = (nodes.parent < 0) & (trees.num_leaves_N == trees.group_num_leaves_N)
    counted_N = np.where(is_group_N, 0, trees.num_leaves_N)
    weight_N = trees.group_num_leaves_N.astype(np.float64)
    sum_N = weight_N * trees.group_value_N
    by_depth = np.argsort(nodes.depth, kind="stable")
    bounds = np.searchsorted(nodes.depth[by_depth], np.arange(1, nodes.depth.max(initial=-1) + 2))
    for start, end in pairwise(bounds.tolist()):
        level = by_depth[start:end]
        parents = nodes.parent[level]
        weight_N[level] = weight_N[parents] + counted_N[parents]
        sum_N[level] = sum_N[parents] + counted_N[parents] * trees.value_N[parents]
    advantages_N = trees.value_N - sum_N / weight_N
    return advantages_N / (trees.group_std_N + epsilon) if normalize_by_std else advantages_N
