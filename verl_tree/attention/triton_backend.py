"""Tree attention on our own Triton kernels: any CUDA GPU from compute capability 8.0, deterministic.

Two custom ops, so that `torch.compile` and fake tensors see through them: the forward gives the output and the
log-sum-exp, the backward is an op of its own. The kernels and triton itself are imported with the first call. What the
kernels skip comes from `AttentionPlan.block_lists`. Sliding windows, softcapped scores and attention sinks are compiled
in where a layer asks for them (`triton_kernels`).

Legend: T tree tokens, Hq and Hkv query and key-value heads, D head dim.
"""

import functools
import importlib
import importlib.util
import os
from collections.abc import Sequence
from types import ModuleType

import torch

from verl_tree.attention.options import ScoreOptions
from verl_tree.attention.plan import AttentionPlan
from verl_tree.attention.self_test import KernelVariant, self_test_reasons
from verl_tree.attention.sinks import sink_gradient_of_delta
from verl_tree.attention.triton_configs import KernelConfig, choose_configs, padded_dim

MAX_HEAD_DIM = 256
MIN_COMPUTE_CAPABILITY = (8, 0)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LOG2_E = 1.4426950408889634
DELTA_BLOCK = 64


def not_supported_reasons(
    q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, plan: AttentionPlan, *, options: ScoreOptions
) -> list[str]:
    """Says why this backend cannot serve the inputs; empty where it can.

    CPU tensors are served in Triton's interpreter, by who sets `TRITON_INTERPRET=1` before triton is first imported.
    On a GPU the first inputs of a kind run the self-test, which compiles the kernels.
    """
    reasons = []
    if q_THD.device.type == "cuda":
        capability = torch.cuda.get_device_capability(q_THD.device)
        if torch.version.hip is not None:
            reasons.append("the device is an AMD GPU, for which no configuration is chosen")
        elif capability < MIN_COMPUTE_CAPABILITY:
            reasons.append(f"compute capability {capability} is below {MIN_COMPUTE_CAPABILITY}")
    elif q_THD.device.type != "cpu" or os.environ.get("TRITON_INTERPRET") != "1":
        reasons.append(f"tensors are on {q_THD.device}, the kernels run on CUDA only")
    if not _is_installed():
        reasons.append("triton is not installed; install triton (with a CUDA build of torch it comes along)")
    if q_THD.dtype not in DTYPES or not q_THD.dtype == k_THD.dtype == v_THD.dtype:
        dtypes = sorted({str(each.dtype) for each in (q_THD, k_THD, v_THD)})
        reasons.append(f"dtype {' and '.join(dtypes)} is none of bfloat16, float16, float32 throughout")
    if q_THD.shape[-1] > MAX_HEAD_DIM:
        reasons.append(f"head dim {q_THD.shape[-1]} is above {MAX_HEAD_DIM}")
    if v_THD.shape[-1] != q_THD.shape[-1]:
        reasons.append(f"value head dim {v_THD.shape[-1]} differs from the query head dim {q_THD.shape[-1]}")
    if reasons or q_THD.device.type != "cuda":
        return reasons
    kernel = KernelVariant.of(
        q_THD,
        k_THD,
        is_windowed=options.window is not None,
        is_capped=options.softcap is not None,
        has_sinks=options.sinks_H is not None,
    )
    return self_test_reasons("triton", triton_attention, kernel)


def triton_attention(
    q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, plan: AttentionPlan, *, options: ScoreOptions
) -> torch.Tensor:
    """Attention under the tree mask, differentiable once.

    Args:
        q_THD: (T, Hq, D) queries on a CUDA device; any strides.
        k_THD: (T, Hkv, D) keys; Hkv divides Hq.
        v_THD: (T, Hkv, D) values.
        plan: Plan of the pack, on the same device.
        options: Scale, window, softcap and sinks of the scores.

    Returns:
        (T, Hq, D), dtype of `q_THD`, contiguous.
    """
    scale = options.scale
    if scale <= 0:  # the running maximum is taken before the factor
        q_THD, scale = q_THD * scale, 1.0
    configs = choose_configs(q_THD, options=options)
    forward, dkv, dq = (
        plan.block_lists(query_block=config.query_block, key_block=config.key_block, window=options.window)
        for config in (configs.forward, configs.dkv, configs.dq)
    )
    out_THD, _ = tree_attention_triton(
        q_THD,
        k_THD,
        v_THD,
        plan.subtree_end_T,
        [forward.by_query.rows_R4, forward.by_query.indices],
        [dkv.by_key.rows_R4, dkv.by_key.indices],
        [dq.by_query.rows_R4, dq.by_query.indices],
        [*configs.forward, *configs.dkv, *configs.dq],
        float(scale),
        None if options.sinks_H is None else options.sinks_H.float().contiguous(),
        None if options.window is None else plan.position_T,
        options.window,
        options.softcap,
    )
    return out_THD


