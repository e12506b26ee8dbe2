"""Columns of rows as bytes: what is read is what was written, and each token is written once."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_hooks.capture.wire_columns import ColumnReader, Place, PromptColumns, read_value
from verl_tree.testing.synthetic import caterpillar, star, tool_fan_out, tree_search

Row = dict[str, Any]
DTYPES = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
DTYPES += [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SHAPES = {
    "star": lambda seed: star(6, prompt_len=40, branch_len=(1, 30), seed=seed),
    "tool_fan_out": lambda seed: tool_fan_out(
        3, prompt_len=20, plan_len=(1, 9), call_len=(1, 9), result_len=(1, 9), seed=seed
    ),
    "tree_search": lambda seed: tree_search(prompt_len=20, step_len=(1, 12), seed=seed),
    "caterpillar": lambda seed: caterpillar(
        5, system_len=20, question_len=(1, 9), thinking_len=(1, 20), answer_len=(1, 9), seed=seed
    ),
}


def row_of(token_ids: Sequence[int], prompt_len: int, **more: Any) -> Row:
    """Make the columns of a row as verl has them; more columns may be given."""
    ids = torch.tensor(token_ids, dtype=torch.int64)
    mask = torch.ones(len(ids) - prompt_len, dtype=torch.int64)
    parts = {"prompts": ids[:prompt_len], "responses": ids[prompt_len:]}
    scores = torch.zeros(len(mask))
    scores[-1:] = 0.5
    known = {"input_ids": ids, "position_ids": torch.arange(len(ids)), "response_mask": mask, "rm_scores": scores}
    return {**parts, **known, "uid": "a", "raw_prompt": [{"role": "user", "content": "x" * 99}], **more}


def write(rows: Sequence[Row], *, prompt: PromptColumns, first: int = 0) -> dict[Place, Any]:
    """Write rows as one message, and return what is stored."""
    draft = prompt.copy()
    encoded = [draft.encode(row, place) for place, row in enumerate(rows, first)]
    stored = {(name, place): value for place, row in enumerate(encoded, first) for name, value in row.items()}
    prompt.take(draft)
    return stored


def assert_same(left: Any, right: Any) -> None:
    """Check that two values are the same, bit for bit and of the same type."""
    if not isinstance(right, torch.Tensor):
        assert (type(left), left) == (type(right), right)
        return
    assert (left.dtype, left.shape) == (right.dtype, right.shape)
    if right.numel():
        assert torch.equal(*(each.contiguous().flatten().view(torch.uint8) for each in (left, right)))


def check_read(stored: Mapping[Place, Any], rows: Mapping[int, Row]) -> None:
    """Check what is read of some rows, given what is stored of all."""
    reader = ColumnReader(stored)
    for index, row in rows.items():
        for name, expected in row.items():
            assert not reader.missing([(name, index)])
            assert_same(reader.read((name, index)), expected)
    for name in set.intersection(*(set(row) for row in rows.values())):
        check_nested(reader.read_nested(name, list(rows)), [row[name] for row in rows.values()])


def check_nested(column: torch.Tensor | None, expected: Sequence[Any]) -> None:
    """Check that a column which is read at once is what the queue makes of its rows' values."""
    if column is not None:
        whole = torch.nested.as_nested_tensor(list(expected), layout=torch.jagged)
        assert_same(column.values(), whole.values())
        assert torch.equal(column.offsets(), whole.offsets())
        assert vars(column)["_metadata_cache"].keys() == vars(whole)["_metadata_cache"].keys()
        assert (column._get_min_seqlen(), column._get_max_seqlen()) == (
            whole._get_min_seqlen(),
            whole._get_max_seqlen(),
        )


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_of_a_forest_are_written_once_and_read_as_they_were(shape: str) -> None:
    """Log-probs depend on the tokens before, so rows that share a prefix have the same there and nowhere else."""
    for seed in range(3):
        paths = [path.tolist() for path in SHAPES[shape](seed)]
        num_shared = next(n for n in range(99) if len({tuple(path[: n + 1]) for path in paths}) > 1)
        prefixes = [[tuple(path[:n]) for n in range(1, len(path) + 1)] for path in paths]
        nodes = {node: number for number, node in enumerate(dict.fromkeys(chain.from_iterable(prefixes)))}
        log_probs = [-torch.tensor([float(nodes[node]) for node in path[num_shared:]]) for path in prefixes]
        rows = [row_of(path, num_shared, rollout_log_probs=of) for path, of in zip(paths, log_probs, strict=True)]
        prompt, stored, half = PromptColumns(), {}, len(rows) // 2
        stored |= write(rows[:half], prompt=prompt) | write(rows[half:], prompt=prompt, first=half)
        check_read(stored, dict(enumerate(rows)))
        assert ColumnReader(stored).read_nested("rollout_log_probs", range(len(rows))) is not None
        for name, num_nodes in {"input_ids": len(nodes), "rollout_log_probs": len(nodes) - num_shared}.items():
            values = [read_value(stored[name, index]) for index in range(len(rows))]
            num_own = sum(len(value.own) for value in values if value is not None)
            # A few elements are cheaper again than by reference.
            assert num_nodes <= num_own <= num_nodes + 3 * len(rows), name


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_column_is_read_as_it_was_written(data: st.DataObject) -> None:
    """Any dtype, NaN and -0 among the numbers, any number of axes, prompts of any length, equal and empty rows."""
    draw = data.draw
    axes = draw(st.lists(st.integers(0, 3), max_size=2))
    dtype = draw(st.sampled_from(DTYPES))
    rows: list[Row] = []
    for _ in range(draw(st.integers(1, 6))):
        path = draw(st.lists(st.integers(0, 2), min_size=2, max_size=30))
        if rows and draw(st.booleans()):
            path = [*rows[-1]["input_ids"][: draw(st.integers(0, 20))].tolist(), *path]
        prompt_len = draw(st.integers(1, len(path) - 1))
        num = draw(st.sampled_from([0, 1, len(path), len(path) - prompt_len]))
        size = num * int(np.prod(axes, dtype=int)) * dtype.itemsize
        kinds = st.sampled_from([b"\0", b"\x01"]) if dtype == torch.bool else st.sampled_from([b"\0", b"\xff", b"\x80"])
        column = torch.frombuffer(bytearray(b"".join(draw(kinds) for _ in range(size)) + b"\0" * 8), dtype=torch.uint8)
        other = column[:size].view(dtype).reshape(num, *axes) if size else torch.zeros((num, *axes), dtype=dtype)
        texts = draw(st.sampled_from(["a", "b" * 99, "c" * 99]))
        rows.append(row_of(path, prompt_len, other=other, scalar=torch.tensor(2.0), extra={"texts": [texts, 1, None]}))
    prompt, stored = PromptColumns(), {}
    for first, row in enumerate(rows):
        stored |= write([row], prompt=prompt, first=first)
    check_read(stored, dict(enumerate(rows)))


