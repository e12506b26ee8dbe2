"""Rollouts stored as trees: one parquet row per node of a group, with the leaves that end there.

    trees of a step ─ write_trees ─▶ step_000010.parquet ─ read_trees ─▶ the same trees ─ forest() ─▶ TokenForest

The unit is the group, so what sessions share is stored once. Leaves may disagree about a token that they share: one
trains it and another only reads it, or two sessions sampled it with different log-probs. A node holds the values of its
first leaf in depth-first order; a leaf that differs has an *override* of that node. `docs/stored_trees.md` documents
every column. Only numpy and pyarrow are needed. Text and messages are not stored, images as thumbnails only.
"""

from verl_tree.records.files import FORMAT_VERSION, SCHEMA, write_trees
from verl_tree.records.reading import forests, holds_trees, read_trees
from verl_tree.records.trees import FOUND, LEFT_OUT, CallRun, ImageRun, StoredLeaf, StoredTree, end_nodes

__all__ = [
    "FORMAT_VERSION",
    "FOUND",
    "LEFT_OUT",
    "SCHEMA",
    "CallRun",
    "ImageRun",
    "StoredLeaf",
    "StoredTree",
    "end_nodes",
    "forests",
    "holds_trees",
    "read_trees",
    "write_trees",
]
