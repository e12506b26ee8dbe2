"""Flash kernels that give the log-sum-exp and take it back: PyTorch's on a CPU; FA3, FA2 or PyTorch's own on CUDA.

A provider chooses the calls and runs them, and `verl_tree.attention.varlen` merges. A provider imports its package at
the first call. The kernels on CUDA need a contiguous last dimension. Signatures were read in

- FA3: `flash_attn_interface` of flash-attention 3.0.0 (hopper/, commit 0251105a) and of 3.0.0.b1 as tagged v2.8.3;
- FA2: `flash_attn.flash_attn_interface` of flash-attn 2.7.0, 2.8.3 and 2.8.4; before 2.7 the forward pass returned
  eight values;
- aten: `torch.ops.aten._flash_attention_forward` and `_backward` of torch 2.13; `torch.nn.attention.varlen` calls the
  first likewise;
- CPU: `torch.ops.aten._scaled_dot_product_flash_attention_for_cpu` and its backward, of torch 2.13.

Legend: Q queries and K keys of a call, Hq query heads, H key-value heads, G query heads for each, D head dim.
"""

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from verl_tree.attention.pieces import VarlenCall, mask_calls, window_calls
from verl_tree.tree.plan import AttentionPlan

FA3_COMPUTE_CAPABILITY = (9, 0)
FA3_MAX_DETERMINISTIC_HEAD_DIM = 192
FA2_MIN_VERSION = (2, 7)
MAX_CPU_WINDOW_QUERIES = 256
"""Most queries of a call under a sliding window on a CPU. The mask of such a call has that many rows."""

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Gradients of queries, keys and values."""


@dataclass(frozen=True, slots=True)
class VarlenProvider:
    """One pair of kernels."""

    name: str  # Its name in logs
    # `not_supported_reasons(q_QHD, is_windowed) -> list[str]`. Empty if it is installed and serves the device,
    # head dim and window, deterministically if `torch.use_deterministic_algorithms` is on.
    not_supported_reasons: Callable[[torch.Tensor, bool], list[str]]
    # `calls(plan, window) -> tuple[VarlenCall, ...]` of a layer, whose window may be None.
    calls: Callable[[AttentionPlan, int | None], tuple[VarlenCall, ...]]
    # `forward(q_QHD, k_KHD, v_KHD, call, *, scale) -> (out_QHD, lse_HQ)`. The log-sum-exp is that of a segment's
    # scores, in float32 or wider.
    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    # `backward(grad_out_QHD, q_QHD, k_KHD, v_KHD, out_QHD, lse_HQ, call, *, scale)` -> gradients of q, k and v
    # for probabilities `exp(score - lse)` and `delta = sum(out * grad_out)`.
    backward: Callable[..., Gradients]
    # Whether heads have two dimensions. Queries, outputs and their gradients are then (Q, H, G, D), the log-sum-exp
    # (H, G, Q), and keys and values (K, H, 1, D). The gradients of keys and values stay (K, H, D).
    groups_heads: bool = False


def few_calls(plan: AttentionPlan, window: int | None) -> tuple[VarlenCall, ...]:
    """Return large calls of many segments, as a GPU wants them."""
    return mask_calls(plan, by_level=True) if window is None else window_calls(plan, window)


def _cpu_reasons(q_QHD: torch.Tensor, _is_windowed: bool) -> list[str]:
    return [] if q_QHD.device.type == "cpu" else [f"tensors are on {q_QHD.device}"]


def _cpu_calls(plan: AttentionPlan, window: int | None) -> tuple[VarlenCall, ...]:
    """Return one call a piece."""
    if window is None:
        return mask_calls(plan, by_level=False)
    return window_calls(plan, window, max_query_len=MAX_CPU_WINDOW_QUERIES, max_keys=0)


def _cpu_forward(q_QHGD, k_KH1D, v_KH1D, call, *, scale):
    is_causal, mask_QK = _cpu_mask(call, len(q_QHGD), len(k_KH1D), dtype=q_QHGD.dtype)
    q_HGQD = _heads_first(q_QHGD)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _fold(q_HGQD, call), *_keys(q_QHGD, k_KH1D, v_KH1D, call), 0.0, is_causal, attn_mask=mask_QK, scale=scale
    )
    return out.view(q_HGQD.shape).permute(2, 0, 1, 3), lse.view(q_HGQD.shape[:3])


def _cpu_backward(grad_out_QHGD, q_QHGD, k_KH1D, v_KH1D, out_QHGD, lse_HGQ, call, *, scale):
    is_causal, mask_QK = _cpu_mask(call, len(q_QHGD), len(k_KH1D), dtype=q_QHGD.dtype)
    q_HGQD = _heads_first(q_QHGD)
    grad_q, grad_k_HGKD, grad_v_HGKD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _fold(_heads_first(grad_out_QHGD), call),
        _fold(q_HGQD, call),
        *_keys(q_QHGD, k_KH1D, v_KH1D, call),
        _fold(_heads_first(out_QHGD), call),
        _fold(lse_HGQ, call),
        0.0,
        is_causal,
        attn_mask=mask_QK,
        scale=scale,
    )
    grad_k_KHD = grad_k_HGKD.sum(1, dtype=lse_HGQ.dtype).transpose(0, 1)
    grad_v_KHD = grad_v_HGKD.sum(1, dtype=lse_HGQ.dtype).transpose(0, 1)
    return grad_q.view(q_HGQD.shape).permute(2, 0, 1, 3), grad_k_KHD, grad_v_KHD


def _heads_first(x_QHGD: torch.Tensor) -> torch.Tensor:
    return x_QHGD.permute(1, 2, 0, 3)


def _folds_groups(call: VarlenCall) -> bool:
    """Return whether every query sees every key: the query heads of a group then are further queries of one head.

    The kernel works in larger blocks the more queries it has, and its backward pass makes one gradient of the keys, not
    one for every head of the group.
    """
    return not call.causal and call.window is None


def _fold(x_HGQ: torch.Tensor, call: VarlenCall) -> torch.Tensor:
    """Return (H, G, Q, ...) as (H, 1, G * Q, ...) if the groups fold, else as it is."""
    return x_HGQ.flatten(1, 2).unsqueeze(1) if _folds_groups(call) else x_HGQ


def _keys(
    q_QHGD: torch.Tensor, k_KH1D: torch.Tensor, v_KH1D: torch.Tensor, call: VarlenCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values as (H, G, K, D), or (H, 1, K, D) if the groups fold, without a copy."""
    # The key-value heads are the kernel's batch. The query heads of a group read one key head by a stride of zero.
    groups = (-1, 1 if _folds_groups(call) else q_QHGD.shape[2], -1, -1)
    return _heads_first(k_KH1D).expand(groups), _heads_first(v_KH1D).expand(groups)


