"""Tree attention from dense pieces, merged by log-sum-exp, with the gradient of the merged whole: here on a CPU.

The kernel returns the log-sum-exp of every query besides its output, so two pieces over disjoint keys combine exactly:
`out = lerp(out_a, out_b, sigmoid(lse_b - lse_a))` and `lse = logaddexp(lse_a, lse_b)`. In the backward pass every piece
is called with the *merged* output and log-sum-exp, which makes its probabilities those of the whole softmax;
gradients of the pieces then simply add up (as in ring attention, https://arxiv.org/abs/2310.01889).

A layer with a sliding window needs no merging: every run, cut into segments, attends to itself and to the few tokens
before it on its path, under a mask of the size of the segment (`AttentionPlan.window_calls`).

Attention sinks join after the merge (`verl_tree.attention.sinks`). CUDA tensors are handed to
`verl_tree.attention.varlen_cuda`, which makes few large calls of the same pieces.

Grouped-query attention costs no copy of keys or values: the key-value heads are the kernel's batch, and the query
heads of a group read one key head through a stride of zero.

Legend: T tree tokens, L queries and K keys of a piece or segment, Q and N those of a call, H key-value heads, G query
    heads per key-value head, D head dim.
"""

from collections.abc import Iterator

import torch

from verl_tree.attention import varlen_cuda
from verl_tree.attention.options import ScoreOptions
from verl_tree.attention.pieces import AttentionPiece, VarlenCall
from verl_tree.attention.plan import AttentionPlan
from verl_tree.attention.sinks import absorb_sinks, sink_gradient
from verl_tree.attention.varlen_providers import VarlenProvider

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


MAX_SEGMENT_LEN = 256
"""Queries of a segment under a sliding window; its mask has that many rows."""


def not_supported_reasons(
    q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, plan: AttentionPlan, *, options: ScoreOptions
) -> list[str]:
    """Says why this backend cannot serve the inputs; empty where it can."""
    if q_THD.device.type == "cuda":
        return varlen_cuda.not_supported_reasons(q_THD, k_THD, v_THD, plan, options=options)
    reasons = options.not_served_reasons(served=("window", "sinks"))
    if q_THD.device.type != "cpu":
        reasons.append(f"tensors are on {q_THD.device}, there are kernels for CPU and CUDA only")
    if q_THD.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        reasons.append(f"dtype {q_THD.dtype} is none of float64, float32, bfloat16, float16")
    if v_THD.shape[-1] != q_THD.shape[-1]:
        reasons.append(f"value head dim {v_THD.shape[-1]} differs from the query head dim {q_THD.shape[-1]}")
    return reasons


def varlen_attention(
    q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, plan: AttentionPlan, *, options: ScoreOptions
) -> torch.Tensor:
    """Attention under the tree mask, differentiable once.

    Args:
        q_THD: (T, Hq, D) queries on a CPU or a CUDA device.
        k_THD: (T, Hkv, D) keys; Hkv divides Hq.
        v_THD: (T, Hkv, D) values.
        plan: Plan of the pack.
        options: Scale, window and sinks of the scores.

    Returns:
        (T, Hq, D), dtype of `q_THD`.
    """
    if q_THD.device.type == "cuda":
        return varlen_cuda.varlen_cuda_attention(q_THD, k_THD, v_THD, plan, options=options)
    if options.window is not None:
        return varlen_cuda.call_attention(q_THD, k_THD, v_THD, plan, options=options, provider=_CPU_SEGMENTS)
    return _VarlenAttention.apply(q_THD, k_THD, v_THD, options.sinks_H, plan, options.scale)


