"""Rows that teach nothing leave an update (`tree.compute=live`): each of their tokens weighs exactly 0 in the loss.

A token weighs its advantage, times its weight by rollout correction, times that of its row. Where that is 0, as in a
group of equal rewards, verl's policy losses have the value 0 and the gradient 0, whatever its log-prob is. So the
forest of an update holds the other rows only. Denominators are those of all rows, and the optimiser takes its step.

That is exact where nothing else of the loss reads a row; `keep_all_rows` in `verl_tree.clashes` says what does. Means
over the tokens of a call, such as verl's `actor/ppo_kl`, are then means over live rows, and are named so.

Legend: B rows of a mini-batch.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.losses import ppo_loss

from verl_tree.clashes import keep_all_rows
from verl_tree.config import TreeConfig
from verl_tree.engine.losses.row_losses import innermost
from verl_tree.engine.rows.columns import jagged
from verl_tree.engine.rows.micro_batch import SESSION_WEIGHT, LossFunction

LIVE = "live_rows"
"""What stands in the names of metrics of live rows: `actor/live_rows/ppo_kl`."""


def leaves_out(loss_function: LossFunction | None, tree: TreeConfig) -> bool:
    """Return whether an update with this loss, as the workers hold it, may leave out rows that weigh 0."""
    loss = innermost(loss_function)
    return loss is not None and loss.func is ppo_loss and not keep_all_rows(loss.keywords["config"], tree)


def token_weights(data: TensorDict) -> tuple[Tensor, Tensor]:
    """Return what each token of the responses weighs in the policy loss, float64, and its row; both on the host."""
    mask, offsets = jagged(data["response_mask"])
    weight = jagged(data["advantages"])[0].double() * mask
    if "rollout_is_weights" in data:
        weight = weight * jagged(data["rollout_is_weights"])[0]
    rows = torch.repeat_interleave(torch.arange(len(data)), offsets.diff().cpu())
    weight = weight.cpu()
    return (weight * data[SESSION_WEIGHT].cpu()[rows] if SESSION_WEIGHT in data else weight), rows


def live_rows(data: TensorDict) -> NDArray[np.bool_]:
    """Find the rows of which some trained token weighs something in the policy loss, (B,)."""
    weight, rows = token_weights(data)
    is_live = torch.zeros(len(data), dtype=torch.bool)
    # NaN is not 0, so a row with it stays, and the loss shows it.
    is_live[rows[weight != 0]] = True
    return is_live.numpy()


def of_live_rows(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Name the means of a call's rows after the live ones. Sums are terms of the loss, to which no other row adds."""
    return {
        name if isinstance(value, Metric) and value.aggregation == AggregationType.SUM else _renamed(name): value
        for name, value in metrics.items()
    }


def _renamed(name: str) -> str:
    return f"actor/{LIVE}/{name.removeprefix('actor/')}"
