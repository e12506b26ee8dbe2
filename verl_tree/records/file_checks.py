"""Whether a table of stored trees holds trees; a file may be damaged, or made by another program.

Legend: N nodes, leaf rows of all nodes together are L, calls C, overrides O, images I.
"""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from verl_tree.records.files import CALL, FORMAT_VERSION, SCHEMA

_OPTIONAL = {"images"}
"""Columns that older versions lack."""

_OPTIONAL_OF_CALLS = {"min_global_steps", "max_global_steps"}

_LEAST_IMAGE = 2**31
"""Numbers of images are above all token ids."""


def check_table(table: pa.Table) -> None:
    """Raise ValueError, with what is wrong, if the rows of a table are not the nodes of trees."""
    for problems in (_column_problems, _node_problems, _leaf_problems, _image_problems):
        for problem in problems(table):
            raise ValueError(problem)


def _column_problems(table: pa.Table) -> Iterator[str]:
    for wanted in SCHEMA:
        if wanted.name not in table.column_names:
            if wanted.name not in _OPTIONAL:
                yield f"there is no column {wanted.name}"
            continue
        found = table.schema.field(wanted.name).type
        if not _fits(found, wanted.type):
            yield f"the column {wanted.name} has the type {found}, not {wanted.type}"
        elif wanted.name not in _OPTIONAL and table.column(wanted.name).null_count:
            yield f"the column {wanted.name} has no value in some rows"


def _fits(found: pa.DataType, wanted: pa.DataType) -> bool:
    if pa.types.is_list(wanted):
        return pa.types.is_list(found) and _fits(found.value_type, wanted.value_type)
    if not pa.types.is_struct(wanted):
        return found == wanted
    names = [each.name for each in found] if pa.types.is_struct(found) else []
    known = {each.name for each in wanted}
    required = known - _OPTIONAL_OF_CALLS if wanted == CALL else known
    # A name that no version wrote is a damaged one of those that may be missing.
    if not required <= set(names) <= known or len(set(names)) < len(names):
        return False
    return all(_fits(found.field(name).type, wanted.field(name).type) for name in names)


def _node_problems(table: pa.Table) -> Iterator[str]:
    version_N, tree_N, node_N, parent_N, start_N = (
        _numbers(table, name) for name in ("format_version", "tree", "node", "parent", "start")
    )
    if (version_N < 1).any() or (version_N > FORMAT_VERSION).any():
        yield "the column format_version has versions that were never written"
    place_N = np.arange(len(tree_N)) - _first(tree_N)
    if not np.array_equal(node_N, place_N):
        yield "the nodes of a tree are not numbered from 0"
    if (parent_N < -1).any() or (parent_N >= place_N).any():
        yield "a node does not stand behind its parent"
    for name in ("step", "uid"):
        values = table.column(name).combine_chunks().dictionary_encode().indices.to_numpy()
        if (values != values[_first(tree_N)]).any():
            yield f"the nodes of one tree have several values of {name}"
    len_N = _lens(table, "token_ids")
    if (len_N < 1).any():
        yield "a node has no tokens"
    for name in ("is_trained", "log_probs"):
        if not np.array_equal(_lens(table, name), len_N):
            yield f"a node has another number of {name} than of token_ids"
    if table.column("is_trained").combine_chunks().flatten().null_count:
        yield "is_trained of a token is missing"
    token_ids = table.column("token_ids").combine_chunks().flatten()
    if token_ids.null_count or (len(token_ids) and token_ids.to_numpy().min() < 0):
        yield "a token id is negative or missing"
    if not np.array_equal(start_N, np.where(parent_N < 0, 0, _path_len(table)[_first(tree_N) + parent_N])):
        yield "a node does not start where its parent ends"


