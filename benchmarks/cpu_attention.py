"""Times attention on a CPU: `varlen` and `dense` on search trees of fine nodes, flat causal attention beside them.

The tree is a search tree of 32,000 tokens whose nodes have 30 to 100 tokens, each grown under a random earlier one:
many small pieces, so overhead per call would show. One layer, float32, forward and backward, one thread. `flat` runs
every trajectory by itself through torch's causal attention; it has more pairs to visit (every shared prefix again), so
times are also given per visible pair. What is measured is processor time, because machines are shared; the repetitions
of all three alternate.

Also: `varlen` against `dense` in float64, and the time to plan 131,072 tokens with the block lists of both directions.

    python benchmarks/cpu_attention.py [--out docs/benchmarks/data/cpu_attention.json] [--parts plan]

With --parts the other parts of the file stay as they are.
"""

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from harness import environment, interleave, new_parser, write_json
from torch.nn.functional import scaled_dot_product_attention

from verl_tree.attention import AttentionPlan, tree_attention
from verl_tree.attention.blocks import BlockLists
from verl_tree.testing.synthetic import star
from verl_tree.tree import TokenForest
from verl_tree.tree.layout import TreeLayout

NUM_HEADS, HEAD_DIM = 8, 64
NUM_NODES = 500
BLOCK_LEN = 128
PARTS = ("search_tree", "float64_error", "plan")


def main() -> None:
    """Measures, prints and writes the JSON."""
    parser = new_parser(__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    record = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    record["environment"] = environment(options)
    record["layer"] = {"num_heads": NUM_HEADS, "head_dim": HEAD_DIM, "dtype": "float32", "num_threads": 1}
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "search_tree": lambda: _time_search_tree(num_repetitions=options.repetitions),
        "float64_error": _float64_error,
        "plan": lambda: _time_plans(num_repetitions=options.repetitions),
    }
    for part in options.parts:
        record[part] = parts[part]()
    print(json.dumps(record, indent=1))
    write_json(record, options.out)


def _search_tree(num_nodes: int) -> list[np.ndarray]:
    """Return the trajectories of a search tree whose nodes, of 30 to 100 tokens, grow under random earlier ones."""
    rng = np.random.default_rng(0)
    paths = [np.empty(0, dtype=np.int64)]
    parents = [0]
    for number in range(num_nodes):
        parents.append(int(rng.integers(number + 1)))
        tokens = rng.integers(1, 50_000, size=rng.integers(30, 101))
        paths.append(np.concatenate([paths[parents[-1]], tokens]))
    return [path for number, path in enumerate(paths) if number not in parents]


def _plan(sequences: list[np.ndarray]) -> AttentionPlan:
    forest = TokenForest.from_sequences(sequences)
    return AttentionPlan.from_layout(TreeLayout.from_forest(forest))


def _inputs(num_tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (num_tokens, NUM_HEADS, HEAD_DIM)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for _ in range(3)]


def _time_search_tree(*, num_repetitions: int) -> dict[str, Any]:
    """Processor seconds of forward and backward: median, all repetitions, and nanoseconds per visible pair."""
    sequences = _search_tree(NUM_NODES)
    lens = [len(sequence) for sequence in sequences]
    plan = _plan(sequences)
    tree_inputs = _inputs(plan.num_tokens, torch.float32)
    # One trajectory after another, on random values of its own length: a flat trainer's attention.
    flat_inputs = _inputs(max(lens), torch.float32)

    def run_tree(backend: str) -> None:
        tree_attention(*tree_inputs, plan, backend=backend).sum().backward()

    def run_flat() -> None:
        for length in lens:
            q, k, v = (x[:length].transpose(0, 1)[None] for x in flat_inputs)
            scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    num_flat_pairs = sum(length * (length + 1) // 2 for length in lens)
    paths: dict[str, Callable[[], None]] = {
        "varlen": lambda: run_tree("varlen"),
        "flat": run_flat,
        "dense": lambda: run_tree("dense"),
    }
    times = interleave(paths, repetitions=num_repetitions)
    medians = {name: each.median_cpu_s for name, each in times.items()}
    num_pairs = {"varlen": plan.num_visible_pairs, "flat": num_flat_pairs, "dense": plan.num_visible_pairs}
    ns_per_pair = {name: medians[name] / num_pairs[name] * 1e9 for name in medians}
    return {
        "num_tree_tokens": plan.num_tokens,
        "num_flat_tokens": sum(lens),
        "num_leaves": len(lens),
        "num_visible_pairs": plan.num_visible_pairs,
        "num_flat_pairs": num_flat_pairs,
        "seconds": {name: each.cpu_s for name, each in times.items()},
        "median_s": medians,
        "ns_per_visible_pair": ns_per_pair,
        "dense_over_varlen": medians["dense"] / medians["varlen"],
        "flat_over_varlen": medians["flat"] / medians["varlen"],
        "varlen_over_flat_per_pair": ns_per_pair["varlen"] / ns_per_pair["flat"],
    }


def _float64_error() -> dict[str, float]:
    """Largest distance of `varlen` from `dense` in float64, relative to the largest value, output and gradients."""
    plan = _plan(_search_tree(NUM_NODES // 8))
    results = []
    for backend in ("varlen", "dense"):
        inputs = _inputs(plan.num_tokens, torch.float64)
        out = tree_attention(*inputs, plan, backend=backend)
        out.square().sum().backward()
        results.append([out.detach(), *(x.grad for x in inputs)])
    return {
        name: ((here - there).abs().max() / there.abs().max()).item()
        for name, here, there in zip(("out", "q_grad", "k_grad", "v_grad"), *results, strict=True)
    }


def _time_plans(*, num_repetitions: int) -> dict[str, Any]:
    """Return the best seconds to plan 131,072 tokens, and to find the block lists of both directions."""
    shapes = {"8k prompt, 32 branches": star(32, prompt_len=8192, branch_len=3840), "search tree": _search_tree(2100)}
    return {name: _time_plan(rows, num_repetitions=num_repetitions) for name, rows in shapes.items()}


def _time_plan(sequences: list[np.ndarray], *, num_repetitions: int) -> dict[str, Any]:
    forest = TokenForest.from_sequences(sequences)
    subtree_end_T = TreeLayout.from_forest(forest).subtree_end_T
    plan_s, blocks_s = [], []
    for _ in range(num_repetitions):
        started = time.perf_counter()
        plan = AttentionPlan.from_subtree_end(subtree_end_T)
        planned = time.perf_counter()
        BlockLists.of_plan(plan, query_block=BLOCK_LEN, key_block=BLOCK_LEN)
        plan_s.append(planned - started)
        blocks_s.append(time.perf_counter() - planned)
    return {
        "num_tokens": len(subtree_end_T),
        "num_nodes": forest.num_nodes,
        "block_len": BLOCK_LEN,
        "plan_s": min(plan_s),
        "block_lists_s": min(blocks_s),
    }


if __name__ == "__main__":
    main()
