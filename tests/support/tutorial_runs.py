"""What the training runs of the tutorials leave behind."""

import json
from pathlib import Path

import numpy as np

from verl_tree.records import StoredTree, read_trees

NUM_STEPS = 2


def stored(folder: Path) -> list[StoredTree]:
    """Return the trees of all steps."""
    files = sorted(folder.glob("step_*.parquet"))
    assert len(files) == NUM_STEPS
    return [tree for file in files for tree in read_trees(file)]


def rewards(trees: list[StoredTree]) -> np.ndarray:
    """Return the reward of every leaf; each has one."""
    values = np.array([leaf.reward for tree in trees for leaf in tree.leaves], dtype=float)
    assert not np.isnan(values).any()
    return values


def metrics(file: Path) -> list[dict[str, float]]:
    """Return the metrics of the steps, all of which trained on all sessions."""
    steps = [json.loads(line)["data"] for line in file.read_text().splitlines()]
    assert len(steps) == NUM_STEPS
    for step in steps:
        assert step["tree/failed_sessions"] == 0
        assert step["actor/grad_norm"] > 0
    return steps
