"""The results of a mini-batch in the form that verl expects."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl.utils.metric import Metric

from verl_tree.engine.rows.columns import jagged
from verl_tree.engine.rows.packs import TreeMicroBatch


class MiniBatchResult:
    """The results of a mini-batch's micro-batches, in the form that verl expects.

    They stay on the device until `as_verl`, so that the host waits for them once in a mini-batch.
    """

    def __init__(self, input_ids: Tensor, *, output_names: Sequence[str] = ()) -> None:
        """Prepare the outputs of these names for the rows `input_ids`, jagged (B, j)."""
        values, offsets = jagged(input_ids)
        self._offsets = offsets.cpu()
        self._flat = {name: torch.zeros(len(values), dtype=torch.float32) for name in output_names}
        self._outputs: list[dict[str, Tensor]] = []
        self._places: list[Tensor] = []  # Those of the outputs among the flat tokens
        self._losses: list[Tensor] = []
        self._metrics: list[dict[str, Any]] = []

    def add_outputs(self, model_output: Mapping[str, Tensor], *, micro: TreeMicroBatch) -> None:
        """Add the outputs of a micro-batch: one jagged tensor per name, with its rows in their order.

        Raises:
            ValueError: Their names are not those that the result has places for.
        """
        if model_output.keys() != self._flat.keys():
            raise ValueError(
                f"a micro-batch has the outputs {sorted(model_output)}, and the result has places for "
                f"{sorted(self._flat)}: give MiniBatchResult the names of all outputs"
            )
        self._places.append(micro.flat_index_F)
        self._outputs.append({name: jagged(value)[0].detach().float() for name, value in model_output.items()})

    def add_loss(self, loss: Tensor, metrics: dict[str, Any]) -> None:
        """Add a loss of some rows, a scalar without a graph, and the metrics that the loss function returned."""
        self._losses.append(loss)
        self._metrics.append(metrics)

    def as_verl(self) -> dict[str, Any]:
        """Return jagged (B, j) outputs (zero in rows that no pack holds), the losses, and one value for each metric."""
        for name, flat in self._flat.items():
            if self._outputs:
                flat[torch.cat(self._places)] = torch.cat([outputs[name] for outputs in self._outputs]).cpu()
        return {
            "model_output": {
                name: torch.nested.nested_tensor_from_jagged(flat, self._offsets) for name, flat in self._flat.items()
            },
            "loss": torch.stack(self._losses).tolist() if self._losses else [0.0],
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
