"""verl's side of a mini-batch: which rows the tree path accepts, and results in the form that verl expects."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.utils.model import extract_multi_modal_inputs

from verl_tree.config import TREE_STRATEGY
from verl_tree.cost.model import Work
from verl_tree.engine.packs import TreeBatch, TreeMicroBatch
from verl_tree.packing.counts import ForestCounts

_OUTPUTS_WITHOUT_A_TREE_PATH = ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only")


def jagged(column: Any) -> tuple[Tensor, Tensor]:
    """Return the values and the offsets of a jagged (B, j) column."""
    return column.values(), column.offsets()


def check_rows(data: TensorDict) -> None:
    """Refuse rows that the tree path would compute wrongly, with a ValueError.

    They have multimodal inputs, position ids other than 0, 1, 2, ..., or want outputs that only verl's own engine
    computes.
    """
    if extract_multi_modal_inputs(tu.get(data, "multi_modal_inputs", [])):
        raise ValueError(
            f"rows carry multi_modal_inputs, which {TREE_STRATEGY} does not merge yet: train them with "
            "tree.enabled=false"
        )
    offsets = jagged(data["input_ids"])[1].cpu()
    expected = torch.arange(int(offsets[-1])) - torch.repeat_interleave(offsets[:-1], offsets.diff())
    position_ids = tu.get(data, "position_ids")
    if position_ids.dim() != 2 or not torch.equal(position_ids.values().cpu().to(expected.dtype), expected):
        raise ValueError(
            f"position_ids are not 0, 1, 2, ... in every row: {TREE_STRATEGY} places a token by its depth in the "
            "tree; train models with other position schemes (M-RoPE) with tree.enabled=false"
        )
    for key in _OUTPUTS_WITHOUT_A_TREE_PATH:
        if tu.get(data, key, False):
            raise ValueError(f"{key}=True is not computed by {TREE_STRATEGY}: set tree.enabled=false")


@dataclass(frozen=True, slots=True)
class RankWork:
    """One rank's work in a mini-batch: its packs in the order in which they run, their counts, seconds of packing."""

    works: tuple[Work, ...]
    counts: ForestCounts
    packing_s: float

    @classmethod
    def of_batch(cls, batch: TreeBatch) -> Self:
        """Sum up this rank's packs."""
        return cls(tuple(micro.work for micro in batch.micro_batches), batch.counts, batch.packing_s)


def gather(value: Any, *, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the values of all ranks of a group, by rank."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """The result of one model call.

    `model_output` has one jagged tensor per output, with the rows of the pack in their order; it is empty after a
    backward. `loss` is None if none was computed. `metrics` are those that the loss function returned.
    """

    model_output: dict[str, Tensor]
    loss: float | None
    metrics: dict[str, Any]


class MiniBatchResult:
    """The results of a mini-batch's model calls, collected on the host in the form that verl expects."""

    def __init__(self, input_ids: Tensor) -> None:
        values, offsets = jagged(input_ids)
        self._num_tokens, self._offsets = len(values), offsets.cpu()
        self._flat: dict[str, Tensor] = {}
        self._losses: list[float] = []
        self._metrics: list[dict[str, Any]] = []

    def add(self, step: StepResult, *, micro: TreeMicroBatch | None) -> None:
        """Add the result of one pack. Without a pack (None) the outputs are zero and belong to no row."""
        for name, value in step.model_output.items():
            flat = self._flat.setdefault(name, torch.zeros(self._num_tokens, dtype=torch.float32))
            if micro is not None:
                flat[micro.flat_index_F] = jagged(value)[0].detach().cpu().to(torch.float32)
        if step.loss is not None:
            self._losses.append(step.loss)
            self._metrics.append(step.metrics)

    def as_verl(self) -> dict[str, Any]:
        """Return jagged (B, j) outputs (zero in rows that no pack holds), the losses, and one value for each metric."""
        return {
            "model_output": {
                name: torch.nested.nested_tensor_from_jagged(flat, self._offsets) for name, flat in self._flat.items()
            },
            "loss": self._losses or [0.0],
            "metrics": one_value_per_rank(self._metrics),
        }


def one_value_per_rank(step_metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Aggregate a rank's metrics over its packs, because verl needs equal numbers of values from all ranks.

    A `Metric` is reduced by its own aggregation, a plain number is averaged.
    """
    merged: dict[str, Any] = {}
    for name in step_metrics[0] if step_metrics else ():
        values = [metrics[name] for metrics in step_metrics]
        if isinstance(values[0], Metric):
            whole = values[0].init_list()
            for value in values:
                whole.append(value)
            merged[name] = Metric(aggregation=whole.aggregation, value=whole.aggregate())
        else:
            merged[name] = [float(np.mean(values))]
    return merged
