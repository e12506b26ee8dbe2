"""The custom ops that call the Triton kernels, so that `torch.compile` and fake tensors can trace them.

Legend: T tokens, the last Q of them queries, Hq and Hkv query and key-value heads, D head dim.
"""

import functools
import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch

from verl_tree.attention.sinks import sink_gradient_of_delta
from verl_tree.attention.triton_configs import KernelConfig, padded_dim

MAX_HEAD_DIM = 256
LOG2_E = 1.4426950408889634
DELTA_BLOCK = 64
ADDED_KEYS = 16
"""Keys of a program that adds parts: few, so that the parts of one block are added by many programs."""


class OpInputs(NamedTuple):
    """Arguments of the op `tree_attention_triton`, and in the backward pass their gradients."""

    q_QHD: torch.Tensor | None  # The tokens before the queries are context: T - Q
    k_THD: torch.Tensor | None
    v_THD: torch.Tensor | None
    subtree_end_T: torch.Tensor | None
    forward_rows: Sequence[torch.Tensor | None]  # Fields of `BlockRows`: the tiles of the forward kernel, by query
    dkv_rows: Sequence[torch.Tensor | None]  # Tensors of `KeyRows`, for the gradients of keys and values
    dq_rows: Sequence[torch.Tensor | None]  # Those of `BlockRows` for the gradient of the queries, by query
    configs: Sequence[int] | None  # Fields of the `KernelConfig` of forward, dkv and dq, one after the other
    num_slots: int | None  # That of `KeyRows`
    scale: float | None  # Factor on the scores, positive
    sinks_H: torch.Tensor | None  # float32 (Hq,) logits of the sinks, or None
    position_T: torch.Tensor | None  # None if there is no window
    window: int | None  # The tiles must be found for the same window
    softcap: float | None