def _cpu_mask(
    call: VarlenCall, num_queries: int, num_keys: int, *, dtype: torch.dtype
) -> tuple[bool, torch.Tensor | None]:
    """Return `is_causal` for the kernel, and the mask (Q, K) of a window, 0 or -inf, which it has no option for."""
    if call.window is None:
        return call.causal, None
    # The keys end with the queries, so both count backwards from the end of the piece.
    query_Q, key_K = torch.arange(-num_queries, 0)[:, None], torch.arange(-num_keys, 0)
    visible_QK = (key_K <= query_Q) & (query_Q - key_K < call.window)
    return False, torch.zeros(visible_QK.shape, dtype=dtype).masked_fill_(~visible_QK, -torch.inf)


def _fa3_reasons(q_QHD: torch.Tensor, is_windowed: bool) -> list[str]:
    reasons = []
    if is_windowed:
        reasons.append("its versions take a window in different ways")
    if importlib.util.find_spec("flash_attn_interface") is None:
        reasons.append("flash-attention 3 (flash_attn_interface) is not installed")
    if torch.cuda.get_device_capability(q_QHD.device) != FA3_COMPUTE_CAPABILITY:
        reasons.append(f"flash-attention 3 is for compute capability {FA3_COMPUTE_CAPABILITY}")
    if torch.are_deterministic_algorithms_enabled() and q_QHD.shape[-1] > FA3_MAX_DETERMINISTIC_HEAD_DIM:
        reasons.append(f"its deterministic backward ends at head dim {FA3_MAX_DETERMINISTIC_HEAD_DIM}")
    return reasons


