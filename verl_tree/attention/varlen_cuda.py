"""Tree attention from a varlen flash kernel: one call of triangles, one call of rectangles per level.

The calls are those of `AttentionPlan.varlen_calls`. Queries and keys of a level are gathered (a single range is a view:
a prompt with branches copies nothing), outputs are merged by log-sum-exp, and the backward pass gives every call the
merged output and log-sum-exp (see `verl_tree.attention.varlen`). A layer with a sliding window takes
`AttentionPlan.window_calls`, most often one, and merges nothing. The kernels come from `varlen_providers`.

The algorithm is tested on a CPU with a provider that loops over the segments; on a GPU it has not been measured. There
a provider is used only after it has agreed with the dense backend on a tiny forest.

Legend: T tree tokens, Q queries and K keys of a call, Hq and Hkv query and key-value heads, D head dim.
"""

from functools import partial

import torch
from torch.autograd.function import once_differentiable

from verl_tree.attention.options import ScoreOptions
from verl_tree.attention.plan import AttentionPlan
from verl_tree.attention.self_test import KernelVariant, self_test_reasons
from verl_tree.attention.sinks import absorb_sinks, sink_gradient
from verl_tree.attention.varlen_providers import PROVIDERS, VarlenProvider

DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8
MIN_COMPUTE_CAPABILITY = (8, 0)


def not_supported_reasons(
    q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, plan: AttentionPlan, *, options: ScoreOptions
) -> list[str]:
    """Says why this backend cannot serve the CUDA inputs; empty where it can.

    The first inputs of a kind that nothing else speaks against run the self-test.
    """
    reasons = options.not_served_reasons(served=("window", "sinks"))
    capability = torch.cuda.get_device_capability(q_THD.device)
    if torch.version.hip is not None:
        reasons.append("the device is an AMD GPU, for which no kernel has been looked at")
    elif capability < MIN_COMPUTE_CAPABILITY:
        reasons.append(f"compute capability {capability} is below {MIN_COMPUTE_CAPABILITY}")
    if q_THD.dtype not in DTYPES or not q_THD.dtype == k_THD.dtype == v_THD.dtype:
        dtypes = sorted({str(each.dtype) for each in (q_THD, k_THD, v_THD)})
        reasons.append(f"dtype {' and '.join(dtypes)} is neither bfloat16 nor float16 throughout")
    head_dim = q_THD.shape[-1]
    if head_dim > MAX_HEAD_DIM or head_dim % HEAD_DIM_MULTIPLE:
        reasons.append(f"head dim {head_dim} is above {MAX_HEAD_DIM} or no multiple of {HEAD_DIM_MULTIPLE}")
    if v_THD.shape[-1] != head_dim:
        reasons.append(f"value head dim {v_THD.shape[-1]} differs from the query head dim {head_dim}")
    if reasons:
        return reasons
    is_windowed = options.window is not None
    provider = choose_provider(q_THD, is_windowed=is_windowed)
    # Whether sums must be deterministic decides which kernel it is.
    name = f"varlen on {provider.name}{', deterministic' if torch.are_deterministic_algorithms_enabled() else ''}"
    kernel = KernelVariant.of(q_THD, k_THD, is_windowed=is_windowed)
    return self_test_reasons(name, partial(call_attention, provider=provider), kernel)


def varlen_cuda_attention(
    q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, plan: AttentionPlan, *, options: ScoreOptions
) -> torch.Tensor:
    """Attention under the tree mask on the first provider that is installed, differentiable once.

    Args:
        q_THD: (T, Hq, D) bf16 or fp16 queries on a CUDA device.
        k_THD: (T, Hkv, D) keys; Hkv divides Hq.
        v_THD: (T, Hkv, D) values.
        plan: Plan of the pack, on the same device.
        options: Scale, window and sinks of the scores.

    Returns:
        (T, Hq, D), dtype of `q_THD`.
    """
    provider = choose_provider(q_THD, is_windowed=options.window is not None)
    return call_attention(q_THD, k_THD, v_THD, plan, options=options, provider=provider)


