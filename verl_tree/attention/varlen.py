"""Tree attention from the pieces of the mask, merged by log-sum-exp.

Two pieces over disjoint keys combine exactly: `out = lerp(out_a, out_b, sigmoid(lse_b - lse_a))` and
`lse = logaddexp(lse_a, lse_b)`. In the backward pass every piece is called with the *merged* output and log-sum-exp.
Its probabilities are then those of the whole softmax, and the gradients of the pieces add up, as in ring attention
(https://arxiv.org/abs/2310.01889). Under a sliding window every query is in one piece, so nothing is merged. Attention
sinks join at the end (`verl_tree.attention.sinks`).

The provider (`verl_tree.attention.varlen_providers`) chooses the kernel and how many pieces one call takes: one on a
CPU, a level of the tree on a GPU. On a GPU a provider is used only after its self-test.

Legend: T tokens, the last Q of them queries, K keys of a call, Hq and Hkv query and key-value heads, D head dim.
    Tensors without a legend in their name have the heads as the provider takes them, in one dimension or in two.
"""

from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from verl_tree.attention.options import ScoreOptions
from verl_tree.attention.pieces import VarlenCall
from verl_tree.attention.refusals import HALF_DTYPES, dtype_reasons, gpu_reasons, value_dim_reasons
from verl_tree.attention.self_test import KernelVariant, self_test_reasons
from verl_tree.attention.sinks import absorb_sinks, sink_gradient
from verl_tree.attention.varlen_providers import PROVIDERS, VarlenProvider
from verl_tree.tree.plan import AttentionPlan

CPU_DTYPES = (torch.float64, torch.float32, *HALF_DTYPES)
MAX_GPU_HEAD_DIM = 256
GPU_HEAD_DIM_MULTIPLE = 8


def not_supported_reasons(
    q_QHD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, _plan: AttentionPlan, *, options: ScoreOptions
) -> list[str]:
    """Return why this backend cannot serve the inputs; empty if it can."""
    device, head_dim = q_QHD.device, q_QHD.shape[-1]
    reasons = options.not_served_reasons(served=("window", "sinks")) + value_dim_reasons(q_QHD, v_THD)
    if device.type == "cpu":
        return reasons + dtype_reasons(q_QHD, k_THD, v_THD, dtypes=CPU_DTYPES)
    if device.type != "cuda":
        return [*reasons, f"tensors are on {device}, there are kernels for CPU and CUDA only"]
    reasons += gpu_reasons(device) + dtype_reasons(q_QHD, k_THD, v_THD, dtypes=HALF_DTYPES)
    if head_dim > MAX_GPU_HEAD_DIM or head_dim % GPU_HEAD_DIM_MULTIPLE:
        reasons.append(f"head dim {head_dim} is above {MAX_GPU_HEAD_DIM} or no multiple of {GPU_HEAD_DIM_MULTIPLE}")
    if reasons:
        return reasons
    is_windowed = options.window is not None
    provider = choose_provider(q_QHD, is_windowed=is_windowed)
    # Deterministic sums select another kernel, which needs its own test.
    name = f"varlen on {provider.name}{', deterministic' if torch.are_deterministic_algorithms_enabled() else ''}"
    kernel = KernelVariant.of(q_QHD, k_THD, is_windowed=is_windowed)
    return self_test_reasons(name, partial(merged_attention, provider=provider), kernel)


def varlen_attention(
    q_QHD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, plan: AttentionPlan, *, options: ScoreOptions
) -> torch.Tensor:
    """Compute attention as `AttentionBackend.attend`, on the first provider that serves the device."""
    provider = choose_provider(q_QHD, is_windowed=options.window is not None)
    return merged_attention(q_QHD, k_THD, v_THD, plan, options=options, provider=provider)


def choose_provider(q_QHD: torch.Tensor, *, is_windowed: bool) -> VarlenProvider:
    """Return the first provider that is installed and serves the device, head dim, window and determinism."""
    return next(provider for provider in PROVIDERS if not provider.not_supported_reasons(q_QHD, is_windowed))


def merged_attention(
    q_QHD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    plan: AttentionPlan,
    *,
    options: ScoreOptions,
    provider: VarlenProvider,
) -> torch.Tensor:
    """Compute attention as `varlen_attention`, with the kernel and the calls of one provider."""
    calls = provider.calls(plan, options.window)
    return _MergedAttention.apply(q_QHD, k_THD, v_THD, options.sinks_H, calls, options.scale, provider)