# FA3 is called by position, because its versions name some arguments differently, but order them alike.


def _fa3_forward(q_QHD, k_KHD, v_KHD, call, *, scale):
    q_QHD, k_KHD, v_KHD = _rows_contiguous(q_QHD, k_KHD, v_KHD)
    paging = ("page_table", "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin", "seqlens_rotary")
    arguments = {
        **{"q": q_QHD, "k": k_KHD, "v": v_KHD},
        **dict.fromkeys(("k_new", "v_new", "qv", "out")),
        **{"cu_seqlens_q": call.query_offsets_S1, "cu_seqlens_k": call.key_offsets_S1},
        **dict.fromkeys(("cu_seqlens_k_new", "seqused_q", "seqused_k")),
        **{"max_seqlen_q": call.max_query_len, "max_seqlen_k": call.max_key_len},
        **dict.fromkeys((*paging, "q_descale", "k_descale", "v_descale")),
        **{"softmax_scale": scale, "causal": call.causal},
    }
    kernels = importlib.import_module("flash_attn_interface")
    out_QHD, lse_HQ, *_ = kernels._flash_attn_forward(*arguments.values())
    return out_QHD, lse_HQ


def _fa3_backward(grad_out_QHD, q_QHD, k_KHD, v_KHD, out_QHD, lse_HQ, call, *, scale):
    grad_out_QHD, q_QHD, k_KHD, v_KHD, out_QHD = _rows_contiguous(grad_out_QHD, q_QHD, k_KHD, v_KHD, out_QHD)
    gradients = _empty_gradients(q_QHD, k_KHD, v_KHD)
    arguments = {
        **{
            "dout": grad_out_QHD,
            "q": q_QHD,
            "k": k_KHD,
            "v": v_KHD,
            "out": out_QHD,
            "softmax_lse": lse_HQ.contiguous(),
        },
        **{"cu_seqlens_q": call.query_offsets_S1, "cu_seqlens_k": call.key_offsets_S1},
        **dict.fromkeys(("sequed_q", "sequed_k")),
        **{"max_seqlen_q": call.max_query_len, "max_seqlen_k": call.max_key_len},
        **dict(zip(("dq", "dk", "dv"), gradients, strict=True)),
        **{"softmax_scale": scale, "causal": call.causal},
    }
    kernels = importlib.import_module("flash_attn_interface")
    kernels._flash_attn_backward(*arguments.values(), deterministic=torch.are_deterministic_algorithms_enabled())
    return gradients


def _fa2_reasons(_q_THD: torch.Tensor, _is_windowed: bool) -> list[str]:
    # The package flash_attn alone proves nothing, because flash-attn-4 has the same package.
    if importlib.util.find_spec("flash_attn_2_cuda") is None:
        return ["flash-attn 2 is not installed"]
    version = importlib.metadata.version("flash-attn")
    if tuple(int(part) for part in version.split(".")[:2]) < FA2_MIN_VERSION:
        return [f"flash-attn is {version}, below {'.'.join(map(str, FA2_MIN_VERSION))}"]
    return []


def _fa2_options(call: VarlenCall, *, scale: float) -> dict[str, object]:
    """Return the arguments that its forward and its backward share."""
    left, right = _window(call)
    return {
        "cu_seqlens_q": call.query_offsets_S1,
        "cu_seqlens_k": call.key_offsets_S1,
        "max_seqlen_q": call.max_query_len,
        "max_seqlen_k": call.max_key_len,
        "dropout_p": 0.0,
        "softmax_scale": scale,
        "causal": call.causal,
        "window_size_left": left,
        "window_size_right": right,
    }