def _leaf_problems(table: pa.Table) -> Iterator[str]:
    column = table.column("leaves").combine_chunks()
    leaves, owner_L = column.flatten(), _owners(column)
    for name in ("row", "session", "leaf", "len", "prompt_len", "calls", "overrides"):
        if leaves.field(name).null_count:
            yield f"a leaf has no {name}"
            return
    tree_L = _numbers(table, "tree")[owner_L]
    row_L, len_L, prompt_L = (_values(leaves.field(name)) for name in ("row", "len", "prompt_len"))
    order = np.lexsort((row_L, tree_L))
    sorted_tree_L = tree_L[order]
    if not np.array_equal(row_L[order], np.arange(len(order)) - _first(sorted_tree_L)):
        yield "the rows of a tree's leaves are not 0, 1, 2, ..."
    if not np.array_equal(np.unique(tree_L), np.unique(_numbers(table, "tree"))):
        yield "a tree has no leaves"
    if not np.array_equal(len_L, _path_len(table)[owner_L]):
        yield "a leaf has another length than its path"
    if (prompt_L < 0).any() or (prompt_L > len_L).any():
        yield "a prompt is longer than its leaf"
    for name in ("reward", "advantage"):
        values = leaves.field(name).drop_null().to_numpy()
        if not np.isfinite(values).all():
            yield f"a leaf has the {name} inf or NaN"
    rewards, advantages = (leaves.field(name).flatten() for name in ("token_rewards", "token_advantages"))
    if rewards.null_count or advantages.null_count or not np.isfinite(rewards.to_numpy()).all():
        yield "a token's reward or advantage is missing, or its reward is inf or NaN"
    calls = leaves.field("calls")
    if any(calls.flatten().field(name).null_count for name in ("call", "kind")):
        yield "a call has no number or no kind"
    owner_C, start_C, end_C = _owners(calls), *(_values(calls.flatten().field(name)) for name in ("start", "end"))
    if (start_C < 0).any() or (end_C < start_C).any() or (end_C > len_L[owner_C]).any():
        yield "a call has tokens outside of its leaf"
    overrides = leaves.field("overrides")
    node_O, first_O = (
        _values(overrides.flatten().field("node")),
        _first(_numbers(table, "tree"))[owner_L][_owners(overrides)],
    )
    num_nodes = np.bincount(_first(_numbers(table, "tree")), minlength=table.num_rows)
    if (node_O < 0).any() or (node_O >= num_nodes[first_O]).any():
        yield "a leaf has values of its own for a node that there is not"
        return
    if overrides.flatten().field("is_trained").flatten().null_count:
        yield "is_trained of a token is missing"
    for name in ("is_trained", "log_probs"):
        lens_O = _values(overrides.flatten().field(name).value_lengths())
        if not np.array_equal(lens_O, _lens(table, "token_ids")[first_O + node_O]):
            yield f"a leaf has another number of its own {name} than a node has tokens"


def _image_problems(table: pa.Table) -> Iterator[str]:
    if "images" not in table.column_names:
        return
    column = table.column("images").combine_chunks()
    images = column.flatten()
    if column.null_count or any(images.field(name).null_count for name in ("start", "end", "number")):
        yield "an image has no place or no number"
        return
    node_I = _owners(column)
    start_I, end_I, number_I = (_values(images.field(name)) for name in ("start", "end", "number"))
    if (start_I < _numbers(table, "start")[node_I]).any() or (start_I >= _path_len(table)[node_I]).any():
        yield "an image does not start in its node"
    if (end_I <= start_I).any() or (number_I < _LEAST_IMAGE).any():
        yield "an image has no tokens, or the number of a token"


def _numbers(table: pa.Table, name: str) -> np.ndarray:
    return _values(table.column(name).combine_chunks())


def _values(array: pa.Array) -> np.ndarray:
    return array.fill_null(-(2**31)).to_numpy(zero_copy_only=False).astype(np.int64)


def _lens(table: pa.Table, name: str) -> np.ndarray:
    return _values(table.column(name).combine_chunks().value_lengths())


def _owners(lists: pa.ListArray) -> np.ndarray:
    """Return to which list each of all items belongs."""
    return np.repeat(np.arange(len(lists)), _values(lists.value_lengths()))


def _first(group: np.ndarray) -> np.ndarray:
    """Return for each place the first place of its stretch of equal values."""
    is_first = np.diff(group, prepend=-1) != 0
    return np.maximum.accumulate(np.where(is_first, np.arange(len(group)), 0))


def _path_len(table: pa.Table) -> np.ndarray:
    """Return how many tokens there are from the root to the end of each node, (N,)."""
    return _numbers(table, "start") + _lens(table, "token_ids")
