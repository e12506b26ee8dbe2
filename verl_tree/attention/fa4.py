"""Tree attention on flash-attn-4's Hopper kernels: TMA, warp-specialised wgmma, block sparsity.

flash-attn-4 is a beta that compiles its kernels with three other packages, and each release of each may change what
comes out. So only combinations that were tried are used (`TESTED_COMBINATIONS`), nothing of it is imported until a CUDA
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
from verl_tree.attention.refusals import HALF_DTYPES, dtype_reasons
from verl_tree.attention.self_test import KernelVariant, self_test_reasons
from verl_tree.tree.plan import AttentionPlan
from verl_tree.tree.transfer import to_device

TESTED_COMBINATIONS = (
    {
        "flash-attn-4": "4.0.0b36",
        "nvidia-cutlass-dsl": "4.7.1",
        "quack-kernels": "0.6.5",
        "apache-tvm-ffi": "0.1.11",
    },
    {
        "flash-attn-4": "4.0.0b36",
        "nvidia-cutlass-dsl": "4.8.1",
        "quack-kernels": "0.6.5",
        "apache-tvm-ffi": "0.1.15.post2",
    },
)
"""Versions that compiled together for every head dim, forward and backward. The first is the extra `fa4`: vLLM 0.31.0
pins the same."""

COMPUTE_CAPABILITY = (9, 0)
BLOCK_LENS = {64: (128, 128), 96: (128, 128), 128: (128, 128), 256: (128, 64)}
"""Queries and keys of a tile, in both passes, by head dim: what the kernels accept."""

ONE_BLOCK_LEN = 128
"""Up to so many queries are one block of every head dim."""


class BlockTables(NamedTuple):
    """Visible tiles of a pack (`BlockRows.tables`): `keys` for the forward pass, `queries` for the backward pass."""

    keys: tuple[torch.Tensor, ...]
    queries: tuple[torch.Tensor, ...]

    @classmethod
    def of_plan(cls, plan: AttentionPlan, *, head_dim: int) -> "BlockTables":
        """Return the tables of a pack, found once per plan and size of tiles."""
        query_block, key_block = BLOCK_LENS[head_dim]

        def find(plan: AttentionPlan) -> BlockTables:
            lists = BlockLists.of_plan(plan, query_block=query_block, key_block=key_block, on_host=True)
            tables = to_device((*lists.by_query.tables(), *lists.by_key.tables()), plan.subtree_end_T.device)
            return cls(tables[:4], tables[4:])

        return plan.once(("fa4 tables", key_block), find)


def not_supported_reasons(
    q_QHD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    plan: AttentionPlan,
    *,
    options: ScoreOptions,
    heads_first: bool = False,
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
    if plan.num_queries <= ONE_BLOCK_LEN:
        reasons.append(f"{plan.num_queries} queries are one block, for which there are other kernels, not self-tested")
    if torch.are_deterministic_algorithms_enabled():
        reasons.append("deterministic algorithms are asked for; the block-sparse backward of SM90 adds in any order")
    reasons += installation_reasons()
    if reasons:
        return reasons
    # The self-test compiles the kernels, which takes about ten seconds.
    attend = functools.partial(fa4_attention, heads_first=heads_first)
    return self_test_reasons(f"fa4{', heads first' if heads_first else ''}", attend, KernelVariant.of(q_QHD, k_THD))


def fa4_attention(
    q_QHD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    plan: AttentionPlan,
    *,
    options: ScoreOptions,
    heads_first: bool = False,
) -> torch.Tensor:
    """Compute attention as `AttentionBackend.attend`, without options.

    `heads_first` is another order of the backward pass's programs, for benchmarks to compare
    (`fa4_kernels.HeadsFirstScheduler`).
    """
    return _Fa4Attention.apply(q_QHD, k_THD, v_THD, plan, options.scale, heads_first)


class _Fa4Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_QHD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        plan: AttentionPlan,
        scale: float,
        heads_first: bool,
    ) -> torch.Tensor:
        # A broadcast dimension (stride 0) would select another kernel, which no self-test has run.
        q_QHD, k_THD, v_THD = (_without_broadcast(each) for each in (q_QHD, k_THD, v_THD))
        head_dim = q_QHD.shape[-1]
        out_QHD, lse_1HQ = _kernels().forward(
            q_QHD,
            k_THD,
            v_THD,
            plan.subtree_end_T,
            key_tables=BlockTables.of_plan(plan, head_dim=head_dim).keys,
            block_lens=BLOCK_LENS[head_dim],
            scale=scale,
        )
        ctx.save_for_backward(q_QHD, k_THD, v_THD, out_QHD, lse_1HQ)
        ctx.plan, ctx.scale, ctx.heads_first = plan, scale, heads_first
        return out_QHD

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _backward(ctx, *grad_outputs)


@once_differentiable
def _backward(ctx: Any, grad_out_QHD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    head_dim = grad_out_QHD.shape[-1]
    gradients = _kernels().backward(
        _without_broadcast(grad_out_QHD),
        *ctx.saved_tensors,
        ctx.plan.subtree_end_T,
        query_tables=BlockTables.of_plan(ctx.plan, head_dim=head_dim).queries,
        block_lens=BLOCK_LENS[head_dim],
        scale=ctx.scale,
        heads_first=ctx.heads_first,
    )
    return *gradients, None, None, None


def _without_broadcast(x_THD: torch.Tensor) -> torch.Tensor:
    return x_THD.contiguous() if 0 in x_THD.stride() else x_THD


@functools.cache
def _kernels() -> ModuleType:
    # Not imported at the top, because it needs the extra `fa4` and takes seconds.
    return importlib.import_module("verl_tree.attention.fa4_kernels")


def _input_reasons(q_QHD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> list[str]:
    reasons = dtype_reasons(q_QHD, k_THD, v_THD, dtypes=HALF_DTYPES)
    if q_QHD.shape[-1] not in BLOCK_LENS or v_THD.shape[-1] != q_QHD.shape[-1]:
        dims = sorted({q_QHD.shape[-1], v_THD.shape[-1]})
        reasons.append(
            f"head dim {' and '.join(map(str, dims))} is none of {tuple(BLOCK_LENS)}, the same for q, k and v"
        )
    return reasons


@functools.cache
def installation_reasons() -> tuple[str, ...]:
    """Return why the kernels cannot be imported; empty if they can. The answer is cached."""
    installed = {name: _installed_version(name) for name in TESTED_COMBINATIONS[0]}
    if installed not in TESTED_COMBINATIONS:
        tested = " or ".join(_words(combination) for combination in TESTED_COMBINATIONS)
        return (f"installed is {_words(installed)}, a combination that was not tested; install {tested}",)
    try:
        _kernels()
    except (ImportError, OSError) as error:
        return (f"flash-attn-4 cannot be imported: {error}",)
    return ()


def _installed_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _words(versions: dict[str, str]) -> str:
    return "(" + ", ".join(f"{name} {version}" for name, version in versions.items()) + ")"
