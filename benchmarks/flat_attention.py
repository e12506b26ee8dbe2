"""Causal attention of trajectories one after another, as flat trainers run it, for the baselines of por.py.

A model takes it as an attention implementation of transformers. It reads the trajectories from the plan of a pack whose
trees are single rows, so model calls and log-probs are those of the tree path.

Legend: T tokens, S rows, Hq and Hkv query and key-value heads, D head dim.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from verl_tree.attention import AttentionPlan

Kernel = Callable[..., Tensor]
"""`kernel(q_THD, k_THD, v_THD, lens_S, offsets_S1, *, scale) -> out_THD`, differentiable."""


def _fa4(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, lens_S: tuple[int, ...], offsets_S1: Tensor, *, scale: float
) -> Tensor:
    """Run the varlen kernels of flash-attn-4, without block sparsity and without a mask of ours."""
    out_THD, _ = importlib.import_module("flash_attn.cute.interface").flash_attn_varlen_func(
        q_THD,
        k_THD,
        v_THD,
        cu_seqlens_q=offsets_S1,
        cu_seqlens_k=offsets_S1,
        max_seqlen_q=max(lens_S),
        max_seqlen_k=max(lens_S),
        softmax_scale=scale,
        causal=True,
    )
    return out_THD


def _sdpa(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, lens_S: tuple[int, ...], _offsets_S1: Tensor, *, scale: float
) -> Tensor:
    """Run torch's attention row by row."""
    rows = zip(*(each.transpose(0, 1)[None].split(lens_S, dim=2) for each in (q_THD, k_THD, v_THD)), strict=True)
    out_1HTD = torch.cat(
        [scaled_dot_product_attention(*row, is_causal=True, scale=scale, enable_gqa=True) for row in rows], dim=2
    )
    return out_1HTD[0].transpose(0, 1)


KERNELS: dict[str, Kernel] = {"fa4": _fa4, "sdpa": _sdpa}


def default_kernels(device: str) -> list[str]:
    """Return the kernels that are tried on a device, "cuda" or "cpu", besides the one that trees take."""
    if device != "cuda":
        return ["sdpa"]
    # flash-attn (2) has the package, too, but not this part of it.
    has_fa4 = importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn.cute")
    return ["fa4"] if has_fa4 else ["varlen"]


def register_kernel(name: str) -> str:
    """Make a kernel known to transformers and return the name of its attention implementation."""
    implementation = f"flat_{name}"
    AttentionInterface.register(implementation, functools.partial(_attend, KERNELS[name]))
    AttentionMaskInterface.register(implementation, lambda *_args, **_kwargs: None)
    return implementation


def _attend(
    kernel: Kernel,
    _module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _attention_mask: None,
    *,
    tree_plan: AttentionPlan,
    scaling: float,
    **_unread: object,
) -> tuple[Tensor, None]:
    """Compute attention as transformers' layers ask for it; (1, H, T, D) each, the output is (1, T, Hq, D)."""
    lens_S, offsets_S1 = tree_plan.once("rows", _rows)
    heads_second = (each[0].transpose(0, 1) for each in (query, key, value))
    return kernel(*heads_second, lens_S, offsets_S1, scale=scaling)[None], None


def _rows(plan: AttentionPlan) -> tuple[tuple[int, ...], Tensor]:
    """Return the lengths of the rows and where they start, int32 (S + 1,)."""
    runs = plan.runs
    assert (runs.subtree_end_R == runs.end_R).all(), "a flat pack holds rows that share nothing"
    lens_S = tuple((runs.end_R - runs.start_R).tolist())
    offsets_S1 = torch.tensor([0, *runs.end_R.tolist()], dtype=torch.int32)
    return lens_S, offsets_S1.to(plan.subtree_end_T.device)
