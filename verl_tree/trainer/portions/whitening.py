"""Advantages that verl whitens over the batch, from portions of its rows.

At the end verl's `gae`, `reinforce_plus_plus` and `reinforce_plus_plus_baseline` (0.9.1) subtract the mean of all
trained tokens and divide by their standard deviation. A portion has others. So the ranks first write the advantages
before that, the driver adds up the moments of all portions, and the ranks whiten with these.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, register_adv_est
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_tree.trainer.advantages.rows import announced_rows
from verl_tree.trainer.rows.step_rows import fetch

Estimates = tuple[Tensor, Tensor]
"""(R, response length) advantages and returns."""


def _gae(token_level_rewards: Tensor, response_mask: Tensor, *, config: Mapping[str, Any], **_unused: Any) -> Estimates:
    values = announced_rows("gae", num_rows=len(token_level_rewards)).values
    assert values is not None, "a portion announces values to gae"
    # verl adds the values to the advantages. In double precision nothing is lost when they are subtracted again.
    _, returns = get_adv_estimator_fn("gae")(
        token_level_rewards.double(), values.double(), response_mask, gamma=config["gamma"], lam=config["lam"]
    )
    dtype = token_level_rewards.dtype
    return (returns - values.double()).to(dtype), returns.to(dtype)


def _reinforce_plus_plus(token_level_rewards: Tensor, response_mask: Tensor, **options: Any) -> Estimates:
    _, returns = get_adv_estimator_fn("reinforce_plus_plus")(token_level_rewards, response_mask, **options)
    return returns, returns


def _reinforce_plus_plus_baseline(token_level_rewards: Tensor, response_mask: Tensor, **options: Any) -> Estimates:
    # It subtracts the means of the groups as verl's GRPO does.
    grpo = get_adv_estimator_fn("grpo")
    return grpo(token_level_rewards, response_mask, norm_adv_by_std_in_grpo=False, **options)


UNWHITENED: dict[str, Callable[..., Estimates]] = {
    "gae": _gae,
    "reinforce_plus_plus": _reinforce_plus_plus,
    "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
}
"""What verl's estimators whiten, by their names."""


def unwhitened(estimator: str) -> str:
    """Return the name under which verl knows an estimator of `UNWHITENED` in a portion."""
    return f"unwhitened_{estimator}"


def register() -> None:
    """Make the estimators known to verl in this process; repeated calls do nothing."""
    for name, estimator in UNWHITENED.items():
        register_adv_est(unwhitened(name))(estimator)


def whitening(*, count: int, mean: float, squares: float) -> Callable[..., KVBatchMeta]:
    """Return the method of a portion that whitens its advantages as verl's `masked_whiten` does.

    Args:
        count: Trained tokens of the batch.
        mean: The mean of their advantages.
        squares: The sum of the squared deviations from the mean.

    Raises:
        ValueError: Less than two tokens are trained.
    """
    if count < 2:
        raise ValueError(
            f"{count} trained tokens in the batch have no standard deviation, by which advantages are divided: "
            "look for what masks the responses"
        )
    return partial(_whiten, mean=mean, scale=(squares / (count - 1) + 1e-8) ** -0.5)


def _whiten(
    trainer: PPOTrainer, batch: KVBatchMeta, _metrics: dict[str, Any], *, mean: float, scale: float
) -> KVBatchMeta:
    estimator, partition_id = trainer.config.algorithm.adv_estimator, str(batch.partition_id)
    columns: Any = fetch(batch.keys, ("advantages", "response_mask"), partition_id=partition_id)
    column = columns["advantages"]
    values = (column.values().double() - mean) * scale
    if estimator != "gae":
        values = values * columns["response_mask"].values()
    advantages = torch.nested.nested_tensor_from_jagged(values.to(column.dtype), column.offsets())
    written = {"advantages": advantages}
    if estimator == "reinforce_plus_plus_baseline":
        written["returns"] = advantages
    fields = TensorDict(written, batch_size=len(batch))
    return tq.kv_batch_put(keys=batch.keys, partition_id=partition_id, fields=fields)
