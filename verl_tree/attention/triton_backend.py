"""Tree attention on our own Triton kernels: deterministic, on any CUDA GPU from compute capability 8.0.

`BlockLists` says which tiles the kernels skip, `KeyRows` how the gradients of keys and values are shared out. Sliding
windows, softcaps and sinks are compiled in where a layer asks for them. The kernels are called in `triton_ops.py`.

Legend: T tokens, the last Q of them queries, Hq and Hkv query and key-value heads, D head dim.
"""

import functools
import importlib.util
import os

import torch

from verl_tree.attention.blocks import BlockLists
from verl_tree.attention.options import ScoreOptions
from verl_tree.attention.refusals import HALF_DTYPES, dtype_reasons, gpu_reasons, value_dim_reasons
from verl_tree.attention.row_cuts import KeyRows
from verl_tree.attention.self_test import KernelVariant, self_test_reasons
from verl_tree.attention.triton_configs import choose_configs, num_processors
from verl_tree.attention.triton_ops import MAX_HEAD_DIM, OpInputs, tree_attention_triton
from verl_tree.tree.plan import AttentionPlan

DTYPES = (*HALF_DTYPES, torch.float32)

INTERPRETED_DTYPES = (torch.float16, torch.float32)
"""Triton's interpreter multiplies the bits of bfloat16 as integers, and says nothing."""


def not_supported_reasons(
    q_QHD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, _plan: AttentionPlan, *, options: ScoreOptions
) -> list[str]:
    """Return why this backend cannot serve the inputs; empty if it can.

    On a GPU the first inputs of a kind run the self-test, which compiles the kernels. On a CPU Triton's interpreter
    serves, if `TRITON_INTERPRET=1` is set before triton is first imported.
    """
    reasons = []
    device = q_QHD.device
    if device.type == "cuda":
        reasons += gpu_reasons(device)
    elif device.type != "cpu" or os.environ.get("TRITON_INTERPRET") != "1":
        reasons.append(f"tensors are on {device}, the kernels run on CUDA only")
    if not _is_installed():
        reasons.append("triton is not installed; install triton (with a CUDA build of torch it comes along)")
    reasons += dtype_reasons(q_QHD, k_THD, v_THD, dtypes=INTERPRETED_DTYPES if device.type == "cpu" else DTYPES)
    if q_QHD.shape[-1] > MAX_HEAD_DIM:
        reasons.append(f"head dim {q_QHD.shape[-1]} is above {MAX_HEAD_DIM}")
    reasons += value_dim_reasons(q_QHD, v_THD)
    if reasons or device.type != "cuda":
        return reasons
    kernel = KernelVariant.of(
        q_QHD,
        k_THD,
        is_windowed=options.window is not None,
        is_capped=options.softcap is not None,
        has_sinks=options.sinks_H is not None,
    )
    return self_test_reasons("triton", triton_attention, kernel)


def triton_attention(
    q_QHD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, plan: AttentionPlan, *, options: ScoreOptions
) -> torch.Tensor:
    """Compute attention as `AttentionBackend.attend`; inputs may have any strides, the output is contiguous."""
    scale = options.scale
    if scale <= 0:  # the kernel takes the maximum before it scales
        q_QHD, scale = q_QHD * scale, 1.0
    configs = choose_configs(q_QHD, options=options)
    forward, dq = (
        BlockLists.of_plan(plan, query_block=config.query_block, key_block=config.key_block, window=options.window)
        for config in (configs.forward, configs.dq)
    )
    num_kv_heads = k_THD.shape[1]
    dkv = KeyRows.of_plan(
        plan,
        query_block=configs.dkv.query_block,
        key_block=configs.dkv.key_block,
        window=options.window,
        num_groups=q_QHD.shape[1] // num_kv_heads,
        num_kv_heads=num_kv_heads,
        num_processors=num_processors(q_QHD.device),
    )
    inputs = OpInputs(
        q_QHD=q_QHD,
        k_THD=k_THD,
        v_THD=v_THD,
        subtree_end_T=plan.subtree_end_T,
        forward_rows=list(forward.by_query),
        dkv_rows=[dkv.rows_R5, dkv.indices, dkv.cuts_C3],
        dq_rows=list(dq.by_query),
        configs=[*configs.forward, *configs.dkv, *configs.dq],
        num_slots=dkv.num_slots,
        scale=float(scale),
        sinks_H=None if options.sinks_H is None else options.sinks_H.float().contiguous(),
        position_T=None if options.window is None else plan.position_T,
        window=options.window,
        softcap=options.softcap,
    )
    out_QHD, _ = tree_attention_triton(*inputs)
    return out_QHD


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
