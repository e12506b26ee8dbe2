"""A short causal convolution on a forest: that of the pack, and once more at its seams.

A *seam* is a token whose W - 1 predecessors on its path are not the tokens before it in the pack. Only the first W - 1
tokens of a node are seams, so the convolution of the pack is right nearly everywhere.

Example, W = 3, the paths 0 1 2 and 0 3 4: the seams 0 and 1 of the root have zeros before them, as at the start of any
sequence, so they are none; 3 follows 0 and not 2, and 4 follows 3 and 0::

    seam_S         3 4
    ancestor_SW    -1 0 3 | 0 3 4      oldest first, -1: before the root

Legend: T tokens of a pack, S seams, W width, D channels.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from verl_tree.recurrence.chunks import parents
from verl_tree.tree.transfer import to_device


@dataclass(frozen=True, slots=True, eq=False)
class ConvSeams:
    """The seams of a pack and what they follow: int64, `seam_S`, and `ancestor_SW`, oldest first, -1 before a root."""

    seam_S: Tensor
    ancestor_SW: Tensor

    @classmethod
    def from_subtree_end(
        cls, subtree_end_T: np.ndarray, *, width: int, device: torch.device | str = "cpu"
    ) -> "ConvSeams":
        """Find the seams of a forest in depth-first preorder for a convolution of so many tokens."""
        parent_T = np.append(parents(subtree_end_T), -1)  # the last is the parent of -1
        token_T = np.arange(len(subtree_end_T))
        columns = [token_T]
        for _ in range(width - 1):
            columns.insert(0, parent_T[columns[0]])
        ancestor_TW = np.stack(columns, axis=1)
        in_pack_TW = np.maximum(token_T[:, None] - np.arange(width - 1, -1, -1), -1)
        seam_S = np.flatnonzero((ancestor_TW != in_pack_TW).any(axis=1))
        return cls(*to_device([torch.from_numpy(each) for each in (seam_S, ancestor_TW[seam_S])], device))


def tree_causal_conv(x_DT: Tensor, weight_DW: Tensor, bias_D: Tensor | None, *, seams: ConvSeams) -> Tensor:
    """Convolve every channel along the paths of a forest, (D, T); differentiable."""
    width = weight_DW.shape[-1]
    y_DT = F.conv1d(F.pad(x_DT, (width - 1, 0)), weight_DW.unsqueeze(1), bias_D, groups=len(weight_DW))
    if not len(seams.seam_S):
        return y_DT
    before_root = seams.ancestor_SW < 0
    x_DSW = x_DT[:, seams.ancestor_SW.clamp(min=0)].masked_fill(before_root, 0.0)
    y_DS = (x_DSW * weight_DW.unsqueeze(1)).sum(-1)
    if bias_D is not None:
        y_DS = y_DS + bias_D.unsqueeze(-1)
    return y_DT.index_copy(1, seams.seam_S, y_DS.to(y_DT.dtype))