def choose_provider(q_THD: torch.Tensor, *, is_windowed: bool) -> VarlenProvider:
    """The first provider that is installed and serves the device, head dim, window and determinism asked for."""
    return next(
        provider for provider in PROVIDERS if not provider.not_supported_reasons(q_THD, is_windowed=is_windowed)
    )


def call_attention(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    plan: AttentionPlan,
    *,
    options: ScoreOptions,
    provider: VarlenProvider,
) -> torch.Tensor:
    """Attention under the tree mask by the calls of the plan, on whatever device and dtypes the provider serves."""
    if options.window is None:
        calls = plan.varlen_calls()
    else:
        calls = plan.window_calls(options.window, max_segment_len=provider.max_segment_len)
    return _CallAttention.apply(q_THD, k_THD, v_THD, options.sinks_H, calls, options.scale, provider)


class _CallAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_THD, k_THD, v_THD, sinks_H, calls, scale, provider):
        # Reduced precision is merged in float32, else every further call would add its own rounding to a query.
        wide = torch.float32 if q_THD.dtype in DTYPES else q_THD.dtype
        out_THD = torch.empty(q_THD.shape, dtype=wide, device=q_THD.device)
        lse_HT = torch.empty((q_THD.shape[1], q_THD.shape[0]), dtype=wide, device=q_THD.device)
        for call in calls:
            rows, keys = call.query_rows, call.key_rows
            out_QHD, lse_HQ = provider.forward(q_THD[rows], k_THD[keys], v_THD[keys], call, scale=scale)
            if call.causal:
                out_THD[rows], lse_HT[:, rows] = out_QHD.to(wide), lse_HQ
                continue
            before_HQ, before_QHD = lse_HT[:, rows], out_THD[rows]
            weight_QH1 = (lse_HQ - before_HQ).sigmoid().T.unsqueeze(-1)
            out_THD[rows] = before_QHD.lerp(out_QHD.to(wide), weight_QH1)
            lse_HT[:, rows] = torch.logaddexp(before_HQ, lse_HQ)
        if sinks_H is not None:
            absorb_sinks(out_THD.transpose(0, 1), lse_HT, _column(lse_HT, sinks_H))
        out_THD = out_THD.to(q_THD.dtype)
        ctx.save_for_backward(q_THD, k_THD, v_THD, out_THD, lse_HT, sinks_H)
        ctx.calls, ctx.scale, ctx.provider = calls, scale, provider
        return out_THD

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out_THD):
        q_THD, k_THD, v_THD, out_THD, lse_HT, sinks_H = ctx.saved_tensors
        grad_out_THD = grad_out_THD.contiguous()
        gradients = [torch.zeros(x.shape, dtype=lse_HT.dtype, device=x.device) for x in (q_THD, k_THD, v_THD)]
        for call in ctx.calls:
            rows, keys = call.query_rows, call.key_rows
            found = ctx.provider.backward(
                grad_out_THD[rows],
                q_THD[rows],
                k_THD[keys],
                v_THD[keys],
                out_THD[rows],
                lse_HT[:, rows].contiguous(),
                call,
                scale=ctx.scale,
            )
            for total, where, part in zip(gradients, (rows, keys, keys), found, strict=True):
                _add_rows(total, where, part.to(total.dtype))
        grad_sinks_H = None
        if sinks_H is not None:
            heads_first = (grad_out_THD.transpose(0, 1), out_THD.transpose(0, 1))
            grad_sinks_H = sink_gradient(*heads_first, lse_HT, _column(lse_HT, sinks_H)).to(sinks_H.dtype)
        grads = (total.to(x.dtype) for total, x in zip(gradients, (q_THD, k_THD, v_THD), strict=True))
        return *grads, grad_sinks_H, None, None, None


def _add_rows(total_THD: torch.Tensor, where: torch.Tensor | slice, part: torch.Tensor) -> None:
    """Adds to rows; with a window, keys occur several times."""
    if isinstance(where, slice):
        total_THD[where] += part
    else:
        total_THD.index_add_(0, where, part)


def _column(lse_HT: torch.Tensor, sinks_H: torch.Tensor) -> torch.Tensor:
    """The sinks as (Hq, 1)."""
    return sinks_H.to(lse_HT.dtype).unsqueeze(-1)
