"""Size of stored trees against the same rows stored flat.

    python benchmarks/stored_trees.py [STORED.parquet ...] [--out FILE.json]

Without files it takes synthetic groups of the shapes of `testing.synthetic.SHAPES`, whose tokens are random and so
compress worse than text. Flat means one parquet row per trajectory with the same columns and the same compression.
"""

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from harness import environment, new_parser, print_table, write_json

from verl_tree.records import StoredLeaf, StoredTree, read_trees, write_trees
from verl_tree.testing.synthetic import SHAPES

NUM_GROUPS = 8


def synthetic(name: str) -> list[StoredTree]:
    """Draw groups of one shape; tokens with an even id are trained, and have one log-prob wherever they are."""
    trees = []
    for seed in range(NUM_GROUPS):
        value_of = -np.random.default_rng(seed).exponential(size=2**20).astype(np.float32)
        leaves = []
        for row, ids in enumerate(SHAPES[name](seed=seed)):
            is_trained = ids % 2 == 0
            log_probs = np.where(is_trained, value_of[ids], np.nan)
            rewards, advantages = np.zeros(len(ids) - 1), np.where(is_trained[1:], 0.5, 0.0)
            is_trained[0], log_probs[0] = False, np.nan
            leaves.append(StoredLeaf(row, 0, ids, 1, is_trained, log_probs, rewards, advantages))
        trees.append(StoredTree(step=0, uid=f"{seed:09d}", leaves=tuple(leaves)))
    return trees


def write_flat(path: Path, trees: list[StoredTree]) -> None:
    """Write the rows as verl has them."""
    rows = [{"uid": tree.uid, "session": leaf.session, **leaf.row()} for tree in trees for leaf in tree.leaves]
    for row in rows:
        row["response_mask"] = row["response_mask"].astype(bool)
    narrow = {"response_mask": pa.list_(pa.bool_())}
    narrow |= dict.fromkeys(("prompts", "responses"), pa.list_(pa.int32()))
    narrow |= dict.fromkeys(("rollout_log_probs", "rm_scores", "advantages"), pa.list_(pa.float32()))
    columns = {name: pa.array([row.get(name) for row in rows], type=kind) for name, kind in narrow.items()}
    columns |= {name: pa.array([row[name] for row in rows]) for name in ("uid", "session")}
    pq.write_table(pa.table(columns), path, compression="zstd")


def measure(name: str, trees: list[StoredTree]) -> dict[str, str | int | float]:
    """Write the trees both ways and return the sizes."""
    forests = [tree.forest() for tree in trees]
    flat, unique = (sum(values) for values in zip(*((f.num_flat_tokens, f.num_tokens) for f in forests), strict=True))
    with tempfile.TemporaryDirectory() as folder:
        stored, rows = Path(folder) / "stored.parquet", Path(folder) / "flat.parquet"
        write_trees(stored, trees)
        write_flat(rows, trees)
        stored_bytes, flat_bytes = stored.stat().st_size, rows.stat().st_size
    return {
        "rollouts": name,
        "flat_tokens": flat,
        "tree_tokens": unique,
        "compression": round(flat / unique, 2),
        "flat_bytes": flat_bytes,
        "stored_bytes": stored_bytes,
        "ratio": round(flat_bytes / stored_bytes, 2),
        "bytes_per_tree_token": round(stored_bytes / unique, 2),
    }


def main() -> None:
    """Measure every file or shape, print a table and write the JSON."""
    parser = new_parser(__doc__)
    parser.add_argument("stored", nargs="*", type=Path, help="files of stored trees")
    arguments = parser.parse_args()
    rows = [measure(path.name, read_trees(path)) for path in arguments.stored]
    rows = rows or [measure(name, synthetic(name)) for name in SHAPES]
    print_table(rows)
    write_json({"environment": environment(arguments), "rows": rows}, arguments.out)


if __name__ == "__main__":
    main()
