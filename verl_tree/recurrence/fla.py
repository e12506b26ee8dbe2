"""The gated delta rule on CUDA by flash-linear-attention, one call for each level of the tree.

It serves where it is installed and has agreed with torch on the device (`self_test`). It holds a float32 state for each
node besides those of its chunks, so nodes take memory, which the capacity counts in tokens. So it serves packs whose
nodes have at least a chunk of tokens on average: they have no more nodes than chunks, and states go by tokens. Packs of
shorter nodes would leave most of a chunk empty, too, and are computed by torch, where siblings share chunks.

Legend: T tokens, H heads, K key dim, V value dim.
"""

import functools
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from verl_tree.recurrence.chunks import TreeChunks
from verl_tree.recurrence.delta_rule import tree_gated_delta_rule
from verl_tree.recurrence.levels import TreeLevels, VarlenKernel, rule_by_levels
from verl_tree.tree.kernel_test import (
    Results,
    disagreements,
    errors_and_limits,
    reasons_of_first_run,
    results,
    tell_once,
)
from verl_tree.tree.plan import AttentionPlan

logger = logging.getLogger(__name__)

CHUNK_SIZE = 64
"""Tokens of a chunk of the kernels."""

WORST_NODE_LEN = CHUNK_SIZE + 1
"""Tokens of nodes that take the most memory per token: one state for a node and one for each of two chunks."""

DTYPES = (torch.bfloat16, torch.float16)

RUN_LENS = (100, 70, 65, 1, 64, 130, 1, 37, 3, 1, 2)
RUN_ENDS = (300, 236, 235, 236, 300, 430, 474, 472, 471, 472, 474)
"""Tokens and `subtree_end` of the nodes of the self-test: three trees, of three levels, one and three. Nodes have one
token, less than a chunk, a chunk, one token more, and several chunks."""

LIMIT = 4.0
"""Allowed error, as a multiple of torch's in the same dtype. In Triton's interpreter float16 has up to 1.4 times."""


@dataclass(frozen=True, slots=True)
class DeltaRuleVariant:
    """The properties of inputs that select the kernels. Each combination is compiled and tested by itself."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    key_dim: int
    value_dim: int


def fla_gated_delta_rule(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    *,
    g_TH: Tensor,
    beta_TH: Tensor,
    levels: TreeLevels,
    normalizes: bool = True,
) -> Tensor:
    """Compute the gated delta rule as `tree_gated_delta_rule` does, (T, H, V); differentiable."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]

    with torch.autocast(q_THK.device.type, enabled=False):
        return rule_by_levels(
            cast("VarlenKernel", chunk_gated_delta_rule),
            q_THK,
            k_THK,
            v_THV,
            g_TH=g_TH.float(),
            beta_TH=beta_TH,
            levels=levels,
            normalizes=normalizes,
        )


def serves(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    *,
    beta_TH: Tensor,
    plan: AttentionPlan,
) -> bool:
    """Return whether flash-linear-attention can serve, and on CUDA log once for each reason why it does or does not."""
    if q_THK.device.type != "cuda":
        return False
    if plan.context is not None:
        reasons = ["other calls read states in the middle of nodes, and it returns those after nodes only"]
    else:
        reasons = not_supported_reasons(q_THK, k_THK, v_THV, beta_TH=beta_TH, plan=plan)
    why = "; ".join(reasons)
    if why:
        torch_serves = "recurrent layers: torch, as flash-linear-attention does not serve: %s"
        tell_once(logger, logging.WARNING, why, torch_serves, why)
    else:
        tell_once(logger, logging.INFO, why, "recurrent layers: flash-linear-attention, level by level")
    return not reasons


def not_supported_reasons(
    q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, *, beta_TH: Tensor, plan: AttentionPlan
) -> list[str]:
    """Return why flash-linear-attention cannot serve; empty if it can. The first call of a kind tests it."""
    reasons = installation_reasons()
    if reasons:
        return reasons
    dtypes = {each.dtype for each in (q_THK, k_THK, v_THV, beta_TH)}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        found = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        return [f"dtype {found} is none of bfloat16, float16 throughout"]
    if len(plan.runs.start_R) * CHUNK_SIZE > len(q_THK):
        return [f"packs like this one, with fewer than {CHUNK_SIZE} tokens per node, would keep many states"]
    variant = DeltaRuleVariant(q_THK.device, q_THK.dtype, q_THK.shape[1], q_THK.shape[2], v_THV.shape[2])
    return reasons_of_first_run("flash-linear-attention", variant, partial(self_test, fla_gated_delta_rule, variant))


@functools.cache
def installation_reasons() -> list[str]:
    """Return why the package cannot be imported; empty if it is there."""
    if importlib.util.find_spec("fla") is not None:
        return []
    return ["it is not installed; install the extra fla (pip install 'verl-tree[fla]')"]


def self_test(rule: Callable[..., Tensor], variant: DeltaRuleVariant) -> list[str]:
    """Return how a rule by levels and its gradients disagree with torch's; empty if they agree."""
    return disagreements(compare(rule, variant, np.repeat(RUN_ENDS, RUN_LENS)), where="self-test")


def compare(
    rule: Callable[..., Tensor], variant: DeltaRuleVariant, subtree_end_T: np.ndarray
) -> dict[str, tuple[float, float]]:
    """Return the error of a rule by levels, and the allowed one, for its output and each gradient on a forest.

    A row is all heads of a token.
    """
    plan = AttentionPlan.from_subtree_end(subtree_end_T, device=variant.device)
    levels, chunks = TreeLevels.of_plan(plan, chunk_size=CHUNK_SIZE), TreeChunks.of_plan(plan, size=CHUNK_SIZE)
    inputs, grad_out_THV = inputs_of(variant, num_tokens=len(subtree_end_T))
    of_torch = partial(tree_gated_delta_rule, chunks=chunks)

    def run(rule: Callable[..., Tensor], inputs: list[Tensor]) -> Results:
        def function(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
            return rule(q, k, v, g_TH=g, beta_TH=beta)

        found = results(function, inputs, grad_out_THV, names=("q", "k", "v", "g", "beta"))
        return {name: each.flatten(1) for name, each in found.items()}

    # The current device of a new thread is the first one.
    with torch.cuda.device_of(grad_out_THV):
        want, plain = run(of_torch, [each.double() for each in inputs]), run(of_torch, inputs)
        got = run(partial(rule, levels=levels), inputs)
        return errors_and_limits([got], want=want, plain=plain, limits=dict.fromkeys(want, LIMIT))


def inputs_of(variant: DeltaRuleVariant, *, num_tokens: int) -> tuple[list[Tensor], Tensor]:
    """Draw q, k, v, log decays, betas and the gradient of the output; some decays leave nothing of the state."""
    generator = torch.Generator().manual_seed(0)

    def draw(*dims: int) -> Tensor:
        return torch.randn(num_tokens, variant.num_heads, *dims, generator=generator)

    key_dim, value_dim = variant.key_dim, variant.value_dim
    tensors = [draw(key_dim), draw(key_dim), draw(value_dim), draw().sigmoid(), draw(value_dim)]
    q, k, v, beta, grad_out_THV = (each.to(variant.device, variant.dtype) for each in tensors)
    g_TH = -draw().exp() * 0.3
    g_TH[::17] = -20.0
    return [q, k, v, g_TH.to(variant.device), beta], grad_out_THV
