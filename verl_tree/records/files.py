"""Stored trees as parquet files: the schema, and how they are written; reading.py reads them.

The trajectories 0 = [1 2 3 4], 1 = [1 2 5], 2 = [1 2], 3 = [1 2 3 4] and 4 = [7] become these rows::

    node  parent  start  token_ids  leaves (row)
       0      -1      0  [1 2]      [2]
       1       0      2  [3 4]      [0 3]
       2       0      2  [5]        [1]
       3      -1      0  [7]        [4]
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl_tree.records.trees import ROLE, StoredLeaf, StoredTree, end_nodes

FORMAT_VERSION = 3
"""Version of the files that are written. Lower versions can be read, too: in 1, calls have no versions of weights; in 1
and 2, nodes have no images."""

VERSION_KEY = b"verl_tree.records.format_version"

_OVERRIDE = pa.struct(
    [("node", pa.int32()), ("is_trained", pa.list_(pa.bool_())), ("log_probs", pa.list_(pa.float32()))]
)
CALL = pa.struct(
    [
        ("call", pa.int32()),
        ("kind", pa.string()),
        ("start", pa.int32()),
        ("end", pa.int32()),
        ("min_global_steps", pa.int64()),
        ("max_global_steps", pa.int64()),
    ]
)
LEAF = pa.struct(
    [
        ("row", pa.int32()),
        ("session", pa.int32()),
        ("leaf", pa.int32()),
        ("len", pa.int32()),
        ("prompt_len", pa.int32()),
        ("reward", pa.float64()),
        ("token_rewards", pa.list_(pa.float32())),
        ("advantage", pa.float32()),
        ("token_advantages", pa.list_(pa.float32())),
        ("reward_extra_info", pa.string()),
        ("min_global_steps", pa.int64()),
        ("max_global_steps", pa.int64()),
        ("calls", pa.list_(CALL)),
        ("overrides", pa.list_(_OVERRIDE)),
    ]
)
_IMAGE = pa.struct([("start", pa.int32()), ("end", pa.int32()), ("number", pa.int64()), ("thumbnail", pa.binary())])
SCHEMA = pa.schema(
    [
        ("format_version", pa.int32()),
        ("step", pa.int64()),
        ("uid", pa.string()),
        ("tree", pa.int32()),
        ("node", pa.int32()),
        ("parent", pa.int32()),
        ("start", pa.int32()),
        ("token_ids", pa.list_(pa.int32())),
        ("is_trained", pa.list_(pa.bool_())),
        ("log_probs", pa.list_(pa.float32())),
        ("leaves", pa.list_(LEAF)),
        ("images", pa.list_(_IMAGE)),
    ],
    metadata={VERSION_KEY: str(FORMAT_VERSION).encode()},
)
"""One row per node, the nodes of a tree in preorder. The file's metadata have the format version, too."""


