"""The estimators in verl's form: (R, response length) rewards and mask in, advantages and returns out.

A leaf's reward is the sum of its token-level rewards, minus the KL penalty where configured. All estimators read
`algorithm.norm_adv_by_std_in_grpo` (default true) and give exactly 0 to a group of equal rewards. All but `gigpo` are
verl's GRPO where every session has one leaf.
"""

from collections.abc import Callable, Mapping
from functools import partial
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
    token_rewards: Tensor, rows: Rows, options: Mapping[str, Any], *, advantages: Callable[..., np.ndarray]
) -> np.ndarray:
    """Give all tokens of a leaf its advantage."""
    rewards_R = token_rewards.sum(dim=-1).double().numpy()
    normalizes = options.get("norm_adv_by_std_in_grpo", True)
    values_R = advantages(rewards_R, groups=rows.groups, sessions=rows.sessions, normalize_by_std=normalizes)
    return np.broadcast_to(values_R[:, None], token_rewards.shape)


def _on_nodes(
    token_rewards: Tensor, rows: Rows, options: Mapping[str, Any], *, advantages: Callable[..., np.ndarray]
) -> np.ndarray:
    """Give every token the advantage of its node."""
    trees = SessionTrees.from_shape(
        rows.shape,
        rewards=token_rewards.sum(dim=-1).double().numpy(),
        groups=rows.groups,
        sessions=rows.sessions,
        weigh_sessions=rows.weigh_sessions,
    )
    values_N = advantages(trees, normalize_by_std=options.get("norm_adv_by_std_in_grpo", True))
    return trees.on_responses(values_N, response_lens=rows.response_lens, width=token_rewards.shape[1])


def _on_steps(token_rewards: Tensor, rows: Rows, options: Mapping[str, Any]) -> np.ndarray:
    """Give every token the advantages of its leaf and step; `gamma` and `gigpo.step_advantage_w` are read, too."""
    assert rows.calls is not None, "the trainer announces calls to gigpo"
    return gigpo_advantages(
        token_rewards.double().numpy(),
        shape=rows.shape,
        response_lens=rows.response_lens,
        calls=rows.calls,
        groups=rows.groups,
        sessions=rows.sessions,
        gamma=options.get("gamma", 1.0),
        step_weight=options.get("gigpo", {}).get("step_advantage_w", 1.0),
        normalize_by_std=options.get("norm_adv_by_std_in_grpo", True),
    )


def _estimator(name: str, on_tokens: Callable[[Tensor, Rows, Mapping[str, Any]], np.ndarray]) -> Estimator:
    """Return the estimator that verl calls; outside `announce_rows` it raises a ValueError."""

    def estimate(
        token_level_rewards: Tensor, response_mask: Tensor, *, config: Mapping[str, Any] | None = None, **_unused: Any
    ) -> tuple[Tensor, Tensor]:
        rows = announced_rows(name, num_rows=len(token_level_rewards))
        values = on_tokens(rows.without_lone(token_level_rewards), rows, {} if config is None else config)
        per_token = torch.tensor(values, dtype=token_level_rewards.dtype) * response_mask
        return per_token, per_token

    return estimate


ESTIMATORS: dict[str, Estimator] = {
    "tree_grpo": _estimator("tree_grpo", partial(_on_leaves, advantages=leaf_advantages)),
    "tree_grpo_intra": _estimator("tree_grpo_intra", partial(_on_leaves, advantages=intra_tree_advantages)),
    "treerl": _estimator("treerl", partial(_on_nodes, advantages=treerl_advantages)),
    "treepo": _estimator("treepo", partial(_on_nodes, advantages=treepo_advantages)),
    "gigpo": _estimator("gigpo", _on_steps),
}
"""By the value of `algorithm.adv_estimator`. Of what verl passes besides rewards and mask, they read only `config`, the
`algorithm` options. Advantages and returns are the same tensor, as in verl's outcome estimators."""


REWARDS_ONLY = frozenset(
    ("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", *(ESTIMATORS.keys() - {"gigpo"}))
)
"""Ours and verl's that give 0 to the rows of a prompt whose rewards are equal. `gigpo` compares their steps, too."""


def register() -> None:
    """Make the estimators known to verl in this process; repeated calls do nothing."""
    # Not at the top, because verl may still be importing when this module is imported.
    from verl.trainer.ppo.core_algos import register_adv_est

    for name, estimator in ESTIMATORS.items():
        register_adv_est(name)(estimator)
