"""Checks the gated delta rule by levels (flash-linear-attention) on a device against float64, or times it.

Checks: output and gradients on forests with nodes of all lengths, for the head sizes of Qwen3-Next and Qwen3.5, within
the limits of the self-test. Times (`--time`): forward and backward pass of one layer's rule on a tree, beside the same
rows flat, each by flash-linear-attention and by torch. Also where a training run would take torch, because nodes are
short: so the times judge that rule. What else is in a layer goes by tokens.

    python benchmarks/check_recurrence.py --out recurrence.jsonl [--time] [--seconds 60] [--device cuda]

Every case is a line of JSON, written at once. Exit status 1 if one failed. On a CPU only torch runs.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from harness import Times, add_device_options, new_parser, run_cases
from recurrence import branches, deep, search

from verl_tree.recurrence import fla
from verl_tree.recurrence.chunks import TreeChunks
from verl_tree.recurrence.delta_rule import tree_gated_delta_rule
from verl_tree.recurrence.levels import TreeLevels
from verl_tree.testing.synthetic import random_forest, star, tree_search
from verl_tree.tree import TokenForest
from verl_tree.tree.layout import TreeLayout
from verl_tree.tree.plan import AttentionPlan

REPETITIONS = 5

HEADS = ((32, 128, 128), (16, 128, 128), (4, 64, 128))
"""Value heads, key dim and value dim: Qwen3.5-9B and Qwen3-Next-80B, smaller ones, and dims that differ."""

FORESTS: dict[str, Callable[[], list[np.ndarray]]] = {
    "star": lambda: star(7, prompt_len=513, branch_len=(60, 300), seed=2),
    "search": lambda: tree_search(
        num_trees=3, num_expansions=5, num_rounds=4, num_steps=5, prompt_len=37, step_len=(3, 40), seed=1
    ),
    "random": lambda: random_forest(3, num_leaves=40, mean_len=24),
    "deep": lambda: deep(np.random.default_rng(0)),
}

SHAPES: dict[str, Callable[[], list[np.ndarray]]] = {
    "1k + 16 x 1k": lambda: branches(np.random.default_rng(0), 1024, 16, 1024),
    "1k + 16 x 128": lambda: branches(np.random.default_rng(0), 1024, 16, 128),
    "deep, 30 turns of 48": lambda: deep(np.random.default_rng(0)),
    "search, 7 levels of 20-60": lambda: search(np.random.default_rng(0)),
}


def main() -> None:
    """Check or time all cases and write their records."""
    parser = new_parser(__doc__)
    add_device_options(parser, seconds=60.0)
    parser.add_argument("--time", action="store_true", help="time, and check nothing")
    options = parser.parse_args()
    run_cases(_times(options) if options.time else _checks(options), options)


Case = tuple[dict[str, Any], Callable[[], dict[str, Any]]]


def _variants(options: argparse.Namespace) -> list[fla.DeltaRuleVariant]:
    device, heads = torch.device(options.device), ((2, 16, 8),) if options.small else HEADS
    dtypes = (torch.bfloat16,) if options.time else (torch.bfloat16, torch.float16)
    return [fla.DeltaRuleVariant(device, dtype, *each) for each in heads for dtype in dtypes]


def _checks(options: argparse.Namespace) -> list[Case]:
    return [
        (_named("rule", variant, forest=name, backend=backend), partial(_check, backend, variant, FORESTS[name]))
        for variant in _variants(options)
        for name in FORESTS
        for backend in ("fla", "torch")
    ]


def _named(kind: str, variant: fla.DeltaRuleVariant, **more: str) -> dict[str, Any]:
    dtype = str(variant.dtype).removeprefix("torch.")
    return {"kind": kind, "dtype": dtype, "heads": [variant.num_heads, variant.key_dim, variant.value_dim], **more}


def _refusals(backend: str, variant: fla.DeltaRuleVariant) -> list[str]:
    """Return why flash-linear-attention does not run at all; the lengths of nodes do not count here."""
    if backend == "torch":
        return []
    return fla.installation_reasons() if variant.device.type == "cuda" else ["its kernels run on CUDA only"]


def _on_torch(*inputs: torch.Tensor, levels: TreeLevels, chunks: TreeChunks, **options: torch.Tensor) -> torch.Tensor:
    """Run torch's rule under the arguments of the one by levels."""
    del levels
    return tree_gated_delta_rule(*inputs, chunks=chunks, **options)


