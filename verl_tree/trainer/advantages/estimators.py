"""The estimators in verl's form: (R, response length) rewards and mask in, advantages and returns out.

A leaf's reward is the sum of its token-level rewards, minus the KL penalty where configured. All estimators read
`algorithm.norm_adv_by_std_in_grpo` (default true) and give exactly 0 to a group of equal rewards. All but `gigpo` are
verl's GRPO where every session has one leaf.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_tree.trainer.advantages.leaves import intra_tree_advantages, leaf_advantages
from verl_tree.trainer.advantages.nodes import SessionTrees, treepo_advantages, treerl_advantages
from verl_tree.trainer.advantages.rows import Rows, announced_rows
from verl_tree.trainer.advantages.steps import gigpo_advantages

Estimator = Callable[..., tuple[Tensor, Tensor]]


def _on_leaves(
    rewards_R: np.ndarray, *, advantages: Callable[..., np.ndarray], rows: Rows, width: int, normalize_by_std: bool
) -> np.ndarray:
    """Give all tokens of a leaf its advantage: (R, width)."""
    values_R = advantages(rewards_R, groups=rows.groups, sessions=rows.sessions, normalize_by_std=normalize_by_std)
    return np.broadcast_to(values_R[:, None], (len(values_R), width))


def _on_nodes(
    rewards_R: np.ndarray, *, advantages: Callable[..., np.ndarray], rows: Rows, width: int, normalize_by_std: bool
) -> np.ndarray:
    """Give every token the advantage of its node: (R, width)."""
    trees = SessionTrees.from_shape(
        rows.shape,
        rewards=rewards_R,
        groups=rows.groups,
        sessions=rows.sessions,
        weigh_sessions=rows.weigh_sessions,
    )
    values_N = advantages(trees, normalize_by_std=normalize_by_std)
    return trees.on_responses(values_N, response_lens=rows.response_lens, width=width)


def _estimator(name: str, on_tokens: Callable[..., np.ndarray], advantages: Callable[..., np.ndarray]) -> Estimator:
    """Return the estimator that verl calls; outside `announce_rows` it raises a ValueError."""

    def estimate(
        token_level_rewards: Tensor, response_mask: Tensor, *, config: Mapping[str, Any] | None = None, **_unused: Any
    ) -> tuple[Tensor, Tensor]:
        values = on_tokens(
            token_level_rewards.sum(dim=-1).double().numpy(),
            advantages=advantages,
            rows=announced_rows(name, num_rows=len(token_level_rewards)),
            width=response_mask.shape[1],
            normalize_by_std=True if config is None else config.get("norm_adv_by_std_in_grpo", True),
        )
        per_token = torch.tensor(values, dtype=token_level_rewards.dtype) * response_mask
        return per_token, per_token

    return estimate


def _gigpo(
    token_level_rewards: Tensor, response_mask: Tensor, *, config: Mapping[str, Any] | None = None, **_unused: Any
) -> tuple[Tensor, Tensor]:
    """Estimate as `_estimator`'s do; it also reads `algorithm.gamma` and `algorithm.gigpo.step_advantage_w`."""
    rows, options = announced_rows("gigpo", num_rows=len(token_level_rewards)), {} if config is None else config
    assert rows.calls is not None, "the trainer announces calls to gigpo"
    values = gigpo_advantages(
        token_level_rewards.double().numpy(),
        shape=rows.shape,
        response_lens=rows.response_lens,
        calls=rows.calls,
        groups=rows.groups,
        sessions=rows.sessions,
        gamma=options.get("gamma", 1.0),
        step_weight=options.get("gigpo", {}).get("step_advantage_w", 1.0),
        normalize_by_std=options.get("norm_adv_by_std_in_grpo", True),
    )
    per_token = torch.tensor(values, dtype=token_level_rewards.dtype) * response_mask
    return per_token, per_token


ESTIMATORS: dict[str, Estimator] = {
    "tree_grpo": _estimator("tree_grpo", _on_leaves, leaf_advantages),
    "tree_grpo_intra": _estimator("tree_grpo_intra", _on_leaves, intra_tree_advantages),
    "treerl": _estimator("treerl", _on_nodes, treerl_advantages),
    "treepo": _estimator("treepo", _on_nodes, treepo_advantages),
    "gigpo": _gigpo,
}
"""By the value of `algorithm.adv_estimator`. Of what verl passes besides rewards and mask, they read only `config`, the
`algorithm` options. Advantages and returns are the same tensor, as in verl's outcome estimators."""


def register() -> None:
    """Make the estimators known to verl in this process; repeated calls do nothing."""
    # Not at the top, because verl may still be importing when this module is imported.
    from verl.trainer.ppo.core_algos import register_adv_est

    for name, estimator in ESTIMATORS.items():
        register_adv_est(name)(estimator)