def write_trees(path: str | os.PathLike[str], trees: Iterable[StoredTree]) -> None:
    """Write trees, possibly none, to one parquet file; its name never stands for a half-written file.

    The folder is made, and a file of that name is replaced.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    batches = [_to_batch(tree, index=index) for index, tree in enumerate(trees)]
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        pq.write_table(
            pa.Table.from_batches(batches, schema=SCHEMA), unfinished, compression="zstd", write_page_checksum=True
        )
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _to_batch(tree: StoredTree, *, index: int) -> pa.RecordBatch:
    tree = tree.shown()
    forest = tree.forest()
    num_nodes, parents = forest.num_nodes, forest.node_parent.tolist()
    spans = [slice(*bounds) for bounds in zip(forest.node_start.tolist(), forest.node_end.tolist(), strict=True)]
    owners = [tree.leaves[row] for row in forest.node_sequence.tolist()]
    leaves: list[list[dict[str, Any]]] = [[] for _ in range(num_nodes)]
    for row, (leaf, end) in enumerate(zip(tree.leaves, end_nodes(forest).tolist(), strict=True)):
        overrides = _overrides(leaf, path=root_path(end, parents=parents), owners=owners, spans=spans)
        leaves[end].append({"row": row, **_leaf_columns(leaf), "overrides": overrides})

    nodes = list(zip(owners, spans, strict=True))
    log_probs = np.concatenate([owner.log_probs[span] for owner, span in nodes])
    offsets = np.concatenate([[0], np.cumsum(forest.node_end - forest.node_start)]).astype(np.int32)
    tokens = [
        pa.array(np.concatenate([owner.token_ids[span] for owner, span in nodes])),
        pa.array(np.concatenate([owner.is_trained[span] for owner, span in nodes])),
        pa.array(log_probs, mask=np.isnan(log_probs)),
    ]
    columns = [
        pa.array([FORMAT_VERSION] * num_nodes, type=pa.int32()),
        pa.array([tree.step] * num_nodes, type=pa.int64()),
        pa.array([tree.uid] * num_nodes, type=pa.string()),
        pa.array([index] * num_nodes, type=pa.int32()),
        pa.array(range(num_nodes), type=pa.int32()),
        pa.array(parents, type=pa.int32()),
        pa.array([span.start for span in spans], type=pa.int32()),
        *(pa.ListArray.from_arrays(offsets, values) for values in tokens),
        pa.array(leaves, type=pa.list_(LEAF)),
        pa.array(_images(nodes, thumbnails=tree.thumbnails), type=pa.list_(_IMAGE)),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _images(
    nodes: Iterable[tuple[StoredLeaf, slice]], *, thumbnails: Mapping[int, bytes]
) -> list[list[dict[str, Any]]]:
    """Return the images of each node; the first place of an image has its thumbnail."""
    left = dict(thumbnails)
    return [
        [
            {**asdict(run), "thumbnail": left.pop(run.number, None)}
            for run in owner.images
            if span.start <= run.start < span.stop
        ]
        for owner, span in nodes
    ]


def root_path(node: int, *, parents: Sequence[int]) -> list[int]:
    """Return the node and its ancestors, from the root."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def _leaf_columns(leaf: StoredLeaf) -> dict[str, Any]:
    """Return a leaf's own columns; it has per-token lists only where one number is not enough."""
    info = leaf.reward_extra_info
    if leaf.role is not None:
        info = {**(info or {}), ROLE: leaf.role}
    is_reward_last = leaf.token_rewards is None or not leaf.token_rewards[:-1].any()
    is_constant = leaf.token_advantages is None or leaf.advantage is not None
    return {
        "session": leaf.session,
        "leaf": leaf.leaf,
        "len": len(leaf.token_ids),
        "prompt_len": leaf.prompt_len,
        "reward": leaf.reward,
        "token_rewards": None if is_reward_last else leaf.token_rewards,
        "advantage": leaf.advantage,
        "token_advantages": None if is_constant else leaf.token_advantages,
        "reward_extra_info": None if info is None else json.dumps(info, default=_json_value),
        "min_global_steps": leaf.min_global_steps,
        "max_global_steps": leaf.max_global_steps,
        "calls": [asdict(run) for run in leaf.calls],
    }


def _json_value(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)


def _overrides(
    leaf: StoredLeaf, *, path: Sequence[int], owners: Sequence[StoredLeaf], spans: Sequence[slice]
) -> list[dict[str, Any]]:
    """Find the nodes of a leaf's path on which its mask or log-probs differ from those of the node's owner."""
    overrides = []
    for node in path:
        owner, span = owners[node], spans[node]
        is_trained, log_probs = leaf.is_trained[span], leaf.log_probs[span]
        is_same = np.array_equal(is_trained, owner.is_trained[span])
        if is_same and np.array_equal(log_probs, owner.log_probs[span], equal_nan=True):
            continue
        # None becomes null, as in the nodes.
        values = np.where(np.isnan(log_probs), np.array(None), log_probs).tolist()
        overrides.append({"node": node, "is_trained": is_trained, "log_probs": values})
    return overrides
