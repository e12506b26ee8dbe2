"""Whether the cost model of a pack needs the chunks of recurrent layers, and the steps that follow each other.

Packs of many shapes, from one long row to hundreds of one-token nodes, run forward and backward. Their processor
seconds are fitted as `verl_tree.cost.fit` fits them, by non-negative least squares of relative errors, and each eighth
of the packs is predicted from the others. Without more columns than those of `Work`, and with chunks and steps::

    python benchmarks/recurrence_costs.py --out docs/benchmarks/data/recurrence_costs.json
"""

import json
import statistics

import numpy as np
import torch
from harness import Times, environment, keep_freed_memory, new_parser, print_table
from recurrence import MODELS, Sequences, small_model, tokens, tree
from scipy.optimize import nnls

from verl_tree.recurrence.chunks import TreeChunks
from verl_tree.recurrence.stand_ins import CHUNK_SIZE
from verl_tree.tree import TokenForest
from verl_tree.tree.layout import TreeLayout
from verl_tree.tree.plan import AttentionPlan

NUM_FOLDS = 8
MIN_TOKENS, MAX_TOKENS = 256, 4096

COLUMNS = {
    "as today": ["tokens", "pairs", "nodes", "packs"],
    "with steps": ["tokens", "pairs", "nodes", "packs", "steps"],
    "with chunks": ["tokens", "pairs", "nodes", "packs", "chunks"],
    "with both": ["tokens", "pairs", "nodes", "packs", "chunks", "steps"],
}


def drawn_pack(rng: np.random.Generator) -> Sequences:
    """Draw a pack of few long or many short leaves, which branch off anywhere or at the end of the last row."""
    num_tokens = int(np.exp(rng.uniform(np.log(MIN_TOKENS), np.log(MAX_TOKENS))))
    mean_len = num_tokens * np.exp(rng.uniform(np.log(0.003), 0.0))
    depth = rng.uniform()
    rows = [tokens(rng, max(int(mean_len), 2))]
    while _num_tokens(rows) < num_tokens:
        row = rows[-1] if rng.uniform() < depth else rows[int(rng.integers(len(rows)))]
        kept = int(len(row) * (1.0 if rng.uniform() < depth else rng.uniform()))
        rows.append(np.concatenate([row[:kept], tokens(rng, max(int(rng.exponential(mean_len)), 1))]))
    return rows


def _num_tokens(rows: Sequences) -> int:
    return TokenForest.from_sequences(rows).num_tokens


def measured(rows: Sequences, model: torch.nn.Module, *, repetitions: int) -> dict[str, float]:
    """Time a pack, the least of some repetitions, and count what it computes."""
    layout = TreeLayout.from_forest(TokenForest.from_sequences(rows))
    chunks = TreeChunks.of_plan(AttentionPlan.from_layout(layout), size=CHUNK_SIZE)
    times = Times()
    for _ in range(repetitions):
        with times.measure():
            tree(model, rows)
    return {
        "tokens": layout.num_tokens,
        "pairs": int(layout.position_T.sum()) + layout.num_tokens,
        "nodes": layout.num_nodes,
        "packs": 1,
        "chunks": len(chunks.token_MC),
        "steps": chunks.num_steps,
        "cpu_s": min(times.cpu_s),
    }


def held_out_errors(packs: list[dict[str, float]], columns: list[str]) -> list[float]:
    """Predict each fold from the others; return |predicted / measured - 1| of every pack."""
    rows = (
        np.array([[pack[name] for name in columns] for pack in packs]) / np.array([p["cpu_s"] for p in packs])[:, None]
    )
    rows /= np.linalg.norm(rows, axis=0)
    errors = np.empty(len(rows))
    for fold in range(NUM_FOLDS):
        is_held_out = np.arange(len(rows)) % NUM_FOLDS == fold
        coefficients, _ = nnls(rows[~is_held_out], np.ones(np.count_nonzero(~is_held_out)))
        errors[is_held_out] = np.abs(rows[is_held_out] @ coefficients - 1)
    return errors.tolist()


def main() -> None:
    """Draw, measure, fit and print."""
    parser = new_parser(__doc__)
    parser.add_argument("--model", choices=list(MODELS), default="two_layers")
    parser.add_argument("--packs", type=int, default=48)
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    model, rng = small_model(options.model), np.random.default_rng(0)
    drawn = [drawn_pack(rng) for _ in range(options.packs)]
    tree(model, drawn[0])
    packs = [measured(rows, model, repetitions=options.repetitions) for rows in drawn]
    fits = []
    for name, columns in COLUMNS.items():
        errors = held_out_errors(packs, columns)
        fits.append(
            {"fit": name, "median_error": statistics.median(errors), "p90_error": float(np.quantile(errors, 0.9))}
        )
    if options.out:
        options.out.write_text(
            json.dumps({"environment": environment(options), "fits": fits, "packs": packs}, indent=1) + "\n"
        )
    print_table(fits)


if __name__ == "__main__":
    main()
