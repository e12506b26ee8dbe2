"""verl's estimators with a baseline for each prompt and role, where leaves have roles.

verl gives its estimators the prompt of each row (`index`). Here a prompt and a role stand in its place, so the
baselines, whichever they are, are verl's own. What it takes of the whole batch stays that: whitening, and gpg's share
of rewards other than 0.

verl's grpo compares sessions by their last leaf and gives its advantage to their other leaves; so it does with each
role. Our own estimators know the groups themselves (`advantages.rows`).
"""

import copy
from functools import partial
from typing import Any, cast

import numpy as np
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, get_adv_estimator_fn, register_adv_est
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from verl_tree.trainer.advantages import ESTIMATORS
from verl_tree.trainer.advantages.rows import announced_rows
from verl_tree.trainer.portions.whitening import unwhitened
from verl_tree.trainer.row_keys import parse_row_key

WITHOUT_BASELINE = frozenset(("gae", "reinforce_plus_plus", *map(unwhitened, ("gae", "reinforce_plus_plus"))))
"""Estimators that compare no rows with each other."""

NOT_COMPUTED = frozenset(("remax", "gdpo", "optimal_token_baseline", "tir_optimal_token_baseline"))
"""Estimators that read columns which verl's trainer (0.9.1) does not read: it fails on them, with its own words."""


def compute_advantage(trainer: PPOTrainer, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
    """Let verl compute the advantages of announced rows, some of which have roles; a method of `PPOTrainer`."""
    name = trainer.config.algorithm.adv_estimator
    if name not in WITHOUT_BASELINE | NOT_COMPUTED | ESTIMATORS.keys():
        trainer = copy.copy(trainer)
        renamed = OmegaConf.merge(trainer.config, {"algorithm": {"adv_estimator": named_by_role(name)}})
        trainer.config = cast(DictConfig, renamed)
    return PPOTrainer._compute_advantage(trainer, batch, metrics)


def named_by_role(name: str) -> str:
    """Return the name under which verl knows an estimator that compares by prompt and role."""
    by_role = f"{name}_by_role"
    if by_role not in ADV_ESTIMATOR_REGISTRY:
        register_adv_est(by_role)(_grpo if name == "grpo" else partial(_estimate, name))
    return by_role


def _estimate(
    name: str, token_level_rewards: Tensor, response_mask: Tensor, *, index: np.ndarray, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return the advantages and returns of an estimator of verl's, or of the user's; both (R, response length)."""
    rows = announced_rows(name, num_rows=len(index))
    estimator, groups = get_adv_estimator_fn(name), np.array(rows.groups, dtype=object)
    rewards = rows.without_lone(token_level_rewards)
    if name != "grpo_passk":
        return estimator(token_level_rewards=rewards, response_mask=response_mask, index=groups, **options)
    # It refuses groups of one row, whatever the reward.
    kept = np.setdiff1d(np.arange(len(index)), rows.lone())
    advantages = rewards.new_zeros(rewards.shape)
    if len(kept):
        advantages[kept], _ = estimator(
            token_level_rewards=rewards[kept], response_mask=response_mask[kept], index=groups[kept], **options
        )
    return advantages, advantages


def _grpo(token_level_rewards: Tensor, response_mask: Tensor, *, config: Any, **_unused: Any) -> tuple[Tensor, Tensor]:
    rows = announced_rows("grpo", num_rows=len(token_level_rewards))
    rewards = rows.without_lone(token_level_rewards, of_sessions=True)
    data = DataProto.from_dict(
        tensors={"token_level_rewards": rewards, "response_mask": response_mask},
        non_tensors={"uid": np.array(rows.groups, dtype=object)},
    )
    # verl finds the sessions in the keys, and those of a role are its own.
    places = [parse_row_key(key) for key in rows.keys]
    keys = [f"{group}_{each.session}_{each.leaf}" for group, each in zip(rows.groups, places, strict=True)]
    data = compute_advantage_for_multi_trajectories(
        data,
        batch_keys=keys,
        adv_estimator="grpo",
        norm_adv_by_std_in_grpo=config.get("norm_adv_by_std_in_grpo", True),
        config=config,
    )
    return data.batch["advantages"], data.batch["returns"]
