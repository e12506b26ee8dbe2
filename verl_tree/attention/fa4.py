"""Tree attention on flash-attn-4's Hopper kernels: TMA, warp-specialised wgmma, block sparsity.

flash-attn-4 is a beta that needs the exact packages of the extra `fa4`. So nothing of it is imported until a CUDA
tensor asks, and a kernel is used only after its self-test on the device (`verl_tree.attention.self_test`).

Legend: T tokens, the last Q of them queries, Hq and Hkv query and key-value heads, D head dim.
"""

import functools
import importlib
import importlib.metadata
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from verl_tree.attention.blocks import BlockLists
from verl_tree.attention.options import ScoreOptions
from verl_tree.attention.plan import AttentionPlan
from verl_tree.attention.refusals import HALF_DTYPES, dtype_reasons
from verl_tree.attention.self_test import KernelVariant, self_test_reasons

PINNED_VERSIONS = {
    "flash-attn-4": "4.0.0b36",
    "nvidia-cutlass-dsl": "4.8.1",
    "quack-kernels": "0.6.5",
    "apache-tvm-ffi": "0.1.15.post2",
}
"""Versions that were compiled and tested together. The extra `fa4` in pyproject.toml pins the same."""

COMPUTE_CAPABILITY = (9, 0)
HEAD_DIMS = (64, 96, 128)
BLOCK_LEN = 128
"""Queries and keys of a tile in both passes. The kernels of all head dims accept it."""


class BlockTables(NamedTuple):
    """Visible tiles of a pack (`BlockRows.tables`): `keys` for the forward pass, `queries` for the backward pass."""

    keys: tuple[torch.Tensor, ...]
    queries: tuple[torch.Tensor, ...]

    @classmethod
    def of_plan(cls, plan: AttentionPlan) -> "BlockTables":
        """Return the tables of a pack, found once per plan."""

        def find(plan: AttentionPlan) -> BlockTables:
            lists = BlockLists.of_plan(plan, query_block=BLOCK_LEN, key_block=BLOCK_LEN)
            return cls(lists.by_query.tables(), lists.by_key.tables())

        return plan.once("fa4 tables", find)


def not_supported_reasons(
    q_QHD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, plan: AttentionPlan, *, options: ScoreOptions
) -> list[str]:
    """Return why this backend cannot serve the inputs; empty if it can."""
    if q_QHD.device.type != "cuda":
        where = f"tensors are on {q_QHD.device}, the kernels run on CUDA only"
        return [where, *_input_reasons(q_QHD, k_THD, v_THD), *options.not_served_reasons()]
    reasons = options.not_served_reasons()
    capability = torch.cuda.get_device_capability(q_QHD.device)
    if capability != COMPUTE_CAPABILITY:
        reasons.append(f"compute capability {capability} is not {COMPUTE_CAPABILITY} (Hopper)")
    reasons += _input_reasons(q_QHD, k_THD, v_THD)
    if plan.num_queries <= BLOCK_LEN:
        reasons.append(f"{plan.num_queries} queries are one block, for which there are other kernels, not self-tested")
    if torch.are_deterministic_algorithms_enabled():
        reasons.append("deterministic algorithms are asked for; the block-sparse backward of SM90 adds in any order")
    reasons += installation_reasons()
    # The self-test compiles the kernels, which takes about ten seconds.
    return reasons or self_test_reasons("fa4", fa4_attention, KernelVariant.of(q_QHD, k_THD))


def fa4_attention(
    q_QHD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, plan: AttentionPlan, *, options: ScoreOptions
) -> torch.Tensor:
    """Compute attention as `AttentionBackend.attend`, without options."""
    return _Fa4Attention.apply(q_QHD, k_THD, v_THD, plan, options.scale)


class _Fa4Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_QHD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, plan: AttentionPlan, scale: float
    ) -> torch.Tensor:
        # A broadcast dimension (stride 0) would select another kernel, which no self-test has run.
        q_QHD, k_THD, v_THD = (_without_broadcast(each) for each in (q_QHD, k_THD, v_THD))
        tables = BlockTables.of_plan(plan)
        out_QHD, lse_1HQ = _kernels().forward(
            q_QHD, k_THD, v_THD, plan.subtree_end_T, key_tables=tables.keys, block_len=BLOCK_LEN, scale=scale
        )
        ctx.save_for_backward(q_QHD, k_THD, v_THD, out_QHD, lse_1HQ)
        ctx.plan, ctx.scale = plan, scale
        return out_QHD

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _backward(ctx, *grad_outputs)


@once_differentiable
def _backward(ctx: Any, grad_out_QHD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    gradients = _kernels().backward(
        _without_broadcast(grad_out_QHD),
        *ctx.saved_tensors,
        ctx.plan.subtree_end_T,
        query_tables=BlockTables.of_plan(ctx.plan).queries,
        block_len=BLOCK_LEN,
        scale=ctx.scale,
    )
    return *gradients, None, None


def _without_broadcast(x_THD: torch.Tensor) -> torch.Tensor:
    return x_THD.contiguous() if 0 in x_THD.stride() else x_THD


@functools.cache
def _kernels() -> ModuleType:
    # Not imported at the top, because it needs the extra `fa4` and takes seconds.
    return importlib.import_module("verl_tree.attention.fa4_kernels")


def _input_reasons(q_QHD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> list[str]:
    reasons = dtype_reasons(q_QHD, k_THD, v_THD, dtypes=HALF_DTYPES)
    if q_QHD.shape[-1] not in HEAD_DIMS or v_THD.shape[-1] != q_QHD.shape[-1]:
        dims = sorted({q_QHD.shape[-1], v_THD.shape[-1]})
        reasons.append(f"head dim {' and '.join(map(str, dims))} is none of {HEAD_DIMS}, the same for q, k and v")
    return reasons


@functools.cache
def installation_reasons() -> tuple[str, ...]:
    """Return why the kernels cannot be imported; empty if they can. The answer is cached."""
    wrong = []
    for name, pinned in PINNED_VERSIONS.items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{name} {pinned} is missing")
            continue
        if installed != pinned:
            wrong.append(f"{name} is {installed}, not {pinned}")
    if wrong:
        return (f"the extra fa4 is not installed as pinned: {', '.join(wrong)}",)
    try:
        _kernels()
    except (ImportError, OSError) as error:
        return (f"flash-attn-4 cannot be imported: {error}",)
    return ()
