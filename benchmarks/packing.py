"""How near the packing methods come to the optimum, and how much of the overlap a capacity leaves.

Three parts, each runnable alone; a table each, and JSON with every instance:

- optimum: small random forests, every method against all partitions, with and without a cap on loss terms;
- capacity: ERR / POR against C for agent shapes and for trees of a given POR, also as a plot;
- scale: 10,000 leaves and 80 M flat tokens: times, peak memory, ERR / POR.

    python benchmarks/packing.py [PART ...] [--out packing.json] [--plot packing.png] [--jobs 2] ...

Parts that the JSON already has and that are not run again are kept. `gap` is packed tokens over the optimum, or over
the lower bound where the optimum is not known, minus 1. Times are wall-clock seconds.
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from harness import environment, new_parser, peak_bytes
from report_packing import draw, report

from verl_tree.packing import METHODS, Packing, pack
from verl_tree.testing.arrival_packing import arrival_first_fit
from verl_tree.testing.packing_reference import brute_force
from verl_tree.testing.synthetic import SHAPES, groups, overlap, random_forest, tree_search
from verl_tree.tree import TokenForest

Row = dict[str, Any]

CAPACITIES = (1, 1.5, 2, 3, 4, 6, 8, 16)  # in longest paths
EVERY_METHOD = (*METHODS, "arrival_first_fit")
CAPACITY_METHODS = ("arrival_first_fit", "dfs_first_fit", "single_path", "deepest_first", "heuristic", "exact")
NUM_SEEDS = 3
SCALE_METHODS = ("dfs_first_fit", "single_path", "deepest_first", "heuristic", "auto")
OVERLAPS = {
    f"overlap {ratio}": partial(overlap, ratio, num_leaves=64, num_flat_tokens=64 * 4096)
    for ratio in (0.2, 0.5, 0.8, 0.92)
}
# Both have 10,000 trajectories of 8,000 tokens on average.
LARGE = {
    "one tree": partial(overlap, 0.8, num_leaves=10_000, num_flat_tokens=80_000_000, depth=6),
    "625 groups of 16": partial(
        groups,
        partial(tree_search, 4, num_expansions=3, num_rounds=1, prompt_len=2000, step_len=(500, 1500)),
        num_groups=625,
    ),
}


def packings(
    forest: TokenForest, *, methods: Iterable[str], exact_limit_s: float, **caps: Any
) -> dict[str, Packing | None]:
    """Return the packing of every method; None where "exact" gave up."""
    result: dict[str, Packing | None] = {}
    for method in methods:
        if method == "arrival_first_fit":
            result[method] = arrival_first_fit(forest, **caps)
            continue
        limit = {"time_limit_s": exact_limit_s} if method == "exact" else {}
        try:
            result[method] = pack(forest, method=method, **limit, **caps)
        except ValueError as error:
            if method != "exact" or "time_limit_s" not in str(error):
                raise
            result[method] = None
    return result


def tokens(found: dict[str, Packing | None]) -> dict[str, int | None]:
    """Packed tokens by method."""
    return {method: None if packing is None else packing.num_tokens for method, packing in found.items()}


def optimum_instance(number: int, *, options: argparse.Namespace) -> Row:
    """One forest of 2 to 9 leaves; every third one has a cap on loss terms."""
    rng = np.random.default_rng([options.seed, number])
    sequences = random_forest(rng, num_leaves=int(rng.integers(2, 10)), mean_len=float(rng.choice([3, 20])))
    forest = TokenForest.from_sequences(sequences)
    longest, most_terms = int(forest.sequence_lens.max()), int(forest.sequence_lens.max()) - 1
    capacity = int(rng.integers(longest, max(forest.num_tokens, longest + 1)))
    max_loss_terms = max(int(rng.integers(most_terms, 3 * most_terms + 1)), 1) if number % 3 == 2 else None
    caps = {"capacity": capacity, "max_loss_terms": max_loss_terms}
    found = packings(forest, methods=EVERY_METHOD, exact_limit_s=60, **caps)
    return {
        "leaves": forest.num_leaves,
        "tree_tokens": forest.num_tokens,
        **caps,
        "optimum": brute_force(sequences, **caps),
        "lower_bound": found["auto"].lower_bound,
        "tokens": tokens(found),
    }


def capacity_instance(job: tuple[str, int], *, options: argparse.Namespace) -> list[Row]:
    """One shape under every capacity."""
    shape, seed = job
    forest = TokenForest.from_sequences({**SHAPES, **OVERLAPS}[shape](seed=seed))
    longest = int(forest.sequence_lens.max())
    rows = []
    for multiple in CAPACITIES:
        capacity = int(multiple * longest)
        found = packings(forest, methods=CAPACITY_METHODS, exact_limit_s=options.exact_limit_s, capacity=capacity)
        rows.append(
            {
                "shape": shape,
                "seed": seed,
                "leaves": forest.num_leaves,
                "flat_tokens": forest.num_flat_tokens,
                "tree_tokens": forest.num_tokens,
                "por": round(forest.potential_overlap_ratio, 4),
                "multiple": multiple,
                "capacity": capacity,
                "packs": len(found["heuristic"].packs),
                "lower_bound": found["heuristic"].lower_bound,
                "tokens": tokens(found),
            }
        )
    return rows


def scale_instance(name: str, *, options: argparse.Namespace) -> list[Row]:
    """One large forest; run in a process of its own, whose peak memory includes the trajectories."""
    start_s = time.perf_counter()
    sequences = LARGE[name](seed=options.seed)
    made_s, before = time.perf_counter() - start_s, peak_bytes() >> 20
    start_s = time.perf_counter()
    forest = TokenForest.from_sequences(sequences)
    forest_s, forest_peak = time.perf_counter() - start_s, peak_bytes() >> 20
    capacity = options.scale_capacity
    rows = []
    for method in SCALE_METHODS:
        start_s = time.perf_counter()
        packing = pack(forest, capacity=capacity, method=method)
        rows.append(
            {
                "forest": name,
                "method": method,
                "leaves": forest.num_leaves,
                "nodes": forest.num_nodes,
                "flat_tokens": forest.num_flat_tokens,
                "por": round(forest.potential_overlap_ratio, 4),
                "capacity": capacity,
                "packs": len(packing.packs),
                "err_over_por": round(packing.effective_reuse_ratio / forest.potential_overlap_ratio, 4),
                "gap_to_bound": round(packing.gap, 4),
                "make_s": round(made_s, 2),
                "forest_s": round(forest_s, 2),
                "pack_s": round(time.perf_counter() - start_s, 2),
                "input_peak_mib": before,
                "forest_peak_mib": forest_peak,
                "peak_mib": peak_bytes() >> 20,
            }
        )
    return rows


PARTS: dict[str, Callable[..., Any]] = {
    "optimum": optimum_instance,
    "capacity": capacity_instance,
    "scale": scale_instance,
}


def run_part(part: str, *, options: argparse.Namespace) -> list[Row]:
    """Return the rows of one part, its instances spread over processes."""
    solve = PARTS[part]
    jobs: list[Any] = {
        "optimum": list(range(options.num_forests)),
        "capacity": [(shape, seed) for shape in [*SHAPES, *OVERLAPS] for seed in range(NUM_SEEDS)],
        "scale": list(LARGE),
    }[part]
    rows: list[Row] = []
    num_processes = 1 if part == "scale" else options.jobs
    tasks_per_child = 1 if part == "scale" else None
    with multiprocessing.get_context("spawn").Pool(num_processes, maxtasksperchild=tasks_per_child) as pool:
        for number, result in enumerate(pool.imap(partial(solve, options=options), jobs)):
            rows += result if isinstance(result, list) else [result]
            if number % max(len(jobs) // 20, 1) == 0:
                print(f"{part}: {number + 1} of {len(jobs)}", file=sys.stderr, flush=True)
    return rows


def write(parts: dict[str, Any], *, out: Path) -> None:
    """Write the parts, one instance a line, beside those that the file has already."""
    parts = {**(json.loads(out.read_text()) if out.exists() else {}), **parts}
    blocks = []
    for name, part in parts.items():
        head = json.dumps({key: value for key, value in part.items() if key != "rows"}, indent=1)[2:-2]
        rows = ",\n  ".join(json.dumps(row) for row in part["rows"])
        blocks.append(f' "{name}": {{\n{head},\n "rows": [\n  {rows}\n ]}}')
    out.write_text("{\n" + ",\n".join(blocks) + "\n}\n")


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="optimum, capacity, scale (default: all)")
    parser.add_argument("--plot", type=Path, help="draw the part capacity here")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-forests", type=int, default=1000, help="of the part optimum")
    parser.add_argument("--exact-limit-s", type=float, default=2, help="of the exact method in the part capacity")
    parser.add_argument("--scale-capacity", type=int, default=32_768, help="C of the part scale")
    options = parser.parse_args()
    options.parts = options.parts or list(PARTS)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
    return options


def main() -> None:
    """Measure the parts, print their tables, write and draw them."""
    options = parse_args()
    parts: dict[str, Any] = {}
    for part in options.parts:
        start_s = time.perf_counter()
        rows = run_part(part, options=options)
        parts[part] = {
            "environment": environment(options),
            "wall_s": round(time.perf_counter() - start_s),
            "rows": rows,
        }
        if options.out:
            write(parts, out=options.out)
    report(parts)
    if options.plot and "capacity" in parts:
        draw(parts["capacity"]["rows"], out=options.plot)


if __name__ == "__main__":
    main()