def _fa2_forward(q_QHD, k_KHD, v_KHD, call, *, scale):
    kernels = importlib.import_module("flash_attn.flash_attn_interface")
    out_QHD, lse_HQ, *_ = kernels._flash_attn_varlen_forward(
        *_rows_contiguous(q_QHD, k_KHD, v_KHD), **_fa2_options(call, scale=scale)
    )
    return out_QHD, lse_HQ


def _fa2_backward(grad_out_QHD, q_QHD, k_KHD, v_KHD, out_QHD, lse_HQ, call, *, scale):
    kernels = importlib.import_module("flash_attn.flash_attn_interface")
    dq, dk, dv = _empty_gradients(q_QHD, k_KHD, v_KHD)
    kernels._flash_attn_varlen_backward(
        *_rows_contiguous(grad_out_QHD, q_QHD, k_KHD, v_KHD, out_QHD),
        lse_HQ.contiguous(),
        **{"dq": dq, "dk": dk, "dv": dv, "softcap": 0.0, "alibi_slopes": None},
        **_fa2_options(call, scale=scale),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return dq, dk, dv


def _aten_reasons(_q_THD: torch.Tensor, _is_windowed: bool) -> list[str]:
    return []


def _aten_options(call: VarlenCall, *, scale: float) -> dict[str, object]:
    """Return the arguments that its forward and its backward share."""
    left, right = _window(call)
    return {
        "cum_seq_q": call.query_offsets_S1,
        "cum_seq_k": call.key_offsets_S1,
        "max_q": call.max_query_len,
        "max_k": call.max_key_len,
        "dropout_p": 0.0,
        "is_causal": call.causal,
        "scale": scale,
        "window_size_left": left,
        "window_size_right": right,
    }


def _aten_forward(q_QHD, k_KHD, v_KHD, call, *, scale):
    out_QHD, lse_HQ, *_ = torch.ops.aten._flash_attention_forward(
        *_rows_contiguous(q_QHD, k_KHD, v_KHD), return_debug_mask=False, **_aten_options(call, scale=scale)
    )
    return out_QHD, lse_HQ


def _aten_backward(grad_out_QHD, q_QHD, k_KHD, v_KHD, out_QHD, lse_HQ, call, *, scale):
    return torch.ops.aten._flash_attention_backward(
        *_rows_contiguous(grad_out_QHD, q_QHD, k_KHD, v_KHD, out_QHD),
        lse_HQ.contiguous(),
        # The state of the random generator is read only with dropout.
        rng_state=q_QHD.new_zeros(2, dtype=torch.uint64),
        unused=q_QHD.new_empty(0),
        **_aten_options(call, scale=scale),
    )


def _window(call: VarlenCall) -> tuple[int, int]:
    """Return how many keys before and behind itself a query sees, as flash-attn counts them; -1 means no limit."""
    return (-1, -1) if call.window is None else (call.window - 1, 0)


def _rows_contiguous(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


def _empty_gradients(q_QHD: torch.Tensor, k_KHD: torch.Tensor, v_KHD: torch.Tensor) -> Gradients:
    dq_QHD, dk_KHD, dv_KHD = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_QHD, k_KHD, v_KHD))
    return dq_QHD, dk_KHD, dv_KHD


PROVIDERS = (
    VarlenProvider("CPU", _cpu_reasons, _cpu_calls, _cpu_forward, _cpu_backward, groups_heads=True),
    VarlenProvider("flash-attention 3", _fa3_reasons, few_calls, _fa3_forward, _fa3_backward),
    VarlenProvider("flash-attn 2", _fa2_reasons, few_calls, _fa2_forward, _fa2_backward),
    VarlenProvider("aten", _aten_reasons, few_calls, _aten_forward, _aten_backward),
)
"""The first that does not refuse wins. The last, aten, comes with torch and never refuses."""
