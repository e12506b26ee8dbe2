"""One micro-batch between verl's rows and the scores of its tree tokens, and verl's loss on some of its rows.

Legend: T tree tokens and F flat tokens of the micro-batch, C kinds of scores.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id

from verl_tree.engine.rows.columns import jagged
from verl_tree.engine.rows.packs import TreeMicroBatch
from verl_tree.engine.rows.results import MiniBatchResult
from verl_tree.functional import expand
from verl_tree.tree.layout import TreeLayout
from verl_tree.tree.nodes import IntArray
from verl_tree.tree.rows import ranges
from verl_tree.tree.transfer import to_device

SESSION_WEIGHT, NUM_TRAINED = "session_weight", "num_trained_tokens"
"""Columns of a mini-batch whose rows are weighed (`losses/session_weights.py`): one number per row."""

_READ_ON_HOST = ("prompts", "responses", SESSION_WEIGHT, NUM_TRAINED)
"""Columns that losses read on the host, of the first two the lengths only, row by row. On the device each of them would
be waited for."""

LossFunction = Callable[..., tuple[Tensor, dict[str, Any]]]


def device_of_rank() -> torch.device:
    """Return the device on which this rank computes."""
    return torch.device(get_device_id())


class MicroBatchRows:
    """The rows of a micro-batch on the device; leaves are counted as in `layout.leaves`.

    `names` are verl's names of the C kinds of scores. `shift` moves scores along their rows, -1 to one position
    earlier; only scores that are 0 then cross from row to row.
    """

    def __init__(self, micro: TreeMicroBatch, data: TensorDict, *, names: Sequence[str], shift: int) -> None:
        self.micro = micro
        self.layout: TreeLayout = micro.layout.to(device_of_rank())
        self._data, self._names, self._shift = data, names, shift

    def temperature(self) -> float | Tensor:
        """Return the temperature: one number, or (T,) on the host. Rows of different temperatures share no token."""
        temperature = tu.get(self._data, "temperature", default=1.0)
        if not isinstance(temperature, Tensor) or temperature.dim() == 0:
            return float(temperature)
        host = self.layout.on_host
        of_rows = temperature[torch.from_numpy(self.micro.rows)].float()
        flat = torch.repeat_interleave(of_rows, torch.from_numpy(np.diff(host.leaf_offsets)))
        return flat.new_ones(host.num_tokens).index_copy(0, host.tree_index_F, flat)

    def select(self, scores_CT: Tensor, leaves: IntArray | None = None) -> tuple[TensorDict, dict[str, Tensor]]:
        """Return the rows of some leaves, or of all, and their model outputs, jagged and aligned as verl does."""
        if leaves is None:
            leaves = np.arange(self.layout.num_leaves)
        rows = _rows(self._data, self.micro.rows[leaves])
        starts, ends = self.layout.leaf_offsets[leaves], self.layout.leaf_offsets[leaves + 1]
        pairs = torch.from_numpy(ranges(starts, ends - starts))
        weight_F = self.micro.gradient_weight_F
        pairs, *weights = to_device((pairs,) if weight_F is None else (pairs, weight_F[pairs]), device_of_rank())
        weight_F = None if weight_F is None else weights[0]
        _, offsets = jagged(rows["input_ids"])
        outputs = {}
        for name, scores_T in zip(self._names, scores_CT, strict=True):
            values_F = expand(scores_T, self.layout, gradient_weight_F=weight_F, pairs=pairs)
            outputs[name] = torch.nested.nested_tensor_from_jagged(values_F.roll(self._shift), offsets)
        return rows, outputs


class RowLosses:
    """verl's loss function on some rows at a time; each loss and its metrics, `renamed`, go into the result."""

    def __init__(
        self,
        loss_function: LossFunction | None,
        result: MiniBatchResult,
        *,
        group: dist.ProcessGroup | None,
        renamed: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    ) -> None:
        self._loss_function, self._result, self._group, self._renamed = loss_function, result, group, renamed

    def of_rows(self, rows: TensorDict, outputs: dict[str, Tensor]) -> Tensor:
        """Compute the loss and return it."""
        assert self._loss_function is not None
        loss, metrics = self._loss_function(model_output=outputs, data=rows, dp_group=self._group)
        self._result.add_loss(loss.detach(), self._renamed(metrics))
        return loss

    def of_forward(self, rows: MicroBatchRows, scores_CT: Tensor) -> None:
        """Keep the outputs of a micro-batch that runs forward only, and compute its loss if there is one."""
        of_rows, outputs = rows.select(scores_CT)
        self._result.add_outputs(outputs, micro=rows.micro)
        if self._loss_function is not None:
            self.of_rows(of_rows, outputs)

    def of_nothing(self, data: TensorDict, *, names: Sequence[str]) -> None:
        """Compute the loss on zeros for the first row, untrained, on a rank that has no row to compute.

        verl needs equal metric keys on every rank.
        """
        if self._loss_function is None:
            return
        rows = _rows(data, np.zeros(1, dtype=np.int64))
        if "response_mask" in rows:  # of rows that teach nothing it may be 1
            rows["response_mask"] = torch.zeros_like(rows["response_mask"])
        token_ids, offsets = jagged(rows["input_ids"])
        zeros = torch.nested.nested_tensor_from_jagged(torch.zeros(len(token_ids), device=device_of_rank()), offsets)
        self.of_rows(rows, dict.fromkeys(names, zeros))


def _rows(data: TensorDict, rows: IntArray) -> TensorDict:
    """Return some rows, with the columns on the device whose values a loss reads there, in one copy."""
    chosen = tu.index_select_tensor_dict(data, torch.from_numpy(rows))
    columns = {
        name: column for name, column in chosen.items() if isinstance(column, Tensor) and name not in _READ_ON_HOST
    }
    parts = [part for column in columns.values() for part in (jagged(column) if column.is_nested else (column,))]
    moved = iter(to_device(parts, device_of_rank()))
    for name, column in columns.items():
        chosen[name] = _like(column, next(moved), next(moved)) if column.is_nested else next(moved)
    return chosen


def _like(column: Any, values: Tensor, offsets: Tensor) -> Tensor:
    """Return a jagged column with these values and offsets, and the shortest and longest row of another."""
    row_lens = column.offsets().diff()
    # Where they are not known, padding asks the device.
    shortest, longest = int(row_lens.min()), int(row_lens.max())
    return torch.nested.nested_tensor_from_jagged(
        values, offsets, jagged_dim=column._ragged_idx, min_seqlen=shortest, max_seqlen=longest
    )
