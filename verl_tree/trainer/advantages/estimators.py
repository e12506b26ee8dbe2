"""The estimators in verl's form: (R, response length) rewards and mask in, advantages and returns out.

A leaf's reward is the sum of its token-level rewards, the KL penalty subtracted where configured. All of them read
`algorithm.norm_adv_by_std_in_grpo` (default true), all give exactly 0 to a group of equal rewards, and all are verl's
GRPO where every session has one leaf.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_tree.trainer.advantages.leaves import intra_tree_advantages, leaf_advantages
from verl_tree.trainer.advantages.nodes import SessionTrees, treepo_advantages, treerl_advantages
from verl_tree.trainer.advantages.rows import announced_rows

Estimator = Callable[..., tuple[Tensor, Tensor]]
Config = Mapping[str, Any] | None


def on_leaves(name: str, advantages: Callable[..., np.ndarray]) -> Estimator:
    """An estimator in verl's form from one that gives every leaf a number, the same on all its trained tokens.

    Args:
        name: what `algorithm.adv_estimator` calls it.
        advantages: such as `leaf_advantages`.

    Returns:
        `estimator(token_level_rewards, response_mask, *, config)`. It raises a ValueError outside `announce_rows`,
        that is, called by a trainer that is not ours.
    """

    def estimate(
        token_level_rewards: Tensor, response_mask: Tensor, *, config: Config = None, **_unused: Any
    ) -> tuple[Tensor, Tensor]:
        rows = announced_rows(name, num_rows=len(token_level_rewards), with_tokens=False).parsed_keys()
        values_R = advantages(
            _leaf_rewards(token_level_rewards),
            groups=[row.uid for row in rows],
            sessions=[row.session for row in rows],
            normalize_by_std=_normalizes_by_std(config),
        )
        return _masked(values_R[:, None], response_mask, dtype=token_level_rewards.dtype)

    return estimate


def on_nodes(name: str, advantages: Callable[..., np.ndarray]) -> Estimator:
    """The same for one that gives every node a number, such as `treerl_advantages`."""

    def estimate(
        token_level_rewards: Tensor, response_mask: Tensor, *, config: Config = None, **_unused: Any
    ) -> tuple[Tensor, Tensor]:
        announced = announced_rows(name, num_rows=len(token_level_rewards), with_tokens=True)
        rows = announced.parsed_keys()
        trees = SessionTrees.from_leaves(
            announced.sequences,
            rewards=_leaf_rewards(token_level_rewards),
            groups=[row.uid for row in rows],
            sessions=[row.session for row in rows],
        )
        values_N = advantages(trees, normalize_by_std=_normalizes_by_std(config))
        values = trees.on_responses(values_N, response_lens=announced.response_lens, width=response_mask.shape[1])
        return _masked(values, response_mask, dtype=token_level_rewards.dtype)

    return estimate


ESTIMATORS_ON_NODES: dict[str, Estimator] = {
    "treerl": on_nodes("treerl", treerl_advantages),
    "treepo": on_nodes("treepo", treepo_advantages),
}
"""Those that read the rows' tokens."""

ESTIMATORS: dict[str, Estimator] = {
    "tree_grpo": on_leaves("tree_grpo", leaf_advantages),
    "tree_grpo_intra": on_leaves("tree_grpo_intra", intra_tree_advantages),
    **ESTIMATORS_ON_NODES,
}
"""By the value of `algorithm.adv_estimator`.

Each takes (R, response length) rewards and response mask, and of the other things that verl gives to every estimator
only `config`, the `algorithm` options. It returns advantages and returns, the same (R, response length) tensor, as
verl's outcome estimators.
"""


def register() -> None:
    """Makes the estimators known to verl in this process; repeated calls do nothing."""
    # Not at the top: this module is for processes in which verl may still be importing.
    from verl.trainer.ppo.core_algos import register_adv_est

    for name, estimator in ESTIMATORS.items():
        register_adv_est(name)(estimator)


def _leaf_rewards(token_level_rewards: Tensor) -> np.ndarray:
    return token_level_rewards.sum(dim=-1).double().numpy()


def _normalizes_by_std(config: Config) -> bool:
    return True if config is None else config.get("norm_adv_by_std_in_grpo", True)


def _masked(values: np.ndarray, response_mask: Tensor, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    per_token = torch.from_numpy(values).to(dtype) * response_mask
    return per_token, per_token