def test_a_longer_prompt_moves_the_columns_of_the_response() -> None:
    tokens = list(range(7, 47))
    log_probs = -torch.arange(40.0)
    rows = [row_of(tokens, num, rollout_log_probs=log_probs[num:]) for num in (10, 14, 9)]
    stored = write(rows, prompt=PromptColumns())
    check_read(stored, dict(enumerate(rows)))
    values = [read_value(stored["rollout_log_probs", index]) for index in range(3)]
    assert [len(value.own) for value in values if value is not None] == [30, 0, 31]


def test_a_row_that_was_not_written_is_not_referred_to() -> None:
    prompt, rows = PromptColumns(), [row_of(range(7, 47), 10), row_of([*range(7, 46), 50], 10)]
    prompt.copy().encode(rows[0], 0)  # its message failed
    check_read(write(rows[1:], prompt=prompt, first=1), {1: rows[1]})


def test_a_row_is_written_once() -> None:
    prompt = PromptColumns()
    write([row_of([1, 2], 1)], prompt=prompt)
    with pytest.raises(AssertionError, match="others refer"):
        write([row_of([1, 3], 1)], prompt=prompt)


def test_a_reader_asks_for_what_other_rows_hold() -> None:
    prompt, rows = PromptColumns(), [row_of(range(7, 47), 10), row_of([*range(7, 46), 50], 10)]
    stored = write(rows, prompt=prompt)
    known = {place: stored[place] for place in [("responses", 1), ("raw_prompt", 1), ("rm_scores", 0)]}
    reader = ColumnReader(known)
    places = list(known)
    assert reader.missing(places) == {("input_ids", 1), ("raw_prompt", 0)}
    known |= {place: stored[place] for place in reader.missing(places)}
    assert reader.missing(places) == {("input_ids", 0)}
    known |= {place: stored[place] for place in reader.missing(places)}
    assert not reader.missing(places)
    assert_same(reader.read(("responses", 1)), rows[1]["responses"])


@pytest.mark.parametrize("later", [torch.ones(30, dtype=torch.int64), None], ids=["written again", "another prompt's"])
def test_what_is_no_longer_there_is_an_error(later: torch.Tensor | None) -> None:
    prompt, rows = PromptColumns(), [row_of(range(7, 47), 10), row_of([*range(7, 46), 50], 10)]
    stored = write(rows, prompt=prompt)
    if later is None:
        stored |= write(rows[:1], prompt=PromptColumns())
    else:
        stored["response_mask", 0] = later
    with pytest.raises(RuntimeError, match=r"'response_mask' of row 0 .* transfer_queue.backend.SimpleStorage.trees="):
        ColumnReader(stored).read(("response_mask", 1))


def test_an_object_is_no_other_rows_object() -> None:
    """A reward function may change what it reads."""
    rows = [row_of([1, 2], 1), row_of([1, 3], 1)]
    reader = ColumnReader(write(rows, prompt=PromptColumns()))
    first, second = (reader.read(("raw_prompt", index)) for index in range(2))
    first[0]["content"] = ""
    assert second == rows[1]["raw_prompt"]


def test_rows_without_verls_columns_stay_as_they_are() -> None:
    row = {"prompts": torch.tensor([1]), "responses": torch.tensor([2]), "input_ids": torch.tensor([1, 2, 3])}
    assert PromptColumns().encode(row, 0) == row
    row = {name: torch.tensor(ids, dtype=torch.int32) for name, ids in [("prompts", [1]), ("responses", [2])]}
    row["input_ids"] = torch.cat([*row.values()])
    assert PromptColumns().encode(row, 0) == row
    assert PromptColumns().encode({"a": 1}, 0) == {"a": 1}
