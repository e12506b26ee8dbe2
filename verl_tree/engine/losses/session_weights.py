"""Weights of rows in verl's losses: of sessions (`tree.session_weight=session`), and of roles (`tree.role_weight`).

A row of session s weighs v = 1 / leaves(s), where leaves(s) counts the rows of s in the mini-batch with sampled tokens.
verl's denominators count the same way: `global_batch_size` becomes the number of sessions, `batch_num_tokens` the sum
of v n over the rows, n being a row's sampled tokens (docs/advantages.md).

    seq-mean-*   sum(v L) / sessions          L: the row's own aggregate of its tokens' losses l
    token-mean   sum(v sum(l)) / sum(v n)
    token-sum    sum(v sum(l))

With `tree.session_weight=leaf` each row counts as a session here. A row of a role weighs w v, w being what the role
weighs, which is in no denominator: its policy loss is what verl's would be with w times the advantages.

Sampled tokens are those of verl's `loss_mask`. The loss reads those of `response_mask`, which are fewer where rollout
correction rejects some. A session does with rejected tokens and rows what verl does: they add nothing to the loss and
stay in the denominators.

verl's losses take no weights, but most are sums of one term per row. So rows of equal weight go through verl's own loss
together, and the results are added with their weights. This holds for everything in the loss, KL and entropy included,
and for the engines of verl as for ours.

Legend: R rows of a mini-batch on all ranks, B those of one call of the loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.metric import AggregationType, Metric

from verl_tree.engine.rows.columns import gather
from verl_tree.engine.rows.micro_batch import NUM_TRAINED, SESSION_WEIGHT, LossFunction

NUM_SESSIONS, NUM_WEIGHTED_TOKENS = "num_sessions", "num_weighted_tokens"


@dataclass(frozen=True, slots=True, eq=False)
class SessionWeights:
    """The weights of a mini-batch's rows, and the denominators that go with them."""

    ranks: tuple[np.ndarray, ...]  # by rank, float64; 1 for a row without sampled tokens
    num_sessions: int
    num_weighted_tokens: float

    @classmethod
    def of_ranks(cls, ranks: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Self:
        """Weigh the rows of all ranks; a rank gives the session of each row and how many of its tokens were sampled.

        The number of a session is the same on all ranks, and negative for padding rows. A session counts as one also if
        none of its rows has sampled tokens, as verl counts such a row.
        """
        session_R, num_sampled_R = (np.concatenate(each).astype(np.int64) for each in zip(*ranks, strict=True))
        known, index_R = np.unique(session_R, return_inverse=True)
        is_leaf_R = num_sampled_R > 0
        assert not is_leaf_R[session_R < 0].any(), "padding rows have no sampled tokens"
        leaves_R = np.bincount(index_R, is_leaf_R)[index_R]
        weight_R = np.where(is_leaf_R, 1.0 / np.maximum(leaves_R, 1.0), 1.0)
        ends = np.cumsum([len(sessions) for sessions, _ in ranks])
        return cls(
            ranks=tuple(np.split(weight_R, ends[:-1])),
            num_sessions=int((known >= 0).sum()),
            num_weighted_tokens=fsum((weight_R * num_sampled_R).tolist()),
        )


def weigh_sessions(
    mini_batch: TensorDict,
    sessions: Sequence[int],
    *,
    group: dist.ProcessGroup | None,
    role_weights: Sequence[float] | None = None,
) -> None:
    """Add what `session_weighted_loss` reads to a rank's rows of a mini-batch; all ranks of the group call it together.

    `sessions` has a number for the session of each row; see `SessionWeights.of_ranks`. `role_weights` has what the role
    of each weighs; None weighs no roles.
    """
    num_sampled, num_trained = (
        [int(mask.sum()) for mask in mini_batch[name].unbind(dim=0)] for name in ("loss_mask", "response_mask")
    )
    weights = SessionWeights.of_ranks(gather((list(sessions), num_sampled), group=group))
    weight_B = weights.ranks[dist.get_rank(group)] * (1.0 if role_weights is None else np.asarray(role_weights))
    mini_batch[SESSION_WEIGHT] = torch.from_numpy(weight_B)
    mini_batch[NUM_TRAINED] = torch.tensor(num_trained)
    denominators = {NUM_SESSIONS: weights.num_sessions, NUM_WEIGHTED_TOKENS: weights.num_weighted_tokens}
    tu.assign_non_tensor(mini_batch, **denominators)


def session_weighted_loss(
    loss_function: LossFunction,
    *,
    model_output: dict[str, Tensor],
    data: TensorDict,
    dp_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Compute a loss of verl that is a sum over rows, with the weights that `weigh_sessions` gave to the rows."""
    data = data.copy()  # shallow: the engine's own denominators stay as they are
    tu.assign_non_tensor(
        data, global_batch_size=tu.get(data, NUM_SESSIONS), batch_num_tokens=tu.get(data, NUM_WEIGHTED_TOKENS)
    )
    # With a tree engine both are on the host already.
    weight_B, num_trained_B = data[SESSION_WEIGHT].cpu(), data[NUM_TRAINED].cpu()
    # Rows that the loss does not read make no part of their own: means over their tokens do not exist.
    weights = weight_B[num_trained_B > 0].unique() if num_trained_B.any() else weight_B[:1]
    losses, metrics, num_trained = [], [], []
    for weight in weights:
        part, outputs = data, model_output
        is_part_B = weight_B == weight
        if len(weights) > 1:
            rows = torch.nonzero(is_part_B).flatten()
            part = tu.index_select_tensor_dict(data, rows)
            outputs = {name: _select(values, rows) for name, values in model_output.items()}
        loss, part_metrics = loss_function(model_output=outputs, data=part, dp_group=dp_group)
        losses.append(loss * weight.item())
        metrics.append(part_metrics)
        num_trained.append(int(num_trained_B[is_part_B].sum()))
    return sum(losses[1:], losses[0]), _merge(metrics, weights=weights.tolist(), num_trained=num_trained)


def _select(values: Tensor, rows: Tensor) -> Tensor:
    """Return some rows of a jagged tensor, with their gradients."""
    parts = values.unbind()
    return torch.nested.as_nested_tensor([parts[row] for row in rows.tolist()], layout=torch.jagged)


def _merge(
    metrics: Sequence[dict[str, Any]], *, weights: Sequence[float], num_trained: Sequence[int]
) -> dict[str, Any]:
    """Merge the metrics of parts of a call's rows as if verl had computed them at once.

    Sums are terms of the loss, so they are weighted like it. Means are over trained tokens, each of which counts once.
    """

    def mean(values: Sequence[float]) -> float:
        return values[0] if len(values) == 1 else float(np.average(values, weights=num_trained))

    def merged(values: Sequence[Any]) -> Any:
        if not isinstance(values[0], Metric):
            return mean(values)
        whole = values[0].init_list()
        numbers = [value.aggregate() for value in values]
        if whole.aggregation == AggregationType.MEAN:
            numbers = [mean(numbers)]
        elif whole.aggregation == AggregationType.SUM:
            numbers = [weight * number for weight, number in zip(weights, numbers, strict=True)]
        for number in numbers:
            whole.append(number)
        return Metric(aggregation=whole.aggregation, value=whole.aggregate())

    return {name: merged([part[name] for part in metrics]) for name in metrics[0]}
