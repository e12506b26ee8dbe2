"""A short causal convolution on a forest: that of the pack, and once more at its seams.

A *seam* is a token whose W - 1 predecessors on its path are not the tokens before it in the pack. Only the first W - 1
tokens of a node are seams, so the convolution of the pack is right nearly everywhere.

Example, W = 3, the paths 0 1 2 and 0 3 4: the seams 0 and 1 of the root have zeros before them, as at the start of any
sequence, so they are none; 3 follows 0 and not 2, and 4 follows 3 and 0::

    seam_S         3 4
    ancestor_SW    -1 0 3 | 0 3 4      oldest first, -1: before the root

A relayed call computes the tokens behind a context, whose last W - 1 inputs it gets as its states. They are put before
its own inputs, so that `ancestor_SW` counts them first. The last W - 1 inputs at its own cut tokens are its states for
others.

Legend: T tokens of a pack, or of a call behind its context, S seams, W width, D channels, E states of the context, L
cut tokens.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from verl_tree.tree.plan import AttentionPlan, States
from verl_tree.tree.runs import Runs
from verl_tree.tree.transfer import to_device


@dataclass(frozen=True, slots=True, eq=False)
class ConvSeams:
    """The seams of a pack and what they follow: int64, `seam_S`, and `ancestor_SW`, oldest first, -1 before a root.

    Attributes:
        num_entered: States of the context that the call is entered with, E.
        left_LU: int64 (L, W - 1), the last inputs at the cut tokens, oldest first; None if there are none.
    """

    seam_S: Tensor
    ancestor_SW: Tensor
    num_entered: int = 0
    left_LU: Tensor | None = None

    @classmethod
    def of_plan(cls, plan: AttentionPlan, *, width: int) -> Self:
        """Return the seams behind the context for a convolution of so many tokens, found once for all layers."""
        return plan.once(("seams", width), lambda plan: cls._find(plan, width=width))

    @classmethod
    def _find(cls, plan: AttentionPlan, *, width: int) -> Self:
        parent = _parents_among_inputs(plan.runs, width=width)
        first = len(parent) - 1 - plan.num_queries  # what lies before it are the inputs of the context
        token_T = np.arange(first, first + plan.num_queries)
        columns = [token_T]
        for _ in range(width - 1):
            columns.insert(0, parent[columns[0]])
        ancestor_TW = np.stack(columns, axis=1)
        in_pack_TW = token_T[:, None] - np.arange(width - 1, -1, -1)
        in_pack_TW[in_pack_TW < first] = -1
        seam_S = np.flatnonzero((ancestor_TW != in_pack_TW).any(axis=1))
        arrays = [seam_S, ancestor_TW[seam_S]]
        if len(plan.cut_places):
            arrays.append(ancestor_TW[plan.cut_places, 1:])
        on_device = to_device([torch.from_numpy(each) for each in arrays], plan.subtree_end_T.device)
        seam_S, ancestor_SW, *left = on_device
        return cls(seam_S, ancestor_SW, num_entered=len(plan.runs.entered_E), left_LU=left[0] if left else None)


def _parents_among_inputs(runs: Runs, *, width: int) -> np.ndarray:
    """Return what each input follows.

    The inputs are those of the states, W - 1 each, and then those of the tokens behind the context. One more at the end
    is the parent of -1.
    """
    num_before = len(runs.entered_E) * (width - 1)
    before = np.arange(num_before) - 1
    before[:: max(width - 1, 1)] = -1
    start_N, last_N, parent_N = runs.behind_context()
    own = num_before - 1 + np.arange(len(runs.subtree_end_T) - runs.num_context)
    # Above a run is a run of the call, a state of the context, of which the last input counts, or nothing.
    of_state_N = np.where(parent_N == -1, -1, (-1 - parent_N) * (width - 1) - 1)
    own[start_N] = np.where(parent_N >= 0, num_before + last_N[np.maximum(parent_N, 0)], of_state_N)
    return np.concatenate([before, own, [-1]])


def tree_causal_conv(
    x_DT: Tensor, weight_DW: Tensor, bias_D: Tensor | None, *, seams: ConvSeams, states: States | None = None
) -> Tensor:
    """Convolve every channel along the paths of a forest, (D, T); differentiable.

    `states` (., W - 1, D) are the last inputs where the forest crosses calls, if the seams are of a relayed call.
    """
    assert states is not None or not (seams.num_entered or seams.left_LU is not None), "states that cross calls"
    width = weight_DW.shape[-1]
    y_DT = F.conv1d(F.pad(x_DT, (width - 1, 0)), weight_DW.unsqueeze(1), bias_D, groups=len(weight_DW))
    input_DI = x_DT
    if states is not None and seams.num_entered:
        input_DI = torch.cat((states.enter(x_DT).flatten(0, 1).T, x_DT), dim=1)
    if len(seams.seam_S):
        y_DS = (_take(input_DI, seams.ancestor_SW) * weight_DW.unsqueeze(1)).sum(-1)
        if bias_D is not None:
            y_DS = y_DS + bias_D.unsqueeze(-1)
        y_DT = y_DT.index_copy(1, seams.seam_S, y_DS.to(y_DT.dtype))
    if states is None or seams.left_LU is None:
        return y_DT
    return states.leave(y_DT, _take(input_DI, seams.left_LU).permute(1, 2, 0))


def _take(input_DI: Tensor, place: Tensor) -> Tensor:
    """Return the inputs at some places, (D, ...), 0 at -1."""
    return input_DI[:, place.clamp(min=0)].masked_fill(place < 0, 0.0)
