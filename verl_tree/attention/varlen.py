"""Tree attention on the CPU flash kernel: dense pieces, merged by log-sum-exp, with the gradient of the merged whole.

The kernel returns the log-sum-exp of every query besides its output, so two pieces over disjoint keys combine exactly:
`out = lerp(out_a, out_b, sigmoid(lse_b - lse_a))` and `lse = logaddexp(lse_a, lse_b)`. In the backward pass every piece
is called with the *merged* output and log-sum-exp, which makes its probabilities those of the whole softmax;
gradients of the pieces then simply add up (as in ring attention, https://arxiv.org/abs/2310.01889).

Grouped-query attention costs no copy of keys or values: the key-value heads are the kernel's batch, and the query
heads of a group read one key head through a stride of zero.

Legend: T tree tokens, L queries and K keys of a piece, H key-value heads, G query heads per key-value head, D head dim.
"""

import torch

from verl_tree.attention.plan import AttentionPiece, AttentionPlan

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def not_supported_reasons(
    q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, plan: AttentionPlan
) -> list[str]:
    """Says why this backend cannot serve the inputs; empty where it can."""
    reasons = []
    if q_THD.device.type != "cpu":
        reasons.append(f"tensors are on {q_THD.device}, the kernel runs on a CPU only")
    if q_THD.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        reasons.append(f"dtype {q_THD.dtype} is none of float64, float32, bfloat16, float16")
    if v_THD.shape[-1] != q_THD.shape[-1]:
        reasons.append(f"value head dim {v_THD.shape[-1]} differs from the query head dim {q_THD.shape[-1]}")
    return reasons


def varlen_attention(
    q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, plan: AttentionPlan, *, scale: float
) -> torch.Tensor:
    """Attention under the tree mask, differentiable once.

    Args:
        q_THD: (T, Hq, D) queries on the CPU.
        k_THD: (T, Hkv, D) keys; Hkv divides Hq.
        v_THD: (T, Hkv, D) values.
        plan: Plan of the pack.
        scale: Factor on the scores.

    Returns:
        (T, Hq, D), dtype of `q_THD`.
    """
    return _VarlenAttention.apply(q_THD, k_THD, v_THD, plan, scale)


class _VarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_THD, k_THD, v_THD, plan, scale):
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
        out_THD = out_HGTD.permute(2, 0, 1, 3).reshape(q_THD.shape).to(q_THD.dtype)
        ctx.save_for_backward(q_THD, k_THD, v_THD, out_THD, lse_HGT)
        ctx.plan, ctx.scale = plan, scale
        return out_THD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out_THD):
        q_THD, k_THD, v_THD, out_THD, lse_HGT = ctx.saved_tensors
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
        return grad_q_THD.to(q_THD.dtype), grad_k_THD.to(k_THD.dtype), grad_v_THD.to(v_THD.dtype), None, None


def _group_heads(x_THD: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """(T, Hq, D) as (H, G, T, D), without a copy."""
    return x_THD.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)


def _heads_first(
    q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _group_heads(q_THD, k_THD.shape[1]), k_THD.transpose(0, 1), v_THD.transpose(0, 1)


def _keys(piece: AttentionPiece, x_HTD: torch.Tensor, num_groups: int) -> torch.Tensor:
    """The piece's keys (or values) as (H, G, K, D); the groups share memory."""
    return x_HTD[:, piece.key_start : piece.key_end].unsqueeze(1).expand(-1, num_groups, -1, -1)


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
