"""Times `TokenForest.from_sequences` on synthetic trajectories: a table of seconds and peak memory, and JSON.

Three cases: `tree` (agent-like: one system prompt for all, groups of 8 per prompt, each trajectory leaves an
earlier one of its group somewhere), `disjoint` (nothing shared) and `near_duplicates` (all equal up to the
last tokens: the longest comparisons). A case runs in a fresh process, so that its peak memory is its own.

    python benchmarks/forest.py --num-sequences 4096 --sequence-len 8192 --out forest.json
"""

import argparse
import multiprocessing
import time
from collections.abc import Callable

import numpy as np
from harness import environment, new_parser, peak_bytes, print_table, write_json

from verl_tree.tree import TokenForest

VOCABULARY_LEN = 151_936
GROUP_SIZE = 8


def tree_sequences(num_sequences: int, *, sequence_len: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Draw trajectories of lengths uniform within a quarter of `sequence_len`, after prompts of a quarter of it."""
    system = rng.integers(VOCABULARY_LEN, size=sequence_len // 8)
    sequences: list[np.ndarray] = []
    while len(sequences) < num_sequences:
        prompt = np.concatenate([system, rng.integers(VOCABULARY_LEN, size=sequence_len // 8)])
        group: list[np.ndarray] = []
        for _ in range(min(GROUP_SIZE, num_sequences - len(sequences))):
            own_len = int(rng.integers(3 * sequence_len // 4, 5 * sequence_len // 4 + 1))
            start = group[rng.integers(len(group))] if group else prompt
            shared_len = int(rng.integers(len(prompt), min(len(start), own_len) + 1))
            tail = rng.integers(VOCABULARY_LEN, size=own_len - shared_len)
            group.append(np.concatenate([start[:shared_len], tail]))
        sequences += group
    return [sequences[index] for index in rng.permutation(num_sequences)]


def disjoint_sequences(num_sequences: int, *, sequence_len: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Every trajectory starts with a token of its own."""
    sequences = list(rng.integers(num_sequences, VOCABULARY_LEN, size=(num_sequences, sequence_len)))
    for sequence, first in zip(sequences, rng.permutation(num_sequences), strict=True):
        sequence[0] = first
    return sequences


def near_duplicate_sequences(num_sequences: int, *, sequence_len: int, rng: np.random.Generator) -> list[np.ndarray]:
    """One trajectory, with one of the last ten tokens redrawn from a few in every copy."""
    base = rng.integers(VOCABULARY_LEN, size=sequence_len)
    sequences = [base.copy() for _ in range(num_sequences)]
    for sequence in sequences:
        sequence[-int(rng.integers(1, 11))] = rng.integers(100)
    return sequences


CASES: dict[str, Callable[..., list[np.ndarray]]] = {
    "tree": tree_sequences,
    "disjoint": disjoint_sequences,
    "near_duplicates": near_duplicate_sequences,
}


def measure(case: str, args: argparse.Namespace) -> dict[str, str | int | float]:
    """Run one case; the peak includes the interpreter and the input, which is given beside it."""
    sequences = CASES[case](args.num_sequences, sequence_len=args.sequence_len, rng=np.random.default_rng(args.seed))
    sequences = [sequence.astype(args.dtype) for sequence in sequences]
    input_bytes = sum(sequence.nbytes for sequence in sequences)
    if args.lists:
        sequences = [sequence.tolist() for sequence in sequences]
    before_bytes = peak_bytes()
    times_s = []
    for _ in range(args.repeats):
        forest = None  # so that the peak is that of one forest
        start_s = time.perf_counter()
        forest = TokenForest.from_sequences(sequences)
        times_s.append(time.perf_counter() - start_s)
    return {
        "case": case,
        "sequences": forest.num_leaves,
        "flat_tokens": forest.num_flat_tokens,
        "tree_tokens": forest.num_tokens,
        "por": round(forest.potential_overlap_ratio, 4),
        "nodes": forest.num_nodes,
        "depth": forest.depth,
        "first_s": round(times_s[0], 3),
        "best_s": round(min(times_s), 3),
        "worst_s": round(max(times_s), 3),
        "input_mib": round(input_bytes / 2**20),
        "peak_before_mib": round(before_bytes / 2**20),
        "peak_mib": round(peak_bytes() / 2**20),
    }


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--num-sequences", type=int, default=4096, help="trajectories")
    parser.add_argument("--sequence-len", type=int, default=8192, help="tokens in each (tree: mean)")
    parser.add_argument("--dtype", choices=["int32", "int64"], default="int64", help="of the token ids")
    parser.add_argument("--lists", action="store_true", help="give Python lists instead of arrays")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--repeats", type=int, default=3, help="runs per case in its process")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Measure the cases, print the table and write the JSON."""
    args = parse_args()
    context = multiprocessing.get_context("spawn")
    rows = []
    for case in args.cases:
        with context.Pool(1) as pool:
            rows.append(pool.apply(measure, (case, args)))
    print_table(rows)
    write_json({"environment": environment(args), "rows": rows}, args.out)


if __name__ == "__main__":
    main()