class _MergedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_QHD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        sinks_H: torch.Tensor | None,
        calls: tuple[VarlenCall, ...],
        scale: float,
        provider: VarlenProvider,
    ) -> torch.Tensor:
        # Reduced precision is merged in float32, or every further call would add its own rounding.
        wide = torch.float32 if q_QHD.dtype in HALF_DTYPES else q_QHD.dtype
        q, k, v = _views(q_QHD, k_THD, v_THD, provider)
        out = torch.empty(q.shape, dtype=wide, device=q.device)
        lse = torch.empty((*q.shape[1:-1], len(q)), dtype=wide, device=q.device)
        for call in calls:
            rows, keys = call.query_rows, call.key_rows
            part, part_lse = provider.forward(q[rows], k[keys], v[keys], call, scale=scale)
            if call.causal:
                out[rows], lse[..., rows] = part.to(wide), part_lse
            else:
                _merge_rows(out, lse, rows, part.to(wide), part_lse)
        out_QHD, lse_HQ = out.view(q_QHD.shape), lse.view(q_QHD.shape[1], -1)
        if sinks_H is not None:
            absorb_sinks(out_QHD.transpose(0, 1), lse_HQ, _column(lse_HQ, sinks_H))
        out_QHD = out_QHD.to(q_QHD.dtype)
        ctx.save_for_backward(q_QHD, k_THD, v_THD, out_QHD, lse_HQ, sinks_H)
        ctx.calls, ctx.scale, ctx.provider = calls, scale, provider
        return out_QHD

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _backward(ctx, *grad_outputs)


@once_differentiable
def _backward(ctx: Any, grad_out_QHD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    q_QHD, k_THD, v_THD, out_QHD, lse_HQ, sinks_H = ctx.saved_tensors
    grad_out_QHD = grad_out_QHD.contiguous()
    wide = {"dtype": lse_HQ.dtype, "device": lse_HQ.device}
    q, k, v = _views(q_QHD, k_THD, v_THD, ctx.provider)
    grad_out, out, lse = grad_out_QHD.view(q.shape), out_QHD.view(q.shape), lse_HQ.view(*q.shape[1:-1], len(q))
    grad_q = torch.empty(q.shape, **wide)
    grad_k_THD, grad_v_THD = torch.zeros(k_THD.shape, **wide), torch.zeros(v_THD.shape, **wide)
    for call in ctx.calls:
        rows, keys = call.query_rows, call.key_rows
        part_q, part_k_KHD, part_v_KHD = ctx.provider.backward(
            grad_out[rows], q[rows], k[keys], v[keys], out[rows], lse[..., rows], call, scale=ctx.scale
        )
        if call.causal:
            grad_q[rows] = part_q.to(grad_q.dtype)
        else:
            _add_rows(grad_q, rows, part_q)
        _add_rows(grad_k_THD, keys, part_k_KHD)
        _add_rows(grad_v_THD, keys, part_v_KHD)
    grad_sinks_H = None
    if sinks_H is not None:
        heads_first = (grad_out_QHD.transpose(0, 1), out_QHD.transpose(0, 1))
        grad_sinks_H = sink_gradient(*heads_first, lse_HQ, _column(lse_HQ, sinks_H)).to(sinks_H.dtype)
    gradients = ((grad_q.view(q_QHD.shape), q_QHD), (grad_k_THD, k_THD), (grad_v_THD, v_THD))
    return *(gradient.to(x.dtype) for gradient, x in gradients), grad_sinks_H, None, None, None


def _views(
    q_QHD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, provider: VarlenProvider
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values with the heads in one or two dimensions, as the provider takes them."""
    if not provider.groups_heads:
        return q_QHD, k_THD, v_THD
    return q_QHD.unflatten(1, (k_THD.shape[1], -1)), k_THD.unsqueeze(2), v_THD.unsqueeze(2)


def _add_rows(total: torch.Tensor, rows: torch.Tensor | slice, part: torch.Tensor) -> None:
    """Add to rows. An index may hold a row several times, as keys under a window do."""
    if isinstance(rows, slice):
        total[rows] += part
    else:
        total.index_add_(0, rows, part.to(total.dtype))


def _merge_rows(
    out: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor | slice, part: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Merge the results of a call over further keys into the rows of its queries."""
    merged, merged_lse = out[rows], lse[..., rows]  # views of a slice, copies of an index
    merged.lerp_(part, (part_lse - merged_lse).sigmoid_().movedim(-1, 0).unsqueeze(-1))
    torch.logaddexp(merged_lse, part_lse, out=merged_lse)
    if not isinstance(rows, slice):
        out[rows], lse[..., rows] = merged, merged_lse


def _column(lse_HQ: torch.Tensor, sinks_H: torch.Tensor) -> torch.Tensor:
    """Return the sinks as (Hq, 1)."""
    return sinks_H.to(lse_HQ.dtype).unsqueeze(-1)