class _VarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_THD, k_THD, v_THD, sinks_H, plan, scale):
        q_HGTD, k_HTD, v_HTD = _heads_first(q_THD, k_THD, v_THD)
        num_kv_heads, num_groups, num_tokens, head_dim = q_HGTD.shape
        # Reduced precision is merged in float32, else every further piece of a query would add its own rounding.
        wide = torch.float32 if q_THD.dtype in (torch.bfloat16, torch.float16) else q_THD.dtype
        out_HGTD = q_THD.new_empty((num_tokens, num_kv_heads, num_groups, head_dim), dtype=wide).permute(1, 2, 0, 3)
        lse_HGT = q_THD.new_empty((num_kv_heads, num_groups, num_tokens), dtype=wide)
        for piece in plan.self_pieces:
            out, lse = _piece_forward(piece, q_HGTD, k_HTD, v_HTD, scale)
            rows = slice(piece.query_start, piece.query_end)
            out_HGTD[:, :, rows] = out
            lse_HGT[:, :, rows] = lse
        for piece in plan.ancestor_pieces:
            out, lse = _piece_forward(piece, q_HGTD, k_HTD, v_HTD, scale)
            rows = slice(piece.query_start, piece.query_end)
            merged = lse_HGT[:, :, rows]
            out_HGTD[:, :, rows].lerp_(out.to(wide), torch.sigmoid(lse - merged).unsqueeze(-1))
            torch.logaddexp(merged, lse, out=merged)
        if sinks_H is not None:
            absorb_sinks(out_HGTD, lse_HGT, _sinks_like(lse_HGT, sinks_H))
        out_THD = out_HGTD.permute(2, 0, 1, 3).reshape(q_THD.shape).to(q_THD.dtype)
        ctx.save_for_backward(q_THD, k_THD, v_THD, out_THD, lse_HGT, sinks_H)
        ctx.plan, ctx.scale = plan, scale
        return out_THD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out_THD):
        q_THD, k_THD, v_THD, out_THD, lse_HGT, sinks_H = ctx.saved_tensors
        plan, scale, wide = ctx.plan, ctx.scale, lse_HGT.dtype
        q_HGTD, k_HTD, v_HTD = _heads_first(q_THD, k_THD, v_THD)
        grad_out_HGTD, out_HGTD = (_group_heads(x, k_THD.shape[1]) for x in (grad_out_THD, out_THD))
        grad_q_THD = torch.empty(q_THD.shape, dtype=wide)
        grad_k_THD, grad_v_THD = torch.zeros(k_THD.shape, dtype=wide), torch.zeros(v_THD.shape, dtype=wide)
        grad_q_HGTD = _group_heads(grad_q_THD, k_THD.shape[1])
        for number, piece in enumerate((*plan.self_pieces, *plan.ancestor_pieces)):
            rows = slice(piece.query_start, piece.query_end)
            grad_q, grad_k, grad_v = _flash_backward(
                grad_out_HGTD[:, :, rows],
                q_HGTD[:, :, rows],
                _keys(piece, k_HTD, q_HGTD.shape[1]),
                _keys(piece, v_HTD, q_HGTD.shape[1]),
                out_HGTD[:, :, rows],
                lse_HGT[:, :, rows],
                0.0,
                piece.causal,
                scale=scale,
            )
            if number < len(plan.self_pieces):
                grad_q_HGTD[:, :, rows] = grad_q
            else:
                grad_q_HGTD[:, :, rows] += grad_q
            _add_to_keys(grad_k_THD, piece, grad_k)
            _add_to_keys(grad_v_THD, piece, grad_v)
        grad_sinks_H = None
        if sinks_H is not None:
            grad_sinks_HG = sink_gradient(grad_out_HGTD, out_HGTD, lse_HGT, _sinks_like(lse_HGT, sinks_H))
            grad_sinks_H = grad_sinks_HG.flatten().to(sinks_H.dtype)
        grads = (grad_q_THD.to(q_THD.dtype), grad_k_THD.to(k_THD.dtype), grad_v_THD.to(v_THD.dtype))
        return *grads, grad_sinks_H, None, None


def _sinks_like(lse_HGT: torch.Tensor, sinks_H: torch.Tensor) -> torch.Tensor:
    """The sinks of the query heads as (H, G, 1)."""
    return sinks_H.to(lse_HGT.dtype).view(*lse_HGT.shape[:2], 1)


def _group_heads(x_THD: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """(T, Hq, D) as (H, G, T, D), without a copy."""
    return x_THD.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)


