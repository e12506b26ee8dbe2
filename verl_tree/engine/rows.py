"""verl's side of a mini-batch: what its rows may hold, and how results are handed back as verl expects them."""

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

from verl_tree.cost.model import Work
from verl_tree.engine.packs import TreeBatch, TreeMicroBatch
from verl_tree.packing.counts import ForestCounts

_OUTPUTS_WITHOUT_A_TREE_PATH = ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only")


def refuse_unsupported(data: TensorDict) -> None:
    """Checks that the tree path gets these rows right.

    Args:
        data: the rows of a mini-batch.

    Raises:
        ValueError: rows with multimodal inputs or with position ids other than 0, 1, 2, ..., or an output that only
            verl's own engine computes.
    """
    if extract_multi_modal_inputs(data.get("multi_modal_inputs", [])):
        raise ValueError(
            "rows carry multi_modal_inputs, which fsdp_tree does not merge yet: train them with tree.enabled=false"
        )
    starts, lens = data["input_ids"].offsets()[:-1].cpu(), data["input_ids"].offsets().diff().cpu()
    expected = torch.arange(int(lens.sum())) - torch.repeat_interleave(starts, lens)
    position_ids = data["position_ids"]
    if position_ids.dim() != 2 or not torch.equal(position_ids.values().cpu().to(expected.dtype), expected):
        raise ValueError(
            "position_ids are not 0, 1, 2, ... in every row: fsdp_tree places a token by its depth in the tree; "
            "train models with other position schemes (M-RoPE) with tree.enabled=false"
        )
    for key in _OUTPUTS_WITHOUT_A_TREE_PATH:
        if tu.get_non_tensor_data(data, key=key, default=False):
            raise ValueError(f"{key}=True is not computed by fsdp_tree: set tree.enabled=false")


class RowOutputs:
    """Collects the packs' results into one flat host tensor per output, in the order of the rows."""

    def __init__(self, input_ids: Tensor, *, names: tuple[str, ...]) -> None:
        """Zeros for every token of the jagged (B, j) rows, one float32 tensor per name."""
        self._offsets = input_ids.offsets().cpu()
        self._flat = {name: torch.zeros(input_ids.values().shape[0], dtype=torch.float32) for name in names}

    def add(self, micro: TreeMicroBatch, model_output: dict[str, Tensor]) -> None:
        """Writes the rows of one pack, from jagged tensors in the order of its rows."""
        for name, value in model_output.items():
            self._flat[name][micro.flat_index_F] = value.values().detach().cpu().to(torch.float32)

    def jagged(self) -> dict[str, Tensor]:
        """One jagged (B, j) tensor per output; rows that no pack holds are zero."""
        return {name: torch.nested.nested_tensor_from_jagged(flat, self._offsets) for name, flat in self._flat.items()}


@dataclass(frozen=True, slots=True)
class RankWork:
    """What one rank computes in a mini-batch.

    Attributes:
        works: its packs, in the order in which they run.
        counts: their metrics.
        packing_s: seconds of packing.
    """

    works: tuple[Work, ...]
    counts: ForestCounts
    packing_s: float

    @classmethod
    def of_batch(cls, batch: TreeBatch) -> Self:
        """The work of this rank's packs."""
        return cls(tuple(micro.work for micro in batch.micro_batches), batch.counts, batch.packing_s)


def gather(value: Any, *, group: dist.ProcessGroup) -> list[Any]:
    """The values of all ranks."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def one_value_per_rank(step_metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """Aggregates a rank's metrics over its packs: verl needs equal numbers of values from all ranks.

    Args:
        step_metrics: what the loss function returned for each pack.

    Returns:
        For each metric one value: a `Metric` is reduced as it asks for, a plain number is averaged.
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
