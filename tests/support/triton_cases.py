"""Random forests, inputs and block sizes for the Triton kernels, and the errors of their results against float64."""

import dataclasses

import attention_cases
import numpy as np
import torch
from attention_cases import Section
from tree_cases import layout_of, random_sequences

from verl_tree.attention import AttentionPlan, ScoreOptions
from verl_tree.attention.triton_configs import KernelConfig, KernelConfigs

TOLERANCE = 5e-6
MAX_TILES = 60
"""Tiles of one case over the three kernels: a tile takes tens of milliseconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One random forest with inputs and configurations."""

    plan: AttentionPlan
    configs: KernelConfigs
    inputs: tuple[torch.Tensor, ...]  # q, k, v and the gradient of the output, float32
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks_H: torch.Tensor | None = None  # float32


def draw_layout(rng, *, num_tokens):
    """Draw a forest of at least `num_tokens` tokens."""
    sequences = []
    while not sequences or layout_of(sequences).num_tokens < num_tokens:
        mean_len = int(rng.integers(1, 2 + num_tokens // 2))
        sequences += random_sequences(rng, num_sequences=int(rng.integers(1, 8)), mean_len=mean_len)
    return layout_of(sequences)


def draw_plan(rng, *, num_tokens):
    """Return the first `num_tokens` tokens of a random forest in DFS preorder: any prefix of a forest is one."""
    ends = draw_layout(rng, num_tokens=num_tokens).subtree_end_T.numpy()[:num_tokens]
    return AttentionPlan.from_subtree_end(np.minimum(ends, num_tokens))


def draw_section_plan(rng, *, num_tokens):
    """Return a section of a random forest behind its context, together `num_tokens` tokens at most."""
    layout = draw_layout(rng, num_tokens=num_tokens)
    start = int(rng.choice(np.flatnonzero(layout.position_T.numpy() < num_tokens)))
    end = min(start + num_tokens - int(layout.position_T[start]), layout.num_tokens)
    return Section.of_layout(layout, start=start, end=end).plan()


def draw_configs(rng, *, num_tokens, num_heads):
    """Draw block sizes of the three kernels, often unequal, and so small that some tiles are skipped."""

    def draw():
        sizes = [(q, k) for q in (16, 32, 64, 128, 256) for k in (16, 32, 64, 128, 256)]
        tiles = {(q, k): num_heads * -(-num_tokens // q) * (-(-num_tokens // k) + 1) / 2 for q, k in sizes}
        fitting = [size for size in sizes if tiles[size] <= MAX_TILES / 3] or [(256, 256)]
        finest = sorted(fitting, key=tiles.get)[-4:]
        query_block, key_block = finest[rng.integers(len(finest))]
        return KernelConfig(query_block, key_block, 4, 1)

    return KernelConfigs(draw(), draw(), draw())


def draw_inputs(rng, *, num_tokens, num_groups, num_kv_heads, head_dim, num_context=0):
    """Draw inputs in the memory orders (rows, H, D), (H, rows, D) and (rows, D, H)."""
    inputs = []
    queries, keys = (num_tokens - num_context, num_groups * num_kv_heads), (num_tokens, num_kv_heads)
    for shape in (queries, keys, keys, queries):
        x = torch.from_numpy(rng.standard_normal((*shape, head_dim)).astype(np.float32))
        order = [(0, 1, 2), (1, 0, 2), (0, 2, 1)][rng.choice(3, p=[0.5, 0.3, 0.2])]
        inputs.append(x.permute(order).contiguous().permute(np.argsort(order).tolist()))
    return tuple(inputs)


def draw_case(seed, *, is_section=False):
    """Draw a forest with inputs and configurations, or a section of one behind its context."""
    rng = np.random.default_rng(seed)
    num_groups = int(rng.choice([1, 2, 4, 7, 8]))
    num_kv_heads = int(rng.integers(1, 3)) if num_groups <= 2 else 1
    low, high = [(1, 40), (60, 200), (200, 700)][rng.choice(3, p=[0.25, 0.65, 0.1])]
    num_tokens = int(rng.integers(low, high + 1))
    head_dim = int(rng.choice([16, 24, 32, 48, 64, 96, 128]))
    plan = (draw_section_plan if is_section else draw_plan)(rng, num_tokens=num_tokens)
    sizes = {"num_groups": num_groups, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    return Case(
        plan=plan,
        configs=draw_configs(rng, num_tokens=num_tokens, num_heads=num_groups * num_kv_heads),
        inputs=draw_inputs(rng, num_tokens=plan.num_tokens, num_context=plan.num_context, **sizes),
        scale=float(rng.uniform(0.5, 1.5) * head_dim**-0.5),
    )


def run(attend, case, *, dtype=torch.float32, plan=None):
    """Return the output and the gradients of q, k, v and, if there are any, the sinks."""
    q, k, v, grad_out = (x.to(dtype) for x in case.inputs)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    if case.sinks_H is not None:
        leaves.append(case.sinks_H.to(dtype).detach().requires_grad_())
    options = ScoreOptions(case.scale, window=case.window, softcap=case.softcap, sinks_H=(*leaves, None)[3])
    out = attend(*leaves[:3], case.plan if plan is None else plan, options=options)
    return out.detach(), *torch.autograd.grad(out, leaves, grad_out)


def worst_error(got, want, case):
    """Return `attention_cases.worst_error` of a case."""
    return attention_cases.worst_error(got, want, grad_out=case.inputs[3])
