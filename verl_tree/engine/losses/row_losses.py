"""Which losses are sums over rows, so that the rows of a relayed tree can be read section by section.

verl divides by denominators of the whole mini-batch, so most of its losses are sums of one term per row. The others
read several rows together, and so does every loss that is not known here: they get all rows of a micro-batch at once
(the joint form of `verl_tree.relay.run`). Source: verl 0.9.1, workers/utils/losses.py, trainer/ppo/core_algos.py and
trainer/distillation/losses.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from verl.trainer.distillation import distillation_ppo_loss
from verl.workers.config import DistillationConfig
from verl.workers.utils.losses import ppo_loss, sft_loss, value_loss

from verl_tree.clashes import DISTILLATION_LOSSES_OVER_ROWS, POLICY_LOSSES_OVER_ROWS, divides_by_width
from verl_tree.engine.losses.session_weights import session_weighted_loss
from verl_tree.engine.losses.untrained_rows import loss_of_any_rows


def innermost(loss_function: Callable[..., Any] | None) -> "partial[Any] | None":
    """Return verl's loss with its settings, out of what the workers put around it; None if it is no such thing."""
    if not isinstance(loss_function, partial):
        return None
    if loss_function.func in (session_weighted_loss, loss_of_any_rows):
        return innermost(*loss_function.args)
    return loss_function


def distillation_of(loss_function: Callable[..., Any] | None) -> DistillationConfig | None:
    """Return the settings of a loss, as the workers hold it, if it distils."""
    loss = innermost(loss_function)
    return loss.keywords.get("distillation_config") if loss and loss.func is distillation_ppo_loss else None


def _distils_over_rows(loss_function: Callable[..., Any]) -> bool:
    config = distillation_of(loss_function)
    return config is not None and config.distillation_loss.loss_mode in DISTILLATION_LOSSES_OVER_ROWS


def needs_trained_tokens(loss_function: Callable[..., Any]) -> bool:
    """Return whether a loss, as verl's workers hold it, fails on rows of which no token is trained."""
    if _distils_over_rows(loss_function):
        return True
    if not isinstance(loss_function, partial) or loss_function.func is not ppo_loss:
        return False
    return loss_function.keywords["config"].policy_loss.get("loss_mode") == "bypass_mode"


def is_sum_over_rows(loss_function: Callable[..., Any] | None) -> bool:
    """Return whether a loss, as the workers hold it, is known to be a sum of one term per row."""
    loss = innermost(loss_function)
    if loss is None:
        return False
    config = loss.keywords.get("config")
    if loss.func is sft_loss:
        return True
    if loss.func not in (ppo_loss, distillation_ppo_loss, value_loss) or config is None:
        return False
    # As a reward, it goes through the policy loss "vanilla"; verl refuses others there.
    if loss.func is distillation_ppo_loss and not _distils_over_rows(loss):
        return False
    if divides_by_width(config):
        return False
    return loss.func is value_loss or config.policy_loss.get("loss_mode", "vanilla") in POLICY_LOSSES_OVER_ROWS
