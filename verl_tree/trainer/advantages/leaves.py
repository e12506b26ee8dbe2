"""One advantage per leaf: `tree_grpo`, and `tree_grpo_intra`, which adds a comparison within the session.

`tree_grpo` is GRPO over the leaves of a prompt's sessions. Every session has the same weight, so that one that branched
a lot does not dominate the baseline: a leaf of session s weighs w = 1 / (number of sessions * leaves of s). The mean is
sum(w r), and the unbiased variance is sum(w (r - mean)^2) / (1 - sum(w^2)). If every session has equally many leaves,
both equal those of verl's GRPO (`core_algos.compute_grpo_outcome_advantage`, verl 0.9.1).

`tree_grpo_intra` is Tree-GRPO (arXiv 2509.21240): A = A_inter-tree + A_intra-tree, GRPO over all leaves of the question
plus GRPO over the leaves of the tree, which is a session here. The first part is `tree_grpo`. It equals the paper's if
all trees have equally many leaves, as they have there.
"""

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from rollout_hooks.capture.leaf_shapes import MAX_REWARD

EPSILON = 1e-6
"""Added to a standard deviation, as in verl's GRPO."""


def one_per_leaf(rewards: ArrayLike, **others: Sequence[object]) -> np.ndarray:
    """Return the rewards as (R,) float64.

    Raises:
        ValueError: There is not one reward, and one of each of the others, per leaf, or a reward is not finite.
    """
    rewards_R = np.asarray(rewards, dtype=np.float64)
    if any(rewards_R.shape != (len(values),) for values in others.values()):
        given = ", ".join(f"{len(values)} {name}" for name, values in others.items())
        raise ValueError(f"rewards of shape {rewards_R.shape} for {given}: give one of each per leaf")
    # One that is not finite makes every advantage of its group NaN, and so do squares of larger ones.
    for leaf in np.flatnonzero(~(np.abs(rewards_R) <= MAX_REWARD)).tolist():
        raise ValueError(f"the reward of leaf {leaf} is {rewards_R[leaf]}: give a number that is finite in float32")
    return rewards_R


def leaf_advantages(
    rewards: ArrayLike,
    *,
    groups: Sequence[Hashable],
    sessions: Sequence[Hashable],
    normalize_by_std: bool = True,
    epsilon: float = EPSILON,
) -> np.ndarray:
    """Compare leaves with all leaves of their group, every session with the same weight.

    `rewards`, `groups` and `sessions` have one entry per leaf; sessions may repeat between groups. `normalize_by_std`
    divides by the group's standard deviation plus `epsilon` (GRPO; without it Dr. GRPO). The result is (R,) float64,
    exactly 0 in a group of equal rewards. As in verl's GRPO, a leaf that is alone in its group gets its reward, over 1
    + `epsilon` if normalised.

    Raises:
        ValueError: The arguments differ in length.
    """
    rewards_R = one_per_leaf(rewards, groups=groups, sessions=sessions)
    if len(rewards_R) == 0:
        return rewards_R
    group_R = dense_ids(groups)
    relative_R, mean_G, std_G = compare_in_groups(rewards_R, group_R=group_R, weight_R=leaf_weights(groups, sessions))
    deviation_R = relative_R - mean_G[group_R]
    return deviation_R / (std_G[group_R] + epsilon) if normalize_by_std else deviation_R


def compare_in_groups(
    rewards_R: np.ndarray, *, group_R: np.ndarray, weight_R: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the rewards relative to one of their group (R,), and of these each group's mean and unbiased std (G,).

    Relative to the group's first reward, equal rewards cancel exactly and epsilon does not magnify rounding. A leaf
    that is alone in its group is compared with 0, as in verl's GRPO, and not with itself; its standard deviation is 1.
    """
    is_alone_G = np.bincount(group_R) == 1
    first_leaf_G = np.unique(group_R, return_index=True)[1]
    relative_R = rewards_R - np.where(is_alone_G, 0.0, rewards_R[first_leaf_G])[group_R]
    mean_G = np.where(is_alone_G, 0.0, np.bincount(group_R, weight_R * relative_R))
    squares_G = np.bincount(group_R, weight_R * (relative_R - mean_G[group_R]) ** 2)
    unbiased_G = np.where(is_alone_G, 1.0, 1.0 - np.bincount(group_R, weight_R**2))
    return relative_R, mean_G, np.where(is_alone_G, 1.0, np.sqrt(squares_G / unbiased_G))


def intra_tree_advantages(
    rewards: ArrayLike,
    *,
    groups: Sequence[Hashable],
    sessions: Sequence[Hashable],
    normalize_by_std: bool = True,
    epsilon: float = EPSILON,
) -> np.ndarray:
    """Add to `leaf_advantages` a comparison with the leaves of the same session (Tree-GRPO).

    The arguments are the same. The result is (R,) float64, exactly 0 in a group of equal rewards.
    """
    question = leaf_advantages(
        rewards, groups=groups, sessions=sessions, normalize_by_std=normalize_by_std, epsilon=epsilon
    )
    trees = list(zip(groups, sessions, strict=True))
    tree = leaf_advantages(
        rewards, groups=trees, sessions=range(len(trees)), normalize_by_std=normalize_by_std, epsilon=epsilon
    )
    tree_of_leaf = dense_ids(trees)
    # For a leaf that is alone in its session, the paper's formula gives 0. The authors' code gives the raw reward, as
    # GRPO does for a lone sample; with that, sessions with one leaf would not be GRPO.
    return question + np.where(np.bincount(tree_of_leaf)[tree_of_leaf] > 1, tree, 0.0)


def leaf_weights(groups: Sequence[Hashable], sessions: Sequence[Hashable]) -> np.ndarray:
    """Return each leaf's weight in its group, (R,) float64: 1 / (sessions of the group * leaves of the session)."""
    group, session = dense_ids(groups), dense_ids(list(zip(groups, sessions, strict=True)))
    session_num_leaves = np.bincount(session)
    session_group = np.zeros(len(session_num_leaves), dtype=np.int64)
    session_group[session] = group
    return 1.0 / (np.bincount(session_group)[group] * session_num_leaves[session])


def dense_ids(values: Sequence[Hashable]) -> np.ndarray:
    """Replace values by 0, 1, ... in order of first appearance."""
    ids: dict[Hashable, int] = {}
    return np.array([ids.setdefault(value, len(ids)) for value in values], dtype=np.int64)
