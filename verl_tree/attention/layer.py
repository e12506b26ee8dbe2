"""Attention of one layer as its model computes it: behind the context of its plan, if that has one."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from verl_tree.attention import tree_attention
from verl_tree.tree.plan import AttentionPlan


def layer_attention(
    layer: torch.nn.Module, q_QHD: Tensor, k_QHD: Tensor, v_QHD: Tensor, plan: AttentionPlan, **options: Any
) -> Tensor:
    """Compute attention of a call's tokens, (Q, Hq, D); `options` are those of `tree_attention`.

    Keys and values of the context, if any, come from the plan, which keeps them under `layer`.
    """
    saving: AbstractContextManager[object] = nullcontext()
    k_THD, v_THD = k_QHD, v_QHD
    if plan.context is not None:
        k_THD, v_THD = plan.context.extend(layer, k_QHD, v_QHD)
        saving = plan.context.save_own(layer, (k_QHD, v_QHD), (k_THD, v_THD))
    with saving:
        return tree_attention(q_QHD, k_THD, v_THD, plan, **options)