def _check(backend: str, variant: fla.DeltaRuleVariant, forest: Callable[[], list[np.ndarray]]) -> dict[str, Any]:
    reasons = _refusals(backend, variant)
    if reasons:
        return {"refused": reasons}
    subtree_end_T = _subtree_end(forest(), is_flat=False)
    # With other chunks, so that torch is not compared with itself.
    other = TreeChunks.of_plan(AttentionPlan.from_subtree_end(subtree_end_T, device=variant.device), size=32)
    rule = partial(_on_torch, chunks=other) if backend == "torch" else fla.fla_gated_delta_rule
    errors = fla.compare(rule, variant, subtree_end_T)
    return {
        "tokens": len(subtree_end_T),
        "errors": {name: error for name, (error, _) in errors.items()},
        "limits": {name: limit for name, (_, limit) in errors.items()},
        "passed": all(error <= limit for error, limit in errors.values()),
    }


def _times(options: argparse.Namespace) -> list[Case]:
    return [
        (
            _named("rule_time", variant, shape=name, backend=backend, rows="flat" if is_flat else "tree"),
            partial(_time, backend, variant, SHAPES[name], is_flat=is_flat),
        )
        for variant in _variants(options)[:1]
        for name in SHAPES
        for backend in ("fla", "torch")
        for is_flat in (False, True)
    ]


def _time(
    backend: str, variant: fla.DeltaRuleVariant, shape: Callable[[], list[np.ndarray]], *, is_flat: bool
) -> dict[str, Any]:
    """Return the medians of forward and backward pass, and the most memory they take."""
    reasons = _refusals(backend, variant)
    if reasons:
        return {"refused": reasons}
    subtree_end_T, is_cuda = _subtree_end(shape(), is_flat=is_flat), variant.device.type == "cuda"
    plan = AttentionPlan.from_subtree_end(subtree_end_T, device=variant.device)
    levels = TreeLevels.of_plan(plan, chunk_size=fla.CHUNK_SIZE)
    if backend == "fla":
        rule = partial(fla.fla_gated_delta_rule, levels=levels)
    else:
        rule = partial(tree_gated_delta_rule, chunks=TreeChunks.of_plan(plan, size=fla.CHUNK_SIZE))
    inputs, grad_out_THV = fla.inputs_of(variant, num_tokens=len(subtree_end_T))
    leaves = [each.requires_grad_() for each in inputs]
    forward, backward = Times(), Times()
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    for number in range(1 + REPETITIONS):
        times = (forward, backward) if number else (Times(), Times())  # the first run compiles
        with times[0].measure(is_cuda=is_cuda):
            out_THV = rule(*leaves[:3], g_TH=leaves[3], beta_TH=leaves[4])
        with times[1].measure(is_cuda=is_cuda):
            torch.autograd.grad(out_THV, leaves, grad_out_THV)
    return {
        "tokens": len(subtree_end_T),
        "nodes": levels.num_nodes,
        "calls": len(levels.inner) + 1,
        "forward_ms": forward.median_s * 1000,
        "backward_ms": backward.median_s * 1000,
        "peak_bytes": torch.cuda.max_memory_allocated() if is_cuda else None,
    }


def _subtree_end(rows: list[np.ndarray], *, is_flat: bool) -> np.ndarray:
    """Lay out rows as their forest, or each as a tree of its own."""
    forest = TokenForest.from_sequences(rows, merge_keys=range(len(rows)) if is_flat else None)
    return TreeLayout.from_forest(forest).subtree_end_T.numpy()


if __name__ == "__main__":
    main()