@torch.library.custom_op(
    "verl_tree::tree_attention_triton",
    mutates_args=(),
    schema="(Tensor q_THD, Tensor k_THD, Tensor v_THD, Tensor subtree_end_T, Tensor[] forward_rows, Tensor[] dkv_rows, "
    "Tensor[] dq_rows, int[] configs, float scale, Tensor? sinks_H, Tensor? position_T, int? window, float? softcap) "
    "-> (Tensor, Tensor)",
)
def tree_attention_triton(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    subtree_end_T: torch.Tensor,
    forward_rows: Sequence[torch.Tensor],
    dkv_rows: Sequence[torch.Tensor],
    dq_rows: Sequence[torch.Tensor],
    configs: Sequence[int],
    scale: float,
    sinks_H: torch.Tensor | None,
    position_T: torch.Tensor | None,
    window: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward pass.

    Args:
        q_THD: (T, Hq, D) queries.
        k_THD: (T, Hkv, D) keys.
        v_THD: (T, Hkv, D) values.
        subtree_end_T: int32 (T,).
        forward_rows: `rows_R4` and `indices` of the tiles of the forward kernel, by query.
        dkv_rows: The same for the kernel of the gradients of keys and values, by key.
        dq_rows: The same for the kernel of the gradient of the queries, by query.
        configs: Three `KernelConfig`, one after the other: forward, dkv, dq.
        scale: Factor on the scores, positive.
        sinks_H: float32 (Hq,) logits of the sinks, or None.
        position_T: int32 (T,) position of each token on its path; None where there is no window.
        window: A query sees the keys fewer than `window` positions before it, or None. The tiles are to be those of it.
        softcap: Bound of the scores, or None.

    Returns:
        The output (T, Hq, D) and its log-sum-exp, float32 (Hq, T), sinks included; contiguous.
    """
    out_THD, lse_HT = _empty_results(q_THD)
    q_THD, k_THD, v_THD = (_readable(x) for x in (q_THD, k_THD, v_THD))
    config = KernelConfig(*configs[:4])
    num_heads, num_kv_heads = q_THD.shape[1], k_THD.shape[1]
    rows_R4, indices = forward_rows
    with torch.cuda.device_of(q_THD):
        _kernels().forward_kernel[(rows_R4.shape[0] * num_heads,)](
            *(q_THD, k_THD, v_THD, subtree_end_T, out_THD, lse_HT, rows_R4, indices),
            *(*q_THD.stride(), *k_THD.stride(), *v_THD.stride()),
            *(q_THD.shape[0], rows_R4.shape[0], num_heads, num_heads // num_kv_heads),
            *(*_score_arguments(scale, position_T, window, softcap), sinks_H),
            **_constants(q_THD, config),
        )
    return out_THD, lse_HT


@torch.library.custom_op(
    "verl_tree::tree_attention_triton_backward",
    mutates_args=(),
    schema="(Tensor grad_out_THD, Tensor q_THD, Tensor k_THD, Tensor v_THD, Tensor out_THD, Tensor lse_HT, "
    "Tensor subtree_end_T, Tensor? position_T, Tensor[] dkv_rows, Tensor[] dq_rows, int[] configs, float scale, "
    "int? window, float? softcap) -> (Tensor, Tensor, Tensor, Tensor)",
)
def tree_attention_triton_backward(
    grad_out_THD: torch.Tensor,
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    out_THD: torch.Tensor,
    lse_HT: torch.Tensor,
    subtree_end_T: torch.Tensor,
    position_T: torch.Tensor | None,
    dkv_rows: Sequence[torch.Tensor],
    dq_rows: Sequence[torch.Tensor],
    configs: Sequence[int],
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The backward pass; arguments as for `tree_attention_triton`, whose results are `out_THD` and `lse_HT`.

    Returns:
        Gradients of queries, keys and values, of their shape and dtype, and float32 (Hq, T) `sum(out * grad_out)`, from
        which the gradient of the sinks follows; contiguous.
    """
    grad_q_THD, grad_k_THD, grad_v_THD = _empty_gradients(q_THD, k_THD, v_THD)
    grad_out_THD, q_THD, k_THD, v_THD = (_readable(x) for x in (grad_out_THD, q_THD, k_THD, v_THD))
    dkv, dq = KernelConfig(*configs[4:8]), KernelConfig(*configs[8:])
    (num_tokens, num_heads, head_dim), num_kv_heads = q_THD.shape, k_THD.shape[1]
    delta_HT = torch.empty_like(lse_HT)
    inputs = (q_THD, k_THD, v_THD, grad_out_THD, lse_HT, delta_HT, subtree_end_T)
    strides = (*q_THD.stride(), *k_THD.stride(), *v_THD.stride(), *grad_out_THD.stride())
    scores = (num_heads // num_kv_heads, scale, *_score_arguments(scale, position_T, window, softcap))
    with torch.cuda.device_of(q_THD):
        _kernels().delta_kernel[(-(-num_tokens // DELTA_BLOCK) * num_heads,)](
            *(out_THD, grad_out_THD, delta_HT, *grad_out_THD.stride(), num_tokens, num_heads),
            BLOCK=DELTA_BLOCK,
            DIM=head_dim,
            PADDED_DIM=padded_dim(head_dim),
        )
        _kernels().dkv_kernel[(dkv_rows[0].shape[0] * num_kv_heads,)](
            *(*inputs, grad_k_THD, grad_v_THD, *dkv_rows, *strides),
            *(num_tokens, dkv_rows[0].shape[0], num_kv_heads, *scores),
            **_constants(q_THD, dkv),
        )
        _kernels().dq_kernel[(dq_rows[0].shape[0] * num_heads,)](
            *(*inputs, grad_q_THD, *dq_rows, *strides),
            *(num_tokens, dq_rows[0].shape[0], num_heads, *scores),
            **_constants(q_THD, dq),
        )
    return grad_q_THD, grad_k_THD, grad_v_THD, delta_HT


@tree_attention_triton.register_fake
def _(q_THD, *_args):
    return _empty_results(q_THD)


@tree_attention_triton_backward.register_fake
def _(grad_out_THD, q_THD, k_THD, v_THD, out_THD, lse_HT, *_args):
    return *_empty_gradients(q_THD, k_THD, v_THD), torch.empty_like(lse_HT)


def _save_for_backward(ctx, inputs, output):
    q_THD, k_THD, v_THD, subtree_end_T, _, dkv_rows, dq_rows, *numbers, sinks_H, position_T, window, softcap = inputs
    ctx.configs, ctx.scale, ctx.window, ctx.softcap = *numbers, window, softcap
    ctx.save_for_backward(sinks_H, q_THD, k_THD, v_THD, *output, subtree_end_T, position_T, *dkv_rows, *dq_rows)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out_THD, _grad_lse_HT):
    sinks_H, *tensors, dkv_rows, dkv_indices, dq_rows, dq_indices = ctx.saved_tensors
    rows = [dkv_rows, dkv_indices], [dq_rows, dq_indices]
    *gradients, delta_HT = tree_attention_triton_backward(
        grad_out_THD, *tensors, *rows, ctx.configs, ctx.scale, ctx.window, ctx.softcap
    )
    lse_HT = tensors[4]
    grad_sinks_H = None if sinks_H is None else sink_gradient_of_delta(delta_HT, lse_HT, sinks_H[:, None])
    return *gradients, None, [None, None], [None, None], [None, None], None, None, grad_sinks_H, None, None, None


tree_attention_triton.register_autograd(_backward, setup_context=_save_for_backward)


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _kernels() -> ModuleType:
    # Not at the top: triton is an extra, and TRITON_INTERPRET counts only before its first import.
    return importlib.import_module("verl_tree.attention.triton_kernels")


def _score_arguments(
    scale: float, position_T: torch.Tensor | None, window: int | None, softcap: float | None
) -> tuple[float, torch.Tensor | None, int | None, float | None]:
    """`scale_log2`, `positions`, `window` and `scale_tanh` of a kernel."""
    if softcap is None:
        return scale * LOG2_E, position_T, window, None
    return softcap * LOG2_E, position_T, window, scale / softcap


def _constants(q_THD: torch.Tensor, config: KernelConfig) -> dict[str, object]:
    return {
        "QUERY_BLOCK": config.query_block,
        "KEY_BLOCK": config.key_block,
        "DIM": q_THD.shape[2],
        "PADDED_DIM": padded_dim(q_THD.shape[2]),
        "PRECISION": "ieee",
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def _readable(x_THD: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy where its strides are too large for the kernels' int32 offsets inside a tile."""
    return x_THD if MAX_HEAD_DIM * (x_THD.stride(0) + x_THD.stride(2)) < 2**31 else x_THD.contiguous()


def _empty_results(q_THD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_heads, _ = q_THD.shape
    return (
        torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device),
        torch.empty((num_heads, num_tokens), dtype=torch.float32, device=q_THD.device),
    )


def _empty_gradients(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs)
