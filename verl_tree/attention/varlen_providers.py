"""Flash kernels for sequences of varying lengths on CUDA, behind one pair of functions: FA3, FA2, PyTorch's own.

Each provider imports its package with the first call only. `forward` gives the log-sum-exp besides the output, and
`backward` takes both from outside, which is all that merging needs. Signatures were read in

- FA3: `flash_attn_interface` of flash-attention 3.0.0 (hopper/, commit 0251105a) and of 3.0.0.b1 as tagged v2.8.3.
  The names of some arguments differ between the two and their order does not, so they are passed by position.
- FA2: `flash_attn.flash_attn_interface` of flash-attn 2.7.0, 2.8.3 and 2.8.4; before 2.7 the forward pass returned
  eight values.
- aten: `torch.ops.aten._flash_attention_forward` and `_backward` of torch 2.13; `torch.nn.attention.varlen` calls the
  first likewise.

None of them takes tensors whose last dimension is not contiguous.

Legend: Q queries and K keys of a call, Hq and Hkv query and key-value heads, D head dim.
"""

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from verl_tree.attention.pieces import VarlenCall

FA3_COMPUTE_CAPABILITY = (9, 0)
FA3_MAX_DETERMINISTIC_HEAD_DIM = 192
FA2_MIN_VERSION = (2, 7)


@dataclass(frozen=True, slots=True)
class VarlenProvider:
    """One pair of kernels.

    Attributes:
        name: What logs call it.
        not_supported_reasons: `not_supported_reasons(q_THD, *, is_windowed) -> list[str]`, empty where it is installed
            and serves the device, head dim and window, and deterministically if `torch.use_deterministic_algorithms` is
            on.
        forward: `forward(q_QHD, k_KHD, v_KHD, call, *, scale) -> (out_QHD, lse_HQ)`, the log-sum-exp of a segment's
            scores in float32 (or wider).
        backward: `backward(grad_out_QHD, q_QHD, k_KHD, v_KHD, out_QHD, lse_HQ, call, *, scale)` -> gradients of q, k
            and v for probabilities `exp(score - lse)` and `delta = sum(out * grad_out)`.
        max_segment_len: Queries of a segment with a window, where the kernel needs a mask in memory; None: any number.
    """

    name: str
    not_supported_reasons: Callable[[torch.Tensor], list[str]]
    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    max_segment_len: int | None = None


def _lengths(call: VarlenCall) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    return call.query_offsets_S1, call.key_offsets_S1, call.max_query_len, call.max_key_len


def _window(call: VarlenCall) -> tuple[int, int]:
    """Keys before and behind a query's own, as flash-attn counts them; -1: no limit."""
    return (-1, -1) if call.window is None else (call.window - 1, 0)


