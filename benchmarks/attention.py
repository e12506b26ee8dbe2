"""Times one attention layer, forward and backward in bf16, on eight shapes of trees: one contender per process.

`contenders.py` says what competes. Backends also run, after all shapes, the section with the longest context of
sections of a quarter of the tokens (`section`), and context and section in one pack (`its pack`).

    python benchmarks/attention.py --contender fa4 --out fa4.jsonl [--seconds 30] [--shapes ...] [--device cuda]
    python benchmarks/attention.py --contender fa4 --compile       # only so that its kernels are in the caches on disk

Every measurement is a line of JSON, written at once: medians of the repetitions, TFLOP/s, and the memory that inputs,
forward and backward pass need at most. TFLOP/s count 4 Hq D (forward) and 10 Hq D (backward) per pair in a tile of
128 x 128 that the contender visits, so they say how busy the tensor cores are; the times say who is faster. Pairs are
those of what the contender computes: flat rows have more than the tree. What does not fit into the time is counted as
not run. `report_gpu.py` makes the table. Exit status 1 if a measurement failed.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from contenders import CONTENDERS, WITH_SECTIONS, Call, RefusedError, Shape
from harness import Times, add_device_options, new_parser, run_cases

from verl_tree.attention import AttentionPlan
from verl_tree.attention.blocks import BlockLists
from verl_tree.testing.synthetic import caterpillar, groups, overlap, star, tool_fan_out, tree_search

BLOCK_LEN = 128

SHAPES: dict[str, Callable[[], list[np.ndarray]]] = {
    "GRPO star 1k + 16 x (1-4k)": lambda: star(16, prompt_len=1024, branch_len=(1024, 4096)),
    "MCTS, nodes of 30-100": lambda: tree_search(
        num_trees=8, num_expansions=8, num_rounds=6, num_steps=8, prompt_len=1024, step_len=(30, 100)
    ),
    "branch 4, depth 4": lambda: overlap(0.75, num_leaves=64, num_flat_tokens=64 * 2048, depth=4),
    "128k star": lambda: star(32, prompt_len=8192, branch_len=3840),
    "agent, depth 5": lambda: tool_fan_out(5, num_calls=3, prompt_len=4096),
    "8k prompt, 16 x 512": lambda: star(16, prompt_len=8192, branch_len=512),
    "forest of 8 stars": lambda: groups(_small_star, num_groups=8),
    "trunk of 64 with side branches": lambda: caterpillar(
        64, question_len=(64, 128), thinking_len=(64, 512), answer_len=(64, 128)
    ),
}
"""The most telling first."""


def _small_star(**keywords: Any) -> list[np.ndarray]:
    return star(8, prompt_len=512, branch_len=(256, 768), **keywords)


def main() -> None:
    """Time the contender on the shapes and write the records."""
    options = _parse_options()
    measurements = (
        (
            {"kind": "layer", "contender": options.contender + part, "shape": name, "head_dim": options.head_dim},
            partial(_measure, name, part, options),
        )
        for name, part in _measurements(options)
    )
    run_cases(measurements, options)


def _parse_options() -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--contender", required=True, choices=list(CONTENDERS))
    add_device_options(parser, seconds=60.0)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8), help="query and key-value heads")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="one small call")
    options = parser.parse_args()
    if options.small:
        options.heads, options.head_dim, options.repetitions = (2, 1), 64, 1
    return options


def _measurements(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Return shapes and parts of them (all, section, its pack) in the order in which they are timed."""
    if options.compile:
        yield options.shapes[0], ""
        return
    yield from ((name, "") for name in options.shapes)
    if options.contender in WITH_SECTIONS:
        yield from ((name, part) for name in options.shapes for part in (", section", ", its pack"))


def _measure(name: str, part: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return times, TFLOP/s and peak memory, or why the contender refuses."""
    rows = SHAPES[name]()
    if options.small or options.compile:
        # Tiny rows keep their ends, so that they still branch.
        rows = [np.r_[row[:64], row[-32:]] if options.small else row[:2048] for row in rows[:4]]
    contender = CONTENDERS[options.contender]
    started = time.perf_counter()
    shape = Shape.of(rows, device=torch.device(options.device))
    plan_s = time.perf_counter() - started
    plan_of = {"": contender.plan_of, ", section": Shape.section, ", its pack": Shape.pack_of_section}[part]
    plan = plan_of(shape)
    sizes = {
        "tree_tokens": shape.layout.num_tokens,
        "flat_tokens": sum(map(len, rows)),
        "queries": plan.num_queries,
        "context": plan.num_context,
        "plan_s": plan_s,
    }
    try:
        measured = _time_call(contender.call_of(plan), plan, options=options)
    except RefusedError as refusal:
        return {**sizes, "refused": str(refusal)}
    lists = BlockLists.of_plan(plan, query_block=BLOCK_LEN, key_block=BLOCK_LEN)
    pairs = {"visible_pairs": plan.num_visible_pairs, "visited_pairs": len(lists.by_query.indices) * BLOCK_LEN**2}
    tera_flops = 4 * options.heads[0] * options.head_dim * pairs["visited_pairs"] / 1e12
    return {
        **sizes,
        **pairs,
        **measured,
        "forward_tflops": tera_flops / (measured["forward_ms"] / 1000),
        "backward_tflops": 2.5 * tera_flops / (measured["backward_ms"] / 1000),
    }


def _time_call(call: Call, plan: AttentionPlan, *, options: argparse.Namespace) -> dict[str, Any]:
    device, is_cuda = torch.device(options.device), options.device == "cuda"
    generator = torch.Generator(device=device).manual_seed(0)

    def random(num_tokens: int, num_heads: int) -> torch.Tensor:
        values = torch.randn(num_tokens, num_heads, options.head_dim, device=device, generator=generator)
        return values.to(torch.bfloat16).requires_grad_()

    num_heads, num_kv_heads = options.heads
    inputs = [random(plan.num_queries, num_heads), *(random(plan.num_tokens, num_kv_heads) for _ in range(2))]
    grad_out = random(plan.num_queries, num_heads).detach()
    forward, backward = Times(), Times()
    for number in range(options.repetitions + 2):
        if number == 2:  # the first two compile and allocate
            forward, backward = Times(), Times()
            if is_cuda:
                torch.cuda.reset_peak_memory_stats()
        with forward.measure(is_cuda=is_cuda):
            out = call(*inputs)
        with backward.measure(is_cuda=is_cuda):
            torch.autograd.grad(out, inputs, grad_out)
    return {
        "forward_ms": forward.median_s * 1000,
        "backward_ms": backward.median_s * 1000,
        "forward_all_ms": [each * 1000 for each in forward.wall_s],
        "backward_all_ms": [each * 1000 for each in backward.wall_s],
        "peak_bytes": torch.cuda.max_memory_allocated() if is_cuda else None,
    }


if __name__ == "__main__":
    main()