@torch.library.custom_op(
    "verl_tree::tree_attention_triton",
    mutates_args=(),
    schema="(Tensor q_QHD, Tensor k_THD, Tensor v_THD, Tensor subtree_end_T, Tensor[] forward_rows, Tensor[] dkv_rows, "
    "Tensor[] dq_rows, int[] configs, int num_slots, float scale, Tensor? sinks_H, Tensor? position_T, int? window, "
    "float? softcap) "
    "-> (Tensor, Tensor)",
)
def tree_attention_triton(
    q_QHD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    subtree_end_T: torch.Tensor,
    forward_rows: Sequence[torch.Tensor],
    _dkv_rows: Sequence[torch.Tensor],
    _dq_rows: Sequence[torch.Tensor],
    configs: Sequence[int],
    _num_slots: int,
    scale: float,
    sinks_H: torch.Tensor | None,
    position_T: torch.Tensor | None,
    window: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the forward pass; the arguments are those of `OpInputs`.

    The results are the output (Q, Hq, D) and its log-sum-exp, float32 (Hq, Q), sinks included; both contiguous.
    """
    out_QHD, lse_HQ = _empty_results(q_QHD)
    q_QHD, k_THD, v_THD = (_readable(x) for x in (q_QHD, k_THD, v_THD))
    num_heads = q_QHD.shape[1]
    rows_R4, indices = forward_rows
    num_rows = len(rows_R4)
    with torch.cuda.device_of(q_QHD):
        _kernels().forward_kernel[(num_rows * num_heads,)](
            q=q_QHD,
            k=k_THD,
            v=v_THD,
            subtree_end=subtree_end_T,
            out=out_QHD,
            lse=lse_HQ,
            rows=rows_R4,
            indices=indices,
            num_tokens=len(k_THD),
            num_context=len(k_THD) - len(q_QHD),
            num_rows=num_rows,
            num_heads=num_heads,
            num_groups=num_heads // k_THD.shape[1],
            sinks=sinks_H,
            **_strides(q=q_QHD, k=k_THD, v=v_THD),
            **_score_arguments(scale, position_T, window, softcap),
            **_constants(q_QHD, KernelConfig(*configs[:4])),
        )
    return out_QHD, lse_HQ


@torch.library.custom_op(
    "verl_tree::tree_attention_triton_backward",
    mutates_args=(),
    schema="(Tensor grad_out_QHD, Tensor q_QHD, Tensor k_THD, Tensor v_THD, Tensor out_QHD, Tensor lse_HQ, "
    "Tensor subtree_end_T, Tensor? position_T, Tensor[] dkv_rows, Tensor[] dq_rows, int[] configs, int num_slots, "
    "float scale, int? window, float? softcap) -> (Tensor, Tensor, Tensor, Tensor)",
)
def tree_attention_triton_backward(
    grad_out_QHD: torch.Tensor,
    q_QHD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    out_QHD: torch.Tensor,
    lse_HQ: torch.Tensor,
    subtree_end_T: torch.Tensor,
    position_T: torch.Tensor | None,
    dkv_rows: Sequence[torch.Tensor],
    dq_rows: Sequence[torch.Tensor],
    configs: Sequence[int],
    num_slots: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run the backward pass; the arguments are those of `OpInputs` and the results of `tree_attention_triton`.

    The results are the gradients of queries, keys and values, and `sum(out * grad_out)`, float32 (Hq, Q), from which
    the gradient of the sinks follows; all contiguous.
    """
    grad_q_QHD, grad_k_THD, grad_v_THD = _empty_gradients(q_QHD, k_THD, v_THD)
    grad_out_QHD, q_QHD, k_THD, v_THD = (_readable(x) for x in (grad_out_QHD, q_QHD, k_THD, v_THD))
    dkv, dq = KernelConfig(*configs[4:8]), KernelConfig(*configs[8:])
    (num_queries, num_heads, head_dim), (num_tokens, num_kv_heads, _) = q_QHD.shape, k_THD.shape
    rows_R5, dkv_indices, cuts_C3 = dkv_rows
    num_dq_rows = len(dq_rows[0])
    parts = lse_HQ.new_empty((num_slots, num_kv_heads, 2, dkv.key_block, head_dim))
    delta_HQ = torch.empty_like(lse_HQ)
    # The arguments of both gradient kernels.
    shared = {
        "q": q_QHD,
        "k": k_THD,
        "v": v_THD,
        "grad_out": grad_out_QHD,
        "lse": lse_HQ,
        "delta": delta_HQ,
        "subtree_end": subtree_end_T,
        "num_tokens": num_tokens,
        "num_context": num_tokens - num_queries,
        "num_groups": num_heads // num_kv_heads,
        "scale": scale,
        **_strides(q=q_QHD, k=k_THD, v=v_THD, o=grad_out_QHD),
        **_score_arguments(scale, position_T, window, softcap),
    }
    with torch.cuda.device_of(q_QHD):
        _kernels().delta_kernel[(-(-num_queries // DELTA_BLOCK) * num_heads,)](
            out=out_QHD,
            grad_out=grad_out_QHD,
            delta=delta_HQ,
            num_queries=num_queries,
            num_heads=num_heads,
            BLOCK=DELTA_BLOCK,
            DIM=head_dim,
            PADDED_DIM=padded_dim(head_dim),
            **_strides(o=grad_out_QHD),
        )
        _key_kernels().dkv_kernel[(len(rows_R5) * num_kv_heads,)](
            dk=grad_k_THD,
            dv=grad_v_THD,
            parts=parts,
            rows=rows_R5,
            indices=dkv_indices,
            num_kv_heads=num_kv_heads,
            **shared,
            **_constants(q_QHD, dkv),
        )
        if num_slots > 0:
            _key_kernels().add_parts_kernel[(len(cuts_C3) * num_kv_heads * (dkv.key_block // ADDED_KEYS),)](
                parts=parts,
                cuts=cuts_C3,
                dk=grad_k_THD,
                dv=grad_v_THD,
                num_tokens=num_tokens,
                num_kv_heads=num_kv_heads,
                scale=scale,
                KEY_BLOCK=dkv.key_block,
                BLOCK=ADDED_KEYS,
                DIM=head_dim,
                PADDED_DIM=padded_dim(head_dim),
            )
        _kernels().dq_kernel[(num_dq_rows * num_heads,)](
            dq=grad_q_QHD,
            rows=dq_rows[0],
            indices=dq_rows[1],
            num_rows=num_dq_rows,
            num_heads=num_heads,
            **shared,
            **_constants(q_QHD, dq),
        )
    return grad_q_QHD, grad_k_THD, grad_v_THD, delta_HQ


@tree_attention_triton.register_fake
def _(q_QHD: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty_results(q_QHD)


@tree_attention_triton_backward.register_fake
def _(
    _grad_out_THD: torch.Tensor,
    q_QHD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    _out_THD: torch.Tensor,
    lse_HQ: torch.Tensor,
    *_: object,
) -> tuple[torch.Tensor, ...]:
    return *_empty_gradients(q_QHD, k_THD, v_THD), torch.empty_like(lse_HQ)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    given = OpInputs(*inputs)
    out_QHD, lse_HQ = output
    ctx.numbers = {name: getattr(given, name) for name in ("configs", "num_slots", "scale", "window", "softcap")}
    ctx.save_for_backward(
        *(given.q_QHD, given.k_THD, given.v_THD, out_QHD, lse_HQ, given.subtree_end_T, given.position_T),
        *(given.sinks_H, *given.dkv_rows, *given.dq_rows),
    )
    ctx.mark_non_differentiable(lse_HQ)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out_QHD: torch.Tensor, _grad_lse_HQ: None) -> OpInputs:
    *tensors, sinks_H, rows_R5, dkv_indices, cuts_C3, dq_rows_R4, dq_indices = ctx.saved_tensors
    grad_q_QHD, grad_k_THD, grad_v_THD, delta_HQ = tree_attention_triton_backward(
        grad_out_QHD, *tensors, [rows_R5, dkv_indices, cuts_C3], [dq_rows_R4, dq_indices], **ctx.numbers
    )
    lse_HQ = tensors[4]
    return OpInputs(
        q_QHD=grad_q_QHD,
        k_THD=grad_k_THD,
        v_THD=grad_v_THD,
        subtree_end_T=None,
        forward_rows=[None, None],
        dkv_rows=[None, None, None],
        dq_rows=[None, None],
        configs=None,
        num_slots=None,
        scale=None,
        sinks_H=None if sinks_H is None else sink_gradient_of_delta(delta_HQ, lse_HQ, sinks_H[:, None]),
        position_T=None,
        window=None,
        softcap=None,
    )


tree_attention_triton.register_autograd(_backward, setup_context=_save_for_backward)


@functools.cache
def _kernels() -> ModuleType:
    # Not imported at the top, because triton is an extra and reads TRITON_INTERPRET at its first import.
    return importlib.import_module("verl_tree.attention.triton_kernels")


@functools.cache
def _key_kernels() -> ModuleType:
    return importlib.import_module("verl_tree.attention.triton_key_kernels")


def _strides(**tensors: torch.Tensor) -> dict[str, int]:
    """Return strides of (tokens, H, D) tensors by the kernels' names: `stride_qt`, `stride_qh`, `stride_qd` for `q`."""
    return {
        f"stride_{name}{dim}": x_THD.stride(index) for name, x_THD in tensors.items() for index, dim in enumerate("thd")
    }


def _score_arguments(
    scale: float, position_T: torch.Tensor | None, window: int | None, softcap: float | None
) -> dict[str, object]:
    """Return the kernels' arguments for the scores. With a softcap, `scale_log2` is made of the cap, not the scale."""
    return {
        "scale_log2": (scale if softcap is None else softcap) * LOG2_E,
        "positions": position_T,
        "window": window,
        "scale_tanh": None if softcap is None else scale / softcap,
    }


def _constants(q_QHD: torch.Tensor, config: KernelConfig) -> dict[str, object]:
    return {
        "QUERY_BLOCK": config.query_block,
        "KEY_BLOCK": config.key_block,
        "DIM": q_QHD.shape[2],
        "PADDED_DIM": padded_dim(q_QHD.shape[2]),
        "PRECISION": "ieee",
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def _readable(x_THD: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy if its strides are too large for the kernels' int32 offsets inside a tile."""
    return x_THD if MAX_HEAD_DIM * (x_THD.stride(0) + x_THD.stride(2)) < 2**31 else x_THD.contiguous()


def _empty_results(q_QHD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_queries, num_heads, _ = q_QHD.shape
    return (
        torch.empty(q_QHD.shape, dtype=q_QHD.dtype, device=q_QHD.device),
        torch.empty((num_heads, num_queries), dtype=torch.float32, device=q_QHD.device),
    )


def _empty_gradients(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs)