def _rows_contiguous(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


def _fa3_reasons(q_THD: torch.Tensor, *, is_windowed: bool) -> list[str]:
    reasons = []
    if is_windowed:
        reasons.append("its versions take a window in different ways")
    if importlib.util.find_spec("flash_attn_interface") is None:
        reasons.append("flash-attention 3 (flash_attn_interface) is not installed")
    if torch.cuda.get_device_capability(q_THD.device) != FA3_COMPUTE_CAPABILITY:
        reasons.append(f"flash-attention 3 is for compute capability {FA3_COMPUTE_CAPABILITY}")
    if torch.are_deterministic_algorithms_enabled() and q_THD.shape[-1] > FA3_MAX_DETERMINISTIC_HEAD_DIM:
        reasons.append(f"its deterministic backward ends at head dim {FA3_MAX_DETERMINISTIC_HEAD_DIM}")
    return reasons


def _fa3_forward(q_QHD, k_KHD, v_KHD, call, *, scale):
    query_offsets_S1, key_offsets_S1, max_query_len, max_key_len = _lengths(call)
    cache_arguments, paging_and_scales = [None] * 4, [None] * 9
    out_QHD, lse_HQ, *_ = importlib.import_module("flash_attn_interface")._flash_attn_forward(
        *(*_rows_contiguous(q_QHD, k_KHD, v_KHD), *cache_arguments),
        *(query_offsets_S1, key_offsets_S1, None, None, None, max_query_len, max_key_len),
        *(*paging_and_scales, scale, call.causal),
    )
    return out_QHD, lse_HQ


def _fa3_backward(grad_out_QHD, q_QHD, k_KHD, v_KHD, out_QHD, lse_HQ, call, *, scale):
    query_offsets_S1, key_offsets_S1, max_query_len, max_key_len = _lengths(call)
    inputs = _rows_contiguous(grad_out_QHD, q_QHD, k_KHD, v_KHD, out_QHD)
    gradients = _empty_gradients(q_QHD, k_KHD, v_KHD)
    importlib.import_module("flash_attn_interface")._flash_attn_backward(
        *(*inputs, lse_HQ, query_offsets_S1, key_offsets_S1, None, None, max_query_len, max_key_len),
        *(*gradients, scale, call.causal),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return gradients


def _fa2_reasons(q_THD: torch.Tensor, *, is_windowed: bool) -> list[str]:
    # The package flash_attn alone proves nothing: flash-attn-4 shares it.
    if importlib.util.find_spec("flash_attn_2_cuda") is None:
        return ["flash-attn 2 is not installed"]
    version = importlib.metadata.version("flash-attn")
    if tuple(int(part) for part in version.split(".")[:2]) < FA2_MIN_VERSION:
        return [f"flash-attn is {version}, below {'.'.join(map(str, FA2_MIN_VERSION))}"]
    return []


def _fa2_forward(q_QHD, k_KHD, v_KHD, call, *, scale):
    out_QHD, lse_HQ, *_ = importlib.import_module("flash_attn.flash_attn_interface")._flash_attn_varlen_forward(
        *_rows_contiguous(q_QHD, k_KHD, v_KHD), *_lengths(call), 0.0, scale, call.causal, *_window(call)
    )
    return out_QHD, lse_HQ


def _fa2_backward(grad_out_QHD, q_QHD, k_KHD, v_KHD, out_QHD, lse_HQ, call, *, scale):
    inputs = _rows_contiguous(grad_out_QHD, q_QHD, k_KHD, v_KHD, out_QHD)
    gradients = _empty_gradients(q_QHD, k_KHD, v_KHD)
    importlib.import_module("flash_attn.flash_attn_interface")._flash_attn_varlen_backward(
        *(*inputs, lse_HQ, *gradients, *_lengths(call), 0.0, scale, call.causal, *_window(call)),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return gradients


def _aten_reasons(q_THD: torch.Tensor, *, is_windowed: bool) -> list[str]:
    return []


def _aten_forward(q_QHD, k_KHD, v_KHD, call, *, scale):
    left, right = _window(call)
    out_QHD, lse_HQ, *_ = torch.ops.aten._flash_attention_forward(
        *(*_rows_contiguous(q_QHD, k_KHD, v_KHD), *_lengths(call), 0.0, call.causal, False),
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )
    return out_QHD, lse_HQ


def _aten_backward(grad_out_QHD, q_QHD, k_KHD, v_KHD, out_QHD, lse_HQ, call, *, scale):
    inputs = _rows_contiguous(grad_out_QHD, q_QHD, k_KHD, v_KHD, out_QHD)
    # The state of the random generator is read with dropout only.
    no_state, unused = q_QHD.new_zeros(2, dtype=torch.uint64), q_QHD.new_empty(0)
    left, right = _window(call)
    return torch.ops.aten._flash_attention_backward(
        *(*inputs, lse_HQ, *_lengths(call), 0.0, call.causal, no_state, unused),
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )


def _empty_gradients(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs)


PROVIDERS = (
    VarlenProvider("flash-attention 3", _fa3_reasons, _fa3_forward, _fa3_backward),
    VarlenProvider("flash-attn 2", _fa2_reasons, _fa2_forward, _fa2_backward),
    VarlenProvider("aten", _aten_reasons, _aten_forward, _aten_backward),
)
"""The first that is installed and serves wins; aten comes with torch and has no reason of its own to refuse."""
