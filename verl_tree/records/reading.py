"""Reading files of stored trees; `file_checks` says whether they hold trees."""

import json
import os
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl_tree.records.file_checks import check_table
from verl_tree.records.files import FORMAT_VERSION, LEAF, VERSION_KEY, root_path
from verl_tree.records.trees import ROLE, CallRun, ImageRun, StoredLeaf, StoredTree
from verl_tree.tree import TokenForest

_NUM_UIDS_NAMED = 8
"""Number of groups that the error about an unknown one lists."""

DAMAGED = "the file is damaged, or another program wrote it; give another file"


def holds_trees(path: str | os.PathLike[str]) -> bool:
    """Return whether a file on this machine is a parquet file of `write_trees`."""
    try:
        return VERSION_KEY in (pq.read_schema(path).metadata or {})
    except (pa.ArrowException, UnicodeDecodeError):
        return False


def read_trees(path: str | os.PathLike[str], *, uid: str | None = None) -> list[StoredTree]:
    """Read the trees of a file of `write_trees` in the order in which they were written; with `uid`, only that group's.

    Tokens, masks and float32 values come back exactly.

    Raises:
        ValueError: The file holds no stored trees, is damaged or of a newer format, or holds no tree of that group.
        OSError: The file does not exist or cannot be read.
    """
    try:
        version = (pq.read_schema(path).metadata or {}).get(VERSION_KEY)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no parquet file: give one that tree.dump_dir or write_trees made") from error
    if version is None:
        raise ValueError(f"{path} holds no stored trees: give a file that tree.dump_dir or write_trees made")
    if not version.isdigit() or not int(version):
        raise ValueError(f"{path} has the format version {version.decode()!r}, which was never written: {DAMAGED}")
    if int(version) > FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {int(version)} and this verl_tree reads up to {FORMAT_VERSION}: "
            "read it with the verl_tree that wrote it, or a newer one"
        )
    try:
        filters = None if uid is None else [("uid", "==", uid)]
        table = pq.read_table(path, filters=filters, page_checksum_verification=True).combine_chunks()
        check_table(table)
        trees = list(_from_table(table))
    except (ValueError, RecursionError, pa.ArrowException) as error:
        raise ValueError(f"{path}: {error}: {DAMAGED}") from error
    if uid is not None and not trees:
        uids = pq.read_table(path, columns=["uid"]).column("uid").unique().to_pylist()
        known = ", ".join(map(repr, uids[:_NUM_UIDS_NAMED])) or "no tree at all"
        more = f" and {len(uids) - _NUM_UIDS_NAMED} more" if len(uids) > _NUM_UIDS_NAMED else ""
        raise ValueError(f"uid={uid!r} is not in {path}, which holds {known}{more}: give a uid of this file")
    return trees


def forests(path: str | os.PathLike[str]) -> list[TokenForest]:
    """Read the forests of a file, one per group, as input of a benchmark."""
    return [tree.forest() for tree in read_trees(path)]


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
        path = root_path(node, parents=parents) if ending else []
        for columns in ending:
            overrides = {each["node"]: each for each in columns["overrides"]}
            if not overrides.keys() <= set(path):
                raise ValueError(f"row {columns['row']} of {uids[0]!r} has values of its own for nodes of other rows")
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
    kept = [row for row in sorted(found) if not found[row].is_left_out]
    known = TokenForest.from_sequences([place_paths[row] for row in kept]) if len(starts) < len(nodes) else None
    thumbnails = {run["number"]: run["thumbnail"] for each in images for run in each if run["thumbnail"] is not None}
    rows = tuple(found[row] for row in kept)
    left_out = tuple(found[row] for row in sorted(found) if found[row].is_left_out)
    return StoredTree(steps[0], uids[0], rows, known_forest=known, thumbnails=thumbnails, left_out=left_out)


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
    info = None if columns["reward_extra_info"] is None else json.loads(columns["reward_extra_info"])
    if not isinstance(info, dict | None):
        raise ValueError(f"row {columns['row']} has a reward_extra_info that is no JSON object")
    role = info.pop(ROLE) if info is not None and isinstance(info.get(ROLE), str) else None
    return StoredLeaf(
        session=columns["session"],
        leaf=columns["leaf"],
        token_ids=token_ids,
        prompt_len=columns["prompt_len"],
        is_trained=is_trained,
        log_probs=log_probs,
        token_rewards=token_rewards,
        token_advantages=token_advantages,
        reward_extra_info=info,
        min_global_steps=columns["min_global_steps"],
        max_global_steps=columns["max_global_steps"],
        calls=tuple(CallRun(**run) for run in columns["calls"]),
        images=images,
        role=role,
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
        for each in LEAF
    ]
    dicts = iter([dict(zip(LEAF.names, values, strict=True)) for values in zip(*fields, strict=True)])
    return [[next(dicts) for _ in range(num)] for num in array.value_lengths().to_pylist()]
