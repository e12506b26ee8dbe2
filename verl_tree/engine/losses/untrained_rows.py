"""verl's losses on rows of which no token is trained: the padding of a rank that has nothing else in a mini-batch.

verl 0.9.1 takes the least and the greatest distillation loss of the trained tokens (`compute_distillation_loss_range`),
which fails without any. Its policy loss `bypass_mode` refuses such rows. Its other losses are 0 there.
"""

from math import inf
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.utils.metric import AggregationType, Metric

from verl_tree.engine.rows.columns import jagged
from verl_tree.engine.rows.micro_batch import LossFunction

_OF_NOTHING = {AggregationType.MIN: inf, AggregationType.MAX: -inf}


def loss_of_any_rows(
    loss_function: LossFunction,
    *,
    data: TensorDict,
    model_output: dict[str, Tensor] | None = None,
    dp_group: dist.ProcessGroup | None = None,
    **of_logits: Any,
) -> Any:
    """Compute a loss of verl, which is 0 where no token is trained.

    Sums and means are 0 there, too, a minimum is inf and a maximum -inf, so that other ranks decide. What verl's flat
    engines let it compute of their logits (top-k distillation) is computed as ever.
    """
    if of_logits:
        return loss_function(data=data, **of_logits)
    mask, offsets = jagged(data["response_mask"])
    if mask.any():
        return loss_function(model_output=model_output, data=data, dp_group=dp_group)
    # As if all were trained, for the names of the metrics, which must be the same on all ranks.
    data = data.copy()
    data["response_mask"] = torch.nested.nested_tensor_from_jagged(torch.ones_like(mask), offsets)
    loss, metrics = loss_function(model_output=model_output, data=data, dp_group=dp_group)
    return loss * 0.0, {name: _of_nothing(name, value) for name, value in metrics.items()}


def _of_nothing(name: str, value: Any) -> Any:
    """Return the metric of no tokens. Plain numbers are means, but for the one that is a setting."""
    if isinstance(value, Metric):
        return Metric(aggregation=value.aggregation, value=_OF_NOTHING.get(value.aggregation, 0.0))
    return value if name == "kl_coef" else 0.0
