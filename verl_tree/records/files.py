"""Stored trees as parquet files: the schema, writing and reading.

The trajectories 0 = [1 2 3 4], 1 = [1 2 5], 2 = [1 2], 3 = [1 2 3 4] and 4 = [7] become these rows::

    node  parent  start  token_ids  leaves (row)
       0      -1      0  [1 2]      [2]
       1       0      2  [3 4]      [0 3]
       2       0      2  [5]        [1]
       3      -1      0  [7]        [4]
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl_tree.records.trees import CallRun, ImageRun, StoredLeaf, StoredTree, end_nodes
from verl_tree.tree import TokenForest

FORMAT_VERSION = 3
"""Version of the files that are written. Lower versions can be read, too: in 1, calls have no versions of weights; in 1
and 2, nodes have no images."""

_VERSION_KEY = b"verl_tree.records.format_version"

_NUM_UIDS_NAMED = 8
"""Number of groups that the error about an unknown one lists."""

_OVERRIDE = pa.struct(
    [("node", pa.int32()), ("is_trained", pa.list_(pa.bool_())), ("log_probs", pa.list_(pa.float32()))]
)
_CALL = pa.struct(
    [
        ("call", pa.int32()),
        ("kind", pa.string()),
        ("start", pa.int32()),
        ("end", pa.int32()),
        ("min_global_steps", pa.int64()),
        ("max_global_steps", pa.int64()),
    ]
)
_LEAF = pa.struct(
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
        ("calls", pa.list_(_CALL)),
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
        ("leaves", pa.list_(_LEAF)),
        ("images", pa.list_(_IMAGE)),
    ],
    metadata={_VERSION_KEY: str(FORMAT_VERSION).encode()},
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
        pq.write_table(pa.Table.from_batches(batches, schema=SCHEMA), unfinished, compression="zstd")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def holds_trees(path: str | os.PathLike[str]) -> bool:
    """Return whether a file on this machine is a parquet file of `write_trees`."""
    try:
        return _VERSION_KEY in (pq.read_schema(path).metadata or {})
    except pa.ArrowInvalid:
        return False


def read_trees(path: str | os.PathLike[str], *, uid: str | None = None) -> list[StoredTree]:
    """Read the trees of a file of `write_trees` in the order in which they were written; with `uid`, only that group's.

    Tokens, masks and float32 values come back exactly.

    Raises:
        ValueError: The file holds no stored trees, is of a newer format, or holds no tree of that group.
        OSError: The file does not exist or cannot be read.
    """
    try:
        version = (pq.read_schema(path).metadata or {}).get(_VERSION_KEY)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is no parquet file: give one that tree.dump_dir or write_trees made") from error
    if version is None:
        raise ValueError(f"{path} holds no stored trees: give a file that tree.dump_dir or write_trees made")
    if int(version) > FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {int(version)} and this verl_tree reads up to {FORMAT_VERSION}: "
            "read it with the verl_tree that wrote it, or a newer one"
        )
    table = pq.read_table(path, filters=None if uid is None else [("uid", "==", uid)])
    trees = list(_from_table(table.combine_chunks()))
    if uid is not None and not trees:
        uids = pq.read_table(path, columns=["uid"]).column("uid").unique().to_pylist()
        known = ", ".join(map(repr, uids[:_NUM_UIDS_NAMED])) or "no tree at all"
        more = f" and {len(uids) - _NUM_UIDS_NAMED} more" if len(uids) > _NUM_UIDS_NAMED else ""
        raise ValueError(f"uid={uid!r} is not in {path}, which holds {known}{more}: give a uid of this file")
    return trees


def forests(path: str | os.PathLike[str]) -> list[TokenForest]:
    """Read the forests of a file, one per group, as input of a benchmark."""
    return [tree.forest() for tree in read_trees(path)]


def _to_batch(tree: StoredTree, *, index: int) -> pa.RecordBatch:
    forest = tree.forest()
    num_nodes, parents = forest.num_nodes, forest.node_parent.tolist()
    spans = [slice(*bounds) for bounds in zip(forest.node_start.tolist(), forest.node_end.tolist(), strict=True)]
    owners = [tree.leaves[row] for row in forest.node_sequence.tolist()]
    leaves: list[list[dict[str, Any]]] = [[] for _ in range(num_nodes)]
    for row, (leaf, end) in enumerate(zip(tree.leaves, end_nodes(forest).tolist(), strict=True)):
        overrides = _overrides(leaf, path=_root_path(end, parents=parents), owners=owners, spans=spans)
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
        pa.array(leaves, type=pa.list_(_LEAF)),
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


def _root_path(node: int, *, parents: Sequence[int]) -> list[int]:
    """Return the node and its ancestors, from the root."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def _leaf_columns(leaf: StoredLeaf) -> dict[str, Any]:
    """Return a leaf's own columns; it has per-token lists only where one number is not enough."""
    info = leaf.reward_extra_info
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


