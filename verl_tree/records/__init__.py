"""Rollouts on disk as trees: one parquet row per node of a prompt group, its leaves nested where they end.

    trees of a step ─ write_trees ─▶ step_000010.parquet ─ read_trees ─▶ the same trees ─ forest() ─▶ TokenForest

The unit is the group (all sessions of one prompt), so that what sessions share is stored once. Leaves that share a
token may disagree about it: it is trained on one and only read on another, or two sessions sampled it with different
log-probs. A node holds the values of its first leaf in DFS order; a leaf that differs there carries an *override* of
that node. `docs/stored_trees.md` documents every column.

It needs numpy and pyarrow (which verl brings) only. Text, prompts as messages and images are left out.
"""

from verl_tree.records.files import FORMAT_VERSION, SCHEMA, forests, read_trees, write_trees
from verl_tree.records.trees import CallRun, StoredLeaf, StoredTree, end_nodes

__all__ = [
    "FORMAT_VERSION",
    "SCHEMA",
    "CallRun",
    "StoredLeaf",
    "StoredTree",
    "end_nodes",
    "forests",
    "read_trees",
    "write_trees",
]