def _heads_first(
    q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _group_heads(q_THD, k_THD.shape[1]), k_THD.transpose(0, 1), v_THD.transpose(0, 1)


def _keys(piece: AttentionPiece, x_HTD: torch.Tensor, num_groups: int) -> torch.Tensor:
    """The piece's keys (or values) as (H, G, K, D)."""
    return _shared_by_groups(x_HTD[:, piece.key_start : piece.key_end], num_groups)


def _shared_by_groups(x_HKD: torch.Tensor, num_groups: int) -> torch.Tensor:
    """(H, K, D) as (H, G, K, D); the groups share memory."""
    return x_HKD.unsqueeze(1).expand(-1, num_groups, -1, -1)


def _piece_forward(
    piece: AttentionPiece, q_HGTD: torch.Tensor, k_HTD: torch.Tensor, v_HTD: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    num_groups = q_HGTD.shape[1]
    return _flash_forward(
        q_HGTD[:, :, piece.query_start : piece.query_end],
        _keys(piece, k_HTD, num_groups),
        _keys(piece, v_HTD, num_groups),
        0.0,
        piece.causal,
        scale=scale,
    )


def _add_to_keys(grad_THD: torch.Tensor, piece: AttentionPiece, grad_HGKD: torch.Tensor) -> None:
    grad_THD[piece.key_start : piece.key_end] += grad_HGKD.sum(1, dtype=grad_THD.dtype).transpose(0, 1)


def _segments(call: VarlenCall, *, dtype: torch.dtype) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Queries and keys of every segment of a windowed call, and its mask (L, K): 0 or -inf."""
    query_offsets, key_offsets = call.query_offsets_S1.tolist(), call.key_offsets_S1.tolist()
    segments = zip(query_offsets[:-1], query_offsets[1:], key_offsets[:-1], key_offsets[1:], strict=True)
    for query_start, query_end, key_start, key_end in segments:
        # The keys end with the queries, so both count backwards from the end of the segment.
        query_L = torch.arange(query_start - query_end, 0)[:, None]
        key_K = torch.arange(key_start - key_end, 0)
        visible_LK = (key_K <= query_L) & (query_L - key_K < call.window)
        mask_LK = torch.zeros(visible_LK.shape, dtype=dtype).masked_fill_(~visible_LK, -torch.inf)
        yield slice(query_start, query_end), slice(key_start, key_end), mask_LK


def _segments_forward(
    q_QHD: torch.Tensor, k_NHD: torch.Tensor, v_NHD: torch.Tensor, call: VarlenCall, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    q_HGQD, k_HND, v_HND = _heads_first(q_QHD, k_NHD, v_NHD)
    wide = torch.float32 if q_QHD.dtype in (torch.bfloat16, torch.float16) else q_QHD.dtype
    out_QHD = torch.empty_like(q_QHD, memory_format=torch.contiguous_format)
    lse_HGQ = torch.empty(q_HGQD.shape[:3], dtype=wide)
    for rows, keys, mask_LK in _segments(call, dtype=q_QHD.dtype):
        k_HGKD, v_HGKD = (_shared_by_groups(x_HND[:, keys], q_HGQD.shape[1]) for x_HND in (k_HND, v_HND))
        out_HGLD, lse_HGQ[:, :, rows] = _flash_forward(
            q_HGQD[:, :, rows], k_HGKD, v_HGKD, 0.0, False, attn_mask=mask_LK, scale=scale
        )
        _group_heads(out_QHD, k_NHD.shape[1])[:, :, rows] = out_HGLD
    return out_QHD, lse_HGQ.flatten(0, 1)


def _segments_backward(
    grad_out_QHD: torch.Tensor,
    q_QHD: torch.Tensor,
    k_NHD: torch.Tensor,
    v_NHD: torch.Tensor,
    out_QHD: torch.Tensor,
    lse_HQ: torch.Tensor,
    call: VarlenCall,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q_HGQD, k_HND, v_HND = _heads_first(q_QHD, k_NHD, v_NHD)
    grad_out_HGQD, out_HGQD = (_group_heads(x, k_NHD.shape[1]) for x in (grad_out_QHD, out_QHD))
    lse_HGQ = lse_HQ.unflatten(0, q_HGQD.shape[:2])
    gradients = tuple(torch.empty(x.shape, dtype=lse_HQ.dtype) for x in (q_QHD, k_NHD, v_NHD))
    grad_q_HGQD, grad_k_HND, grad_v_HND = _heads_first(*gradients)
    for rows, keys, mask_LK in _segments(call, dtype=q_QHD.dtype):
        k_HGKD, v_HGKD = (_shared_by_groups(x_HND[:, keys], q_HGQD.shape[1]) for x_HND in (k_HND, v_HND))
        inputs = (grad_out_HGQD[:, :, rows], q_HGQD[:, :, rows], k_HGKD, v_HGKD, out_HGQD[:, :, rows])
        grad_q, grad_k, grad_v = _flash_backward(
            *inputs, lse_HGQ[:, :, rows], 0.0, False, attn_mask=mask_LK, scale=scale
        )
        grad_q_HGQD[:, :, rows] = grad_q
        grad_k_HND[:, keys] = grad_k.sum(1, dtype=lse_HQ.dtype)
        grad_v_HND[:, keys] = grad_v.sum(1, dtype=lse_HQ.dtype)
    return gradients


_CPU_SEGMENTS = VarlenProvider(
    name="CPU",
    not_supported_reasons=lambda q_THD, *, is_windowed: [],
    forward=_segments_forward,
    backward=_segments_backward,
    max_segment_len=MAX_SEGMENT_LEN,
)
