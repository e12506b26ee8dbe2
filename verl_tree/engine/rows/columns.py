"""The columns of a mini-batch as verl sends them, and which rows the tree path accepts."""

from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.model import extract_multi_modal_inputs

from verl_tree import clashes
from verl_tree.config import TREE_STRATEGY
from verl_tree.engine.rows.positions import positions_of
from verl_tree.families import IMAGE_TYPES

_OUTPUTS_WITHOUT_A_TREE_PATH = {
    "calculate_sum_pi_squared": clashes.SUM_PI,
}


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
            f"{', '.join(IMAGE_TYPES)} only: train them with tree.enabled=false"
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
    for key, feature in _OUTPUTS_WITHOUT_A_TREE_PATH.items():
        if tu.get(data, key, False):
            clashes.refuse({clashes.TREES: TREE_STRATEGY, feature: f"{key}=True"})


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
