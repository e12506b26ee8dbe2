"""One micro-batch between verl's rows and the scores of its tree tokens.

Legend: T tree tokens and F flat tokens of the micro-batch, C kinds of scores.
"""

from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from verl_tree.engine.packs import TreeMicroBatch
from verl_tree.engine.rows import jagged
from verl_tree.functional import expand
from verl_tree.tree.layout import TreeLayout
from verl_tree.tree.nodes import IntArray
from verl_tree.tree.rows import ranges


def select_rows(data: TensorDict, rows: IntArray, *, device: torch.device) -> TensorDict:
    """Return some rows of a batch on the device."""
    return tu.index_select_tensor_dict(data, torch.from_numpy(rows)).to(device)


class MicroBatchRows:
    """The rows of a micro-batch on the device; leaves are counted as in `layout.leaves`."""

    def __init__(self, micro: TreeMicroBatch, data: TensorDict, *, device: torch.device) -> None:
        self._micro, self._data, self._device = micro, data, device
        self.layout: TreeLayout = micro.layout.to(device)

    def temperature(self) -> float | Tensor:
        """Return the temperature: one number, or (T,). Rows of different temperatures share no token."""
        temperature = tu.get(self._data, "temperature", default=1.0)
        if not isinstance(temperature, Tensor) or temperature.dim() == 0:
            return float(temperature)
        of_rows = temperature[torch.from_numpy(self._micro.rows)].to(self._device).float()
        row_lens = torch.from_numpy(np.diff(self.layout.leaf_offsets)).to(self._device)
        flat = torch.repeat_interleave(of_rows, row_lens)
        return flat.new_ones(self.layout.num_tokens).index_copy(0, self.layout.tree_index_F, flat)

    def select(
        self, scores_CT: Tensor, leaves: IntArray, *, names: Sequence[str], shift: int
    ) -> tuple[TensorDict, dict[str, Tensor]]:
        """Return some rows and their model outputs, jagged; `names` are those of the C kinds of scores.

        `shift` moves the scores along the rows: -1 to one position earlier. Only scores that are 0 cross from row to
        row.
        """
        rows = select_rows(self._data, self._micro.rows[leaves], device=self._device)
        starts, ends = self.layout.leaf_offsets[leaves], self.layout.leaf_offsets[leaves + 1]
        pairs = torch.from_numpy(ranges(starts, ends - starts))
        weight_F = self._micro.gradient_weight_F
        weight_F = None if weight_F is None else weight_F[pairs].to(self._device)
        _, offsets = jagged(rows["input_ids"])
        outputs = {}
        for name, scores_T in zip(names, scores_CT, strict=True):
            values_F = expand(scores_T, self.layout, gradient_weight_F=weight_F, pairs=pairs.to(self._device))
            outputs[name] = torch.nested.nested_tensor_from_jagged(values_F.roll(shift), offsets)
        return rows, outputs