def _from_table(table: pa.Table) -> Iterator[StoredTree]:
    columns = [table.column(name).to_pylist() for name in ("tree", "step", "uid", "parent")]
    tokens = [_lists(table.column(name)) for name in ("token_ids", "is_trained", "log_probs")]
    leaves = _leaves(table.column("leaves"))
    # Older files have no such column.
    has_images = "images" in table.column_names
    images = table.column("images").to_pylist() if has_images else [[]] * table.num_rows
    rows = zip(*columns, *tokens, leaves, images, strict=True)
    for _, nodes in groupby(rows, key=lambda row: row[0]):
        yield _tree(list(nodes))


def _tree(nodes: list[tuple[Any, ...]]) -> StoredTree:
    """Make a tree from its nodes in preorder."""
    _, steps, uids, parents, token_ids, is_trained, log_probs, leaves, images = zip(*nodes, strict=True)
    found: dict[int, StoredLeaf] = {}
    places = np.split(np.arange(sum(map(len, token_ids))), np.cumsum([len(each) for each in token_ids])[:-1])
    place_paths: dict[int, np.ndarray] = {}
    for node, ending in enumerate(leaves):
        path = _root_path(node, parents=parents) if ending else []
        for columns in ending:
            overrides = {each["node"]: each for each in columns["overrides"]}
            place_paths[columns["row"]] = np.concatenate([places[n] for n in path])
            masks = [overrides[n]["is_trained"] if n in overrides else is_trained[n] for n in path]
            values = [overrides[n]["log_probs"] if n in overrides else log_probs[n] for n in path]
            found[columns["row"]] = _leaf(
                columns,
                token_ids=np.concatenate([token_ids[n] for n in path]),
                is_trained=np.concatenate([np.asarray(mask, dtype=bool) for mask in masks]),
                # None becomes NaN here.
                log_probs=np.concatenate([np.asarray(each, dtype=np.float32) for each in values]),
                images=tuple(ImageRun(run["start"], run["end"], run["number"]) for n in path for run in images[n]),
            )
    # Nodes that show different images may begin with the same token below one parent. In a file without images the
    # places of tokens say what ids do not.
    starts = {(parent, int(ids[0])) for parent, ids in zip(parents, token_ids, strict=True)}
    known = (
        TokenForest.from_sequences([place_paths[row] for row in sorted(found)]) if len(starts) < len(nodes) else None
    )
    thumbnails = {run["number"]: run["thumbnail"] for each in images for run in each if run["thumbnail"] is not None}
    rows = tuple(found[row] for row in sorted(found))
    return StoredTree(steps[0], uids[0], rows, known_forest=known, thumbnails=thumbnails)


def _leaf(
    columns: dict[str, Any],
    *,
    token_ids: np.ndarray,
    is_trained: np.ndarray,
    log_probs: np.ndarray,
    images: tuple[ImageRun, ...],
) -> StoredLeaf:
    response = slice(columns["prompt_len"], None)
    token_rewards, token_advantages = columns["token_rewards"], columns["token_advantages"]
    if token_rewards is None and columns["reward"] is not None:
        token_rewards = np.zeros(len(token_ids[response]), dtype=np.float32)
        token_rewards[-1:] = columns["reward"]
    if token_advantages is None and columns["advantage"] is not None:
        token_advantages = np.where(is_trained[response], np.float32(columns["advantage"]), np.float32(0))
    info = columns["reward_extra_info"]
    return StoredLeaf(
        session=columns["session"],
        leaf=columns["leaf"],
        token_ids=token_ids,
        prompt_len=columns["prompt_len"],
        is_trained=is_trained,
        log_probs=log_probs,
        token_rewards=token_rewards,
        token_advantages=token_advantages,
        reward_extra_info=None if info is None else json.loads(info),
        min_global_steps=columns["min_global_steps"],
        max_global_steps=columns["max_global_steps"],
        calls=tuple(CallRun(**run) for run in columns["calls"]),
        images=images,
    )


def _lists(column: pa.ChunkedArray | pa.ListArray) -> list[np.ndarray | None]:
    """Return a column of lists as one array per entry, a view; None for null."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    values = array.flatten().to_numpy(zero_copy_only=False)
    lens = np.array([length or 0 for length in array.value_lengths().to_pylist()], dtype=np.int64)
    arrays = np.split(values, np.cumsum(lens)[:-1]) if len(lens) else []
    return [each if is_valid else None for each, is_valid in zip(arrays, array.is_valid().to_pylist(), strict=True)]


def _leaves(column: pa.ChunkedArray) -> list[list[dict[str, Any]]]:
    """Return the leaves of each node; per-token lists are arrays, everything else Python values."""
    array = column.combine_chunks()
    leaves = array.flatten()
    per_token = ("token_rewards", "token_advantages")
    fields = [
        _lists(leaves.field(each.name)) if each.name in per_token else leaves.field(each.name).to_pylist()
        for each in _LEAF
    ]
    dicts = iter([dict(zip(_LEAF.names, values, strict=True)) for values in zip(*fields, strict=True)])
    return [[next(dicts) for _ in range(num)] for num in array.value_lengths().to_pylist()]
