"""Tree attention on our own Triton kernels: any CUDA GPU from compute capability 8.0, deterministic.

Two custom ops, so that `torch.compile` and fake tensors see through them: the forward gives the output and the
log-sum-exp, the backward is an op of its own. The kernels and triton itself are imported with the first call. What the
kernels skip comes from `AttentionPlan.block_lists`.

Legend: T tree tokens, Hq and Hkv query and key-value heads, D head dim.
"""

import functools
import importlib
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch

from verl_tree.attention.options import ScoreOptions
from verl_tree.attention.plan import AttentionPlan
from verl_tree.attention.self_test import KernelVariant, self_test_reasons

MAX_HEAD_DIM = 256
MIN_COMPUTE_CAPABILITY = (8, 0)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LOG2_E = 1.4426950408889634
DELTA_BLOCK = 64
HOPPER = (9, 0)


class KernelConfig(NamedTuple):
    """How one kernel is compiled: tokens of a tile, warps of a program, stages of the pipeline of loads."""

    query_block: int
    key_block: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class KernelConfigs:
    """The configurations of the three kernels of one call."""

    forward: KernelConfig
    dkv: KernelConfig
    dq: KernelConfig


HOPPER_CONFIGS = {
    64: KernelConfigs(KernelConfig(128, 64, 4, 3), KernelConfig(64, 128, 8, 3), KernelConfig(128, 64, 8, 3)),
    128: KernelConfigs(KernelConfig(128, 128, 8, 2), KernelConfig(64, 128, 8, 2), KernelConfig(128, 64, 8, 3)),
    256: KernelConfigs(KernelConfig(128, 64, 8, 2), KernelConfig(32, 64, 8, 2), KernelConfig(128, 32, 8, 2)),
}
"""16-bit dtypes on compute capability 9.0, by padded head dim; 227 KB of shared memory.

Chosen from machine code, not from timings: the largest tiles whose accumulators and scores stay in 255 registers with
every product on wgmma. The next larger tile of each kernel spills (128 x 128 for `dq` and D = 128: 120 bytes a thread,
with three stages for `forward`: 128). `dkv` keeps two accumulators and spills a little: 72 bytes for D = 128, 24 for
D = 256; halving its query block to avoid that would halve the width of its products.
"""

SMALL_CONFIGS = {
    64: KernelConfigs(KernelConfig(128, 64, 4, 2), KernelConfig(64, 64, 4, 2), KernelConfig(64, 64, 4, 2)),
    128: KernelConfigs(KernelConfig(64, 64, 4, 2), KernelConfig(32, 64, 4, 2), KernelConfig(64, 32, 4, 2)),
    256: KernelConfigs(KernelConfig(64, 32, 8, 2), KernelConfig(32, 32, 8, 1), KernelConfig(32, 32, 4, 2)),
}
"""16-bit dtypes elsewhere, by padded head dim; within the 99 KB of shared memory of compute capability 8.6."""

FLOAT32_CONFIGS = {
    64: KernelConfigs(KernelConfig(32, 16, 4, 1), KernelConfig(16, 32, 4, 1), KernelConfig(32, 16, 4, 1)),
    128: KernelConfigs(KernelConfig(16, 16, 4, 1), KernelConfig(16, 16, 4, 1), KernelConfig(16, 16, 4, 1)),
    256: KernelConfigs(KernelConfig(16, 16, 4, 1), KernelConfig(16, 16, 4, 1), KernelConfig(16, 16, 4, 1)),
}
"""float32 on any device: exact products run outside of the tensor cores, so these are for checks, not for speed."""


def not_supported_reasons(
    q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, plan: AttentionPlan, *, options: ScoreOptions
) -> list[str]:
    """Says why this backend cannot serve the inputs; empty where it can.

    CPU tensors are served in Triton's interpreter, by who sets `TRITON_INTERPRET=1` before triton is first imported.
    On a GPU the first inputs of a kind run the self-test, which compiles the kernels.
    """
    reasons = options.not_served_reasons()
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
    return self_test_reasons("triton", triton_attention, KernelVariant.of(q_THD, k_THD))


def triton_attention(
    q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, plan: AttentionPlan, *, options: ScoreOptions
) -> torch.Tensor:
    """Attention under the tree mask, differentiable once.

    Args:
        q_THD: (T, Hq, D) queries on a CUDA device; any strides.
        k_THD: (T, Hkv, D) keys; Hkv divides Hq.
        v_THD: (T, Hkv, D) values.
        plan: Plan of the pack, on the same device.
        options: Scale of the scores.

    Returns:
        (T, Hq, D), dtype of `q_THD`, contiguous.
    """
    scale = options.scale
    if scale <= 0:  # the running maximum is taken before the factor
        q_THD, scale = q_THD * scale, 1.0
    configs = choose_configs(q_THD)
    forward, dkv, dq = (
        plan.block_lists(query_block=config.query_block, key_block=config.key_block)
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
    )
    return out_THD


def choose_configs(q_THD: torch.Tensor) -> KernelConfigs:
    """The configurations for the dtype, head dim and device of the queries."""
    is_hopper = q_THD.device.type == "cuda" and torch.cuda.get_device_capability(q_THD.device) == HOPPER
    table = FLOAT32_CONFIGS if q_THD.dtype == torch.float32 else HOPPER_CONFIGS if is_hopper else SMALL_CONFIGS
    return table[max(64, padded_dim(q_THD.shape[-1]))]


