"""What attention.py times: the backends of tree attention, and the best kernels for what a flat trainer computes.

- `fa4`, `triton`, `varlen`: the backends of `verl_tree.attention`, on the tree. `fa4 heads first`: the other order of
  fa4's backward pass.
- `... flat`: sequence packing, every trajectory by itself, on flash-attn-4's and on PyTorch's own varlen kernels.
- `... causal`: one causal sequence with as many visible pairs as the tree, on flash-attn-4, cuDNN and PyTorch's own
  kernel: what a kernel without any tree could reach.
- `flex`: PyTorch's FlexAttention with the tree mask, compiled for each shape.

All take grouped heads as they are. Legend: T tokens, H heads, D head dim.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flat_attention import KERNELS
from sections import longest_context

from verl_tree.attention import BACKENDS, AttentionPlan, ScoreOptions, fa4
from verl_tree.tree import TokenForest
from verl_tree.tree.layout import TreeLayout

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

FLEX = "flex"
FLEX_SHAPES = ("GRPO star 1k + 16 x (1-4k)", "MCTS, nodes of 30-100")
"""Each shape is compiled anew, which takes longer than to time all the other contenders."""


class RefusedError(Exception):
    """A contender cannot run here; says why."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One forest: its rows, its layout and its plan on the device."""

    rows: list[np.ndarray]
    layout: TreeLayout
    plan: AttentionPlan

    @classmethod
    def of(cls, rows: list[np.ndarray], *, device: torch.device) -> "Shape":
        """Build layout and plan of the rows."""
        layout = TreeLayout.from_forest(TokenForest.from_sequences(rows), device=device)
        return cls(rows, layout, AttentionPlan.from_layout(layout))

    def flat(self) -> AttentionPlan:
        """Return the plan of the rows one after another, without any sharing."""
        ends_T = np.concatenate(
            [
                np.full(len(row), end, dtype=np.int32)
                for row, end in zip(self.rows, np.cumsum([len(row) for row in self.rows]), strict=True)
            ]
        )
        return AttentionPlan.from_subtree_end(ends_T, device=self.plan.subtree_end_T.device)

    def causal(self) -> AttentionPlan:
        """Return the plan of one sequence with as many visible pairs."""
        num_tokens = int(np.sqrt(2 * self.plan.num_visible_pairs))
        ends_T = np.full(num_tokens, num_tokens, dtype=np.int32)
        return AttentionPlan.from_subtree_end(ends_T, device=self.plan.subtree_end_T.device)

    def section(self) -> AttentionPlan:
        """Return the plan of the section with the longest context, of sections of a quarter of the tokens."""
        return longest_context(self.layout, capacity=-(-self.layout.num_tokens // 4))

    def pack_of_section(self) -> AttentionPlan:
        """Return the plan of context and section in one pack."""
        return AttentionPlan.from_subtree_end(self.section().subtree_end_T)


@dataclass(frozen=True, slots=True)
class Contender:
    """A kernel: `plan_of(shape)` says what it computes, `call_of(plan)` makes the call, or raises a `RefusedError`."""

    plan_of: Callable[[Shape], AttentionPlan]
    call_of: Callable[[AttentionPlan], Call]


def backend_call(plan: AttentionPlan, *, backend: str, **keywords: Any) -> Call:
    """Call a backend of tree attention."""
    if keywords:
        assert backend == "fa4"
        refuses = functools.partial(fa4.not_supported_reasons, **keywords)
        attend = functools.partial(fa4.fa4_attention, **keywords)
    else:
        refuses, attend = BACKENDS[backend].not_supported_reasons, BACKENDS[backend].attend

    def call(q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> torch.Tensor:
        options = ScoreOptions(scale=q_THD.shape[-1] ** -0.5)
        if "served" not in known:
            reasons = refuses(q_THD, k_THD, v_THD, plan, options=options)
            if reasons:
                raise RefusedError("; ".join(reasons))
            known["served"] = True
        return attend(q_THD, k_THD, v_THD, plan, options=options)

    known: dict[str, bool] = {}
    return call


def fa4_call(plan: AttentionPlan) -> Call:
    """Call flash-attn-4's own causal attention: its varlen kernel for several sequences, else the plain one."""
    _need_cuda(plan)
    if fa4.installation_reasons():
        raise RefusedError("; ".join(fa4.installation_reasons()))
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    bounds, longest = _bounds(plan)

    def one(q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> torch.Tensor:
        out, *_ = flash_attn_func(q_THD[None], k_THD[None], v_THD[None], causal=True)
        return out[0]

    def several(q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> torch.Tensor:
        lens = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": longest, "max_seqlen_k": longest}
        out, *_ = flash_attn_varlen_func(q_THD, k_THD, v_THD, causal=True, **lens)
        return out

    return one if len(bounds) == 2 else several


def cudnn_call(plan: AttentionPlan) -> Call:
    """Call cuDNN's causal attention."""
    _need_cuda(plan)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def call(q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> torch.Tensor:
        heads_first = [each.transpose(0, 1)[None] for each in (q_THD, k_THD, v_THD)]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    return call


def aten_call(plan: AttentionPlan) -> Call:
    """Call PyTorch's own flash kernel for sequences of varying lengths; on a CPU SDPA, one sequence after another."""
    bounds, longest = _bounds(plan)

    def varlen(q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> torch.Tensor:
        qkv = (q_THD, k_THD, v_THD)
        return torch.ops.aten._flash_attention_forward(*qkv, bounds, bounds, longest, longest, 0.0, True, False)[0]

    def loop(q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> torch.Tensor:
        lens_S = tuple(bounds.diff().tolist())
        return KERNELS["sdpa"](q_THD, k_THD, v_THD, lens_S, bounds, scale=q_THD.shape[-1] ** -0.5)

    return varlen if bounds.device.type == "cuda" else loop


def flex_call(plan: AttentionPlan) -> Call:
    """Call FlexAttention with the tree mask, compiled for the plan."""
    _need_cuda(plan)  # it has no backward pass on a CPU
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    end_T, num_tokens = plan.subtree_end_T, plan.num_tokens

    def visible(_batch: Any, _head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (query < end_T[key])

    mask = create_block_mask(visible, None, None, num_tokens, num_tokens, device=end_T.device, _compile=True)
    compiled = torch.compile(flex_attention, dynamic=False)

    def call(q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> torch.Tensor:
        heads_first = [each.transpose(0, 1)[None] for each in (q_THD, k_THD, v_THD)]
        return compiled(*heads_first, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    return call


def _bounds(plan: AttentionPlan) -> tuple[torch.Tensor, int]:
    """Return where the sequences of a plan without branches begin, and the length of the longest."""
    bounds = np.append(plan.runs.start_R, plan.num_tokens).astype(np.int32)
    return torch.from_numpy(bounds).to(plan.subtree_end_T.device), int(np.diff(bounds).max())


def _need_cuda(plan: AttentionPlan) -> None:
    if plan.subtree_end_T.device.type != "cuda":
        raise RefusedError("it needs a GPU")


def _tree(shape: Shape) -> AttentionPlan:
    return shape.plan


CONTENDERS: dict[str, Contender] = {
    "fa4": Contender(_tree, functools.partial(backend_call, backend="fa4")),
    "triton": Contender(_tree, functools.partial(backend_call, backend="triton")),
    "fa4 flat": Contender(Shape.flat, fa4_call),
    "fa4 causal": Contender(Shape.causal, fa4_call),
    "cudnn causal": Contender(Shape.causal, cudnn_call),
    "fa4 heads first": Contender(_tree, functools.partial(backend_call, backend="fa4", heads_first=True)),
    "varlen": Contender(_tree, functools.partial(backend_call, backend="varlen")),
    "aten flat": Contender(Shape.flat, aten_call),
    "aten causal": Contender(Shape.causal, aten_call),
    FLEX: Contender(_tree, flex_call),
}
"""The most telling first."""

WITH_SECTIONS = ("fa4", "triton", "varlen")
"""Contenders that also run a section behind its context, and context and section in one pack."""
