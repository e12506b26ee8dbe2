"""`tree_grpo`: GRPO whose samples are the leaves of a prompt's sessions, every session with the same weight.

The leaves of one prompt are normalised together. A session that branched a lot must not dominate the
baseline, so a leaf of session s weighs w = 1 / (number of sessions * leaves of s). With weights the mean is
sum(w r) and the unbiased variance is sum(w (r - mean)^2) / (1 - sum(w^2)); where every session has one leaf
these are the mean and the standard deviation of verl's GRPO (`core_algos.compute_grpo_outcome_advantage`,
verl 0.9.1). As there, a leaf that is alone in its group keeps its reward.

verl hands an estimator the uid of each row and nothing of its session, so the trainer announces the row keys
with `row_keys` around the call. Everything else that verl does around an estimator (KL in the reward, rollout
correction) stays verl's.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_tree.batching import parse_row_key

ESTIMATOR_NAME = "tree_grpo"

_row_keys: ContextVar[tuple[str, ...]] = ContextVar("row_keys")


def leaf_advantages(
    rewards: np.ndarray,
    *,
    groups: Sequence[Hashable],
    sessions: Sequence[Hashable],
    normalize_by_std: bool = True,
    epsilon: float = 1e-6,
) -> np.ndarray:
    """Advantages of leaves relative to all leaves of their group, equal weight per session.

    Args:
        rewards: (R,) reward of each leaf.
        groups: (R,) the prompt of each leaf.
        sessions: (R,) its session; distinct within a group, may repeat between groups.
        normalize_by_std: divide by the group's standard deviation (GRPO) or not (Dr. GRPO).
        epsilon: added to the standard deviation.

    Returns:
        (R,) float64. Exactly 0 in a group of equal rewards; the reward itself (over 1 + epsilon where
        normalised) for a leaf that is alone in its group.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    assert rewards.shape == (len(groups),) == (len(sessions),)
    if len(rewards) == 0:
        return rewards
    group = _dense_ids(groups)
    session = _dense_ids(list(zip(groups, sessions, strict=True)))
    num_groups = int(group.max()) + 1

    session_num_leaves = np.bincount(session)
    session_group = np.zeros(len(session_num_leaves), dtype=np.int64)
    session_group[session] = group
    group_num_sessions = np.bincount(session_group, minlength=num_groups)
    weight = 1.0 / (group_num_sessions[group] * session_num_leaves[session])

    # Relative to the group's first reward, so that equal rewards cancel exactly and epsilon does not magnify
    # rounding.
    first_leaf = np.unique(group, return_index=True)[1]
    relative = rewards - rewards[first_leaf][group]
    deviation = relative - np.bincount(group, weight * relative)[group]

    is_alone = np.bincount(group) == 1
    sum_of_squared_weights = np.where(is_alone, 0.0, np.bincount(group, weight**2))
    variance = np.bincount(group, weight * deviation**2) / (1.0 - sum_of_squared_weights)
    std = np.where(is_alone, 1.0, np.sqrt(variance))
    deviation = np.where(is_alone[group], rewards, deviation)
    return deviation / (std[group] + epsilon) if normalize_by_std else deviation


def _dense_ids(values: Sequence[Hashable]) -> np.ndarray:
    """0, 1, ... by first appearance."""
    ids: dict[Hashable, int] = {}
    return np.array([ids.setdefault(value, len(ids)) for value in values], dtype=np.int64)


@contextmanager
def row_keys(keys: Sequence[str]) -> Iterator[None]:
    """Announces the keys of the rows whose advantages are computed inside the context."""
    token = _row_keys.set(tuple(keys))
    try:
        yield
    finally:
        _row_keys.reset(token)


def compute_tree_grpo_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    config: Mapping[str, Any] | None = None,
    **_unused: Any,
) -> tuple[Tensor, Tensor]:
    """The estimator in verl's form: a leaf's advantage on each of its trained tokens.

    Args:
        token_level_rewards: (R, response length) rewards, the KL penalty subtracted where configured.
        response_mask: (R, response length) 1 on trained tokens.
        config: `algorithm`; `norm_adv_by_std_in_grpo` (default true) is read.
        **_unused: what verl gives to every estimator (`index`, ...).

    Returns:
        Advantages and returns, the same (R, response length) tensor, as verl's outcome estimators.

    Raises:
        ValueError: outside `row_keys`, that is, called by a trainer that is not ours.
    """
    keys = _row_keys.get(())
    if len(keys) != len(token_level_rewards):
        raise ValueError(
            f"algorithm.adv_estimator={ESTIMATOR_NAME} knows the sessions of {len(keys)} rows and got "
            f"{len(token_level_rewards)}: train with python -m verl_tree.main_ppo, which announces them"
        )
    rows = [parse_row_key(key) for key in keys]
    advantages = leaf_advantages(
        token_level_rewards.sum(dim=-1).double().numpy(),
        groups=[row.uid for row in rows],
        sessions=[row.session for row in rows],
        normalize_by_std=True if config is None else config.get("norm_adv_by_std_in_grpo", True),
    )
    per_token = torch.from_numpy(advantages).to(token_level_rewards.dtype)[:, None] * response_mask
    return per_token, per_token


def register() -> None:
    """Makes `algorithm.adv_estimator=tree_grpo` known to verl in this process; repeated calls do nothing."""
    # Not at the top: this module is for processes in which verl may still be importing.
    from verl.trainer.ppo.core_algos import register_adv_est

    register_adv_est(ESTIMATOR_NAME)(compute_tree_grpo_advantage)