def padded_dim(head_dim: int) -> int:
    """The power of two that a tile's head dim is padded to; a matrix product needs at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


@torch.library.custom_op(
    "verl_tree::tree_attention_triton",
    mutates_args=(),
    schema="(Tensor q_THD, Tensor k_THD, Tensor v_THD, Tensor subtree_end_T, Tensor[] forward_rows, Tensor[] dkv_rows, "
    "Tensor[] dq_rows, int[] configs, float scale) -> (Tensor, Tensor)",
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

    Returns:
        The output (T, Hq, D) and its log-sum-exp, float32 (Hq, T); contiguous.
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
            *(q_THD.shape[0], rows_R4.shape[0], num_heads, num_heads // num_kv_heads, scale * LOG2_E),
            **_constants(q_THD, config),
        )
    return out_THD, lse_HT


@torch.library.custom_op(
    "verl_tree::tree_attention_triton_backward",
    mutates_args=(),
    schema="(Tensor grad_out_THD, Tensor q_THD, Tensor k_THD, Tensor v_THD, Tensor out_THD, Tensor lse_HT, "
    "Tensor subtree_end_T, Tensor[] dkv_rows, Tensor[] dq_rows, int[] configs, float scale) "
    "-> (Tensor, Tensor, Tensor)",
)
def tree_attention_triton_backward(
    grad_out_THD: torch.Tensor,
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    out_THD: torch.Tensor,
    lse_HT: torch.Tensor,
    subtree_end_T: torch.Tensor,
    dkv_rows: Sequence[torch.Tensor],
    dq_rows: Sequence[torch.Tensor],
    configs: Sequence[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The backward pass; arguments as for `tree_attention_triton`, whose results are `out_THD` and `lse_HT`.

    Returns:
        Gradients of queries, keys and values, of their shape and dtype; contiguous.
    """
    grad_q_THD, grad_k_THD, grad_v_THD = _empty_gradients(q_THD, k_THD, v_THD)
    grad_out_THD, q_THD, k_THD, v_THD = (_readable(x) for x in (grad_out_THD, q_THD, k_THD, v_THD))
    dkv, dq = KernelConfig(*configs[4:8]), KernelConfig(*configs[8:])
    (num_tokens, num_heads, head_dim), num_kv_heads = q_THD.shape, k_THD.shape[1]
    delta_HT = torch.empty_like(lse_HT)
    inputs = (q_THD, k_THD, v_THD, grad_out_THD, lse_HT, delta_HT, subtree_end_T)
    strides = (*q_THD.stride(), *k_THD.stride(), *v_THD.stride(), *grad_out_THD.stride())
    scales = (num_heads // num_kv_heads, scale, scale * LOG2_E)
    with torch.cuda.device_of(q_THD):
        _kernels().delta_kernel[(-(-num_tokens // DELTA_BLOCK) * num_heads,)](
            *(out_THD, grad_out_THD, delta_HT, *grad_out_THD.stride(), num_tokens, num_heads),
            BLOCK=DELTA_BLOCK,
            DIM=head_dim,
            PADDED_DIM=padded_dim(head_dim),
        )
        _kernels().dkv_kernel[(dkv_rows[0].shape[0] * num_kv_heads,)](
            *(*inputs, grad_k_THD, grad_v_THD, *dkv_rows, *strides),
            *(num_tokens, dkv_rows[0].shape[0], num_kv_heads, *scales),
            **_constants(q_THD, dkv),
        )
        _kernels().dq_kernel[(dq_rows[0].shape[0] * num_heads,)](
            *(*inputs, grad_q_THD, *dq_rows, *strides),
            *(num_tokens, dq_rows[0].shape[0], num_heads, *scales),
            **_constants(q_THD, dq),
        )
    return grad_q_THD, grad_k_THD, grad_v_THD


@tree_attention_triton.register_fake
def _(q_THD, k_THD, v_THD, subtree_end_T, forward_rows, dkv_rows, dq_rows, configs, scale):
    return _empty_results(q_THD)


@tree_attention_triton_backward.register_fake
def _(grad_out_THD, q_THD, k_THD, v_THD, out_THD, lse_HT, subtree_end_T, dkv_rows, dq_rows, configs, scale):
    return _empty_gradients(q_THD, k_THD, v_THD)


def _save_for_backward(ctx, inputs, output):
    q_THD, k_THD, v_THD, subtree_end_T, _, dkv_rows, dq_rows, ctx.configs, ctx.scale = inputs
    ctx.save_for_backward(q_THD, k_THD, v_THD, *output, subtree_end_T, *dkv_rows, *dq_rows)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out_THD, _grad_lse_HT):
    *tensors, dkv_rows, dkv_indices, dq_rows, dq_indices = ctx.saved_tensors
    gradients = tree_attention_triton_backward(
        grad_out_THD, *tensors, [dkv_rows, dkv_indices], [dq_rows, dq_indices], ctx.configs, ctx.scale
    )
    return *gradients, None, [None, None], [None, None], [None, None], None, None


tree_attention_triton.register_autograd(_backward, setup_context=_save_for_backward)


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _kernels() -> ModuleType:
    # Not at the top: triton is an extra, and TRITON_INTERPRET counts only before its first import.
    return importlib.import_module("verl_tree.attention.triton_kernels")


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
