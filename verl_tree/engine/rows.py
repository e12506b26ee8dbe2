"""verl's side of a mini-batch: which rows the tree path accepts, and results in the form that verl expects."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
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
from verl_tree.engine.computed_paths import ComputedPaths
from verl_tree.engine.packs import TreeBatch, TreeMicroBatch
from verl_tree.engine.positions import positions_of
from verl_tree.functional.images import IMAGE_MODEL_TYPES
from verl_tree.packing.counts import ForestCounts
from verl_tree.relay.run import Mode, NumCalls

_OUTPUTS_WITHOUT_A_TREE_PATH = ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only")


def jagged(column: Any) -> tuple[Tensor, Tensor]:
    """Return the values and the offsets of a jagged (B, j) column."""
    return column.values(), column.offsets()


def check_rows(data: TensorDict, *, with_images: bool = False) -> None:
    """Refuse rows that the tree path would compute wrongly, with a ValueError.

    They have multimodal inputs, position ids other than 0, 1, 2, ... in every component, or want outputs that only
    verl's own engine computes. Rows `with_images` bring images, and their own positions in all components but the
    first.
    """
    if not with_images and extract_multi_modal_inputs(tu.get(data, "multi_modal_inputs", [])):
        raise ValueError(
            f"rows carry multi_modal_inputs, which {TREE_STRATEGY} takes from models of the types "
            f"{', '.join(IMAGE_MODEL_TYPES)} only: train them with tree.enabled=false"
        )
    offsets = jagged(data["input_ids"])[1].cpu()
    expected = torch.arange(int(offsets[-1])) - torch.repeat_interleave(offsets[:-1], offsets.diff())
    positions_CF = positions_of(tu.get(data, "position_ids")).cpu()
    positions_CF = positions_CF[:1] if with_images else positions_CF
    if not torch.equal(positions_CF.to(expected.dtype), expected.expand(len(positions_CF), -1)):
        raise ValueError(
            f"position_ids are not 0, 1, 2, ... in every row and component: {TREE_STRATEGY} places a token by its "
            "depth in the tree; train models with other position schemes (M-RoPE) with tree.enabled=false"
        )
    for key in _OUTPUTS_WITHOUT_A_TREE_PATH:
        if tu.get(data, key, False):
            raise ValueError(f"{key}=True is not computed by {TREE_STRATEGY}: set tree.enabled=false")


@dataclass(frozen=True, slots=True)
class RankWork:
    """One rank's work in a mini-batch: its micro-batches in the order in which they run, and seconds of packing."""

    works: tuple[Work, ...]
    num_calls: tuple[NumCalls, ...]  # Model calls of each micro-batch
    counts: ForestCounts
    packing_s: float
    paths: ComputedPaths  # of an update

    @classmethod
    def of_batch(cls, batch: TreeBatch, *, mode: Mode, scores_own_tokens: bool) -> Self:
        """Sum up this rank's micro-batches."""
        # Only updates have an MFU, and lengths of all rows travel to all ranks.
        updated = () if mode == "forward" else batch.micro_batches
        paths = (micro.paths(scores_own_tokens=scores_own_tokens) for micro in updated)
        return cls(
            works=tuple(micro.work for micro in batch.micro_batches),
            num_calls=tuple(micro.num_calls(mode) for micro in batch.micro_batches),
            counts=batch.counts,
            packing_s=batch.packing_s,
            paths=ComputedPaths.sum(paths),
        )


@dataclass(frozen=True, slots=True)
class Step:
    """Model calls that all ranks make together, and the range of its micro-batches that each rank computes in them."""

    calls: NumCalls
    ranges: tuple[range, ...]

    def works(self, ranks: Sequence[RankWork]) -> list[Work]:
        """Return the work of each rank in the step."""
        return [
            sum((rank.works[index] for index in indices), Work())
            for rank, indices in zip(ranks, self.ranges, strict=True)
        ]


def steps_of(ranks: Sequence[Sequence[NumCalls]], *, mode: Mode) -> list[Step]:
    """Line up the model calls of all ranks; `ranks` has the calls of each rank's micro-batches in order.

    FSDP's collectives need from all ranks the same calls in the same order. A step has as many as the next micro-batch
    of any rank needs. A rank that needs fewer goes on with packs, and is idle where it has none that fits.

    Example: one rank has a tree of two spine calls and three sections, the other has four packs. The first step has 2
    calls without gradient and 3 with; three of the packs run in it, the fourth in a second step. Without micro-batches
    there is still one call.
    """
    positions = [0] * len(ranks)
    steps = []
    while any(position < len(rank) for position, rank in zip(positions, ranks, strict=True)):
        waiting = [rank[position] for position, rank in zip(positions, ranks, strict=True) if position < len(rank)]
        calls = NumCalls(*map(max, zip(*waiting, strict=True)))
        ends = [_fill(rank, start=position, calls=calls) for position, rank in zip(positions, ranks, strict=True)]
        steps.append(Step(calls, tuple(map(range, positions, ends))))
        positions = ends
    return steps or [Step(NumCalls.of(mode, num_sections=1, num_spine_calls=0), (range(0),) * len(ranks))]


def _fill(rank: Sequence[NumCalls], *, start: int, calls: NumCalls) -> int:
    """Return where the micro-batches end that fit into the calls of a step, from `start` on."""
    num_first, num_last, end = *calls, start
    while end < len(rank) and rank[end].num_first <= num_first and rank[end].num_last <= num_last:
        # Only one store at a time: the others must be packs, which take one call.
        if end > start and sum(rank[end]) > 1:
            break
        num_first, num_last = num_first - rank[end].num_first, num_last - rank[end].num_last
        end += 1
    return end


def read_row_lens(rows: TensorDict, *, mask: str, group: dist.ProcessGroup | None) -> list[int]:
    """Return the lengths of the rows of all ranks that a loss reads, by the column `mask`; verl's MFU counts them."""
    lens = jagged(rows["input_ids"])[1].diff()
    is_read = torch.stack([each.any() for each in rows[mask].unbind(dim=0)])
    return list(chain.from_iterable(gather(lens[is_read].tolist(), group=group)))


def gather(value: Any, *, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks of a group, by rank; None: of all ranks there are."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


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
