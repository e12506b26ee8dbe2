"""Files of stored trees that are damaged, or that another program wrote, are refused with their name."""

import functools
import operator
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fuzzing import fuzzed, outcome
from hypothesis import given
from hypothesis import strategies as st

from verl_tree.records import SCHEMA, CallRun, StoredLeaf, StoredTree, holds_trees, read_trees, write_trees
from verl_tree.records.files import CALL
from verl_tree.records.page import tree_page


def leaf(number: int, ids: list[int], *, log_prob: float = -1.0, **options: object) -> StoredLeaf:
    mask = np.arange(len(ids)) >= 2
    log_probs = np.where(mask, log_prob, np.nan)
    return StoredLeaf(0, number, np.array(ids), 2, is_trained=mask, log_probs=log_probs, **options)


def trees() -> list[StoredTree]:
    """Make two trees: 1 2 and below it 3 4 and 5, twice, once with log-probs of its own."""
    calls = (CallRun(0, "root", 2, 4),)
    rewards = {"token_rewards": np.array([0, 1.0]), "reward_extra_info": {"acc": 1}, "calls": calls}
    leaves = (leaf(0, [1, 2, 3, 4], **rewards), leaf(1, [1, 2, 5]), leaf(2, [1, 2, 3, 4], log_prob=-2.0))
    return [StoredTree(step=7, uid=uid, leaves=leaves) for uid in ("a", "b")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_trees(tmp_path / "t.parquet", trees())
    assert len(read_trees(tmp_path / "t.parquet")) == 2
    return tmp_path / "t.parquet"


def rewrite(path: Path, change) -> None:
    """Write the file anew with rows that `change` has edited, as Python values."""
    rows = pq.read_table(path).to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path)


def setter(column: str, value: object, *, node: int = 1):
    return lambda rows: rows[node].__setitem__(column, value)


def leaf_setter(name: str, value: object, *, node: int = 1, number: int = 0):
    return lambda rows: rows[node]["leaves"][number].__setitem__(name, value)


def image(**changes: int | None) -> dict[str, object]:
    """Return an image on the tokens 2 and 3, which are those of node 1."""
    return {"start": 2, "end": 4, "number": 2**31, "thumbnail": None, **changes}


CHANGES = {
    "parents in a cycle": (setter("parent", 2), "does not stand behind its parent"),
    "parent 10^9": (setter("parent", 10**9), "does not stand behind its parent"),
    "parent -2": (setter("parent", -2), "does not stand behind its parent"),
    "parent null": (setter("parent", None), "the column parent has no value"),
    "another parent": (setter("parent", -1), "does not start where its parent ends"),
    "start": (setter("start", 1), "does not start where its parent ends"),
    "node": (setter("node", 5), "not numbered from 0"),
    "tree null": (setter("tree", None), "the column tree has no value"),
    "uid null": (setter("uid", None), "the column uid has no value"),
    "uid": (setter("uid", "x"), "several values of uid"),
    "step": (setter("step", 8), "several values of step"),
    "version 0": (setter("format_version", 0), "versions that were never written"),
    "version 7": (setter("format_version", 7), "versions that were never written"),
    "negative ids": (setter("token_ids", [-3, 4]), "a token id is negative"),
    "no tokens": (setter("token_ids", []), "a node has no tokens"),
    "mask": (setter("is_trained", [True]), "another number of is_trained"),
    "leaves null": (setter("leaves", None), "the column leaves has no value"),
    "row twice": (leaf_setter("row", 1), "are not 0, 1, 2"),
    "no row": (leaf_setter("row", None), "a leaf has no row"),
    "length": (leaf_setter("len", 10**9), "another length than its path"),
    "prompt": (leaf_setter("prompt_len", 5), "a prompt is longer than its leaf"),
    "reward inf": (leaf_setter("reward", float("inf")), "the reward inf or NaN"),
    "reward NaN": (leaf_setter("reward", float("nan")), "the reward inf or NaN"),
    "calls null": (leaf_setter("calls", None), "a leaf has no calls"),
    "info": (leaf_setter("reward_extra_info", "[" * 100_000), "recursion"),
    "info no JSON": (leaf_setter("reward_extra_info", "{"), "Expecting property name"),
    "rewards": (leaf_setter("token_rewards", [1.0]), "token_rewards has shape"),
    "reward of a token NaN": (leaf_setter("token_rewards", [float("nan"), 0.0]), "its reward is inf or NaN"),
    "reward of a token null": (leaf_setter("token_rewards", [None, 0.0]), "reward or advantage is missing"),
    "info no object": (leaf_setter("reward_extra_info", "3"), "is no JSON object"),
    "mask null": (setter("is_trained", [None, True]), "is_trained of a token is missing"),
    "images null": (setter("images", None), "no place or no number"),
    "image nowhere": (setter("images", [image(start=None)]), "no place or no number"),
    "image of another node": (setter("images", [image(start=0)]), "does not start in its node"),
    "image without tokens": (setter("images", [image(end=2)]), "an image has no tokens"),
    "image with a token's number": (setter("images", [image(number=7)]), "the number of a token"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_rows_that_are_no_trees_are_refused(path: Path, name: str) -> None:
    change, message = CHANGES[name]
    rewrite(path, change)
    with pytest.raises(ValueError, match=rf"t\.parquet: .*{message}.*give another file"):
        read_trees(path)


def test_an_image_in_its_node_is_read(path: Path) -> None:
    rewrite(path, setter("images", [image()]))
    assert [len(leaf.images) for leaf in read_trees(path)[0].leaves] == [1, 0, 1]


JUNK = [None, -1, 0, 1, 3, 10**9, 2**31 - 1, 2**40, 1.5, float("nan"), float("inf"), True, "", "x", "{}", b"x", [], {}]


def places(value: Any, path: tuple = ()):
    """Yield the path of every value inside rows."""
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        if isinstance(each, dict | list):
            yield from places(each, (*path, key))


def change(rows: list, data: st.DataObject) -> None:
    """Set a value, or leave out a row or a value of a list, repeat it, or move it to the end."""
    *path, last = data.draw(st.sampled_from(list(places(rows))))
    inside: Any = functools.reduce(operator.getitem, path, rows)
    what = data.draw(st.sampled_from(["set", "set", "drop", "repeat", "move"]))
    if what == "set" or isinstance(inside, dict):
        inside[last] = data.draw(st.sampled_from(JUNK))
    else:
        kept = inside.pop(last)
        inside += [kept] * {"drop": 0, "repeat": 2, "move": 1}[what]


@fuzzed(50)
@given(st.data())
def test_other_values_are_refused_or_read_as_they_are(data: st.DataObject) -> None:
    """What is read can be shown as a page, and is the same when it is written and read again."""
    with tempfile.TemporaryDirectory() as folder:
        path, again = Path(folder) / "t.parquet", Path(folder) / "again.parquet"
        write_trees(path, trees())
        rows = pq.read_table(path).to_pylist()
        for _ in range(data.draw(st.integers(1, 3))):
            if rows:
                change(rows, data)
        try:
            pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path)
        except (pa.ArrowException, TypeError, ValueError, AttributeError, OverflowError):
            return  # such a file cannot be written
        read, refusal = outcome(lambda: read_trees(path))
        if refusal is not None:
            assert refusal.startswith(f"{path}: ")
            assert refusal.endswith("give another file")
            return
        for tree in read:
            tree_page(tree, None)
        write_trees(again, read)
        assert [content(tree) for tree in read_trees(again)] == [content(tree) for tree in read]


def content(tree: StoredTree) -> list[tuple]:
    return [
        (
            *(tree.uid, tree.step, leaf.session, leaf.leaf, leaf.prompt_len, leaf.reward, leaf.calls, leaf.images),
            *(leaf.token_ids.tolist(), leaf.is_trained.tolist(), str(leaf.log_probs), leaf.reward_extra_info),
        )
        for leaf in tree.leaves
    ]


def test_calls_and_values_of_a_leaf_stay_within_it(path: Path) -> None:
    def longer(rows: list) -> None:
        rows[1]["leaves"][0]["calls"][0]["end"] = 5

    def elsewhere(rows: list) -> None:
        rows[1]["leaves"][1]["overrides"][0]["node"] = 9

    def of_another(rows: list) -> None:
        rows[1]["leaves"][1]["overrides"][0] |= {"node": 2, "is_trained": [True], "log_probs": [0.0]}

    for change, message in ((longer, "outside of its leaf"), (elsewhere, "there is not"), (of_another, "other rows")):
        write_trees(path, trees())
        rewrite(path, change)
        with pytest.raises(ValueError, match=message):
            read_trees(path)


@pytest.mark.parametrize("name", [each for each in SCHEMA.names if each != "images"])
def test_a_column_that_is_missing_or_of_another_type_is_named(path: Path, name: str) -> None:
    table = pq.read_table(path)
    pq.write_table(table.drop_columns([name]), path)
    with pytest.raises(ValueError, match=f"there is no column {name}"):
        read_trees(path)
    index = table.schema.get_field_index(name)
    pq.write_table(table.set_column(index, name, pa.array([{"a": 1.5}] * len(table))), path)
    with pytest.raises(ValueError, match=f"the column {name} has the type struct"):
        read_trees(path)


def test_a_version_that_was_never_written(path: Path) -> None:
    for version in (b"-1", b"0", b"three"):
        metadata = {b"verl_tree.records.format_version": version}
        pq.write_table(pq.read_table(path).replace_schema_metadata(metadata), path)
        with pytest.raises(ValueError, match="which was never written"):
            read_trees(path)


def test_wrong_bytes_are_found(path: Path) -> None:
    """A page has a checksum; a footer that is damaged reads as no parquet file, or as another schema."""
    good, rng = path.read_bytes(), random.Random(0)
    num_read = 0
    for _ in range(100):
        damaged = bytearray(good)
        for _ in range(rng.randint(1, 20)):
            damaged[rng.randrange(len(good))] = rng.randrange(256)
        path.write_bytes(bytes(damaged))
        try:
            read_trees(path)
        except (ValueError, OSError):
            continue
        num_read += 1
    assert num_read <= 3, "what statistics and names of programs say is not looked at"


def test_a_damaged_footer_is_refused_with_the_name_of_the_file(path: Path) -> None:
    """One wrong bit makes names that are no text, and types that Arrow does not have."""
    good, rng = path.read_bytes(), random.Random(0)
    footer_len = int.from_bytes(good[-8:-4], "little")
    refusals: list[ValueError] = []
    for _ in range(400):
        damaged = bytearray(good)
        damaged[-8 - 1 - rng.randrange(footer_len)] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(damaged))
        try:
            assert holds_trees(path) in (True, False)
            read_trees(path)
        except ValueError as error:
            refusals.append(error)
        except OSError:
            continue
    assert all(str(each).startswith(str(path)) for each in refusals)
    assert {pa.ArrowNotImplementedError, UnicodeDecodeError} <= {type(each.__cause__) for each in refusals}


def with_call_of(kind: pa.DataType, call: pa.StructType) -> pa.DataType:
    """Return a type with another one for calls somewhere inside it."""
    if pa.types.is_list(kind):
        return pa.list_(with_call_of(kind.value_type, call))
    if not pa.types.is_struct(kind):
        return kind
    return call if kind == CALL else pa.struct([(each.name, with_call_of(each.type, call)) for each in kind])


def test_a_name_that_no_version_wrote_is_refused(path: Path) -> None:
    """The versions of a call's weights may be missing, as in old files, but not stand under another name."""
    names = [each.name for each in CALL]
    table = pq.read_table(path)
    index = table.schema.get_field_index("leaves")
    for kept, is_read in ((names[:-2], True), ([*names[:-1], "minglobal_steps"], False)):
        call = pa.struct([(name, CALL.field(position).type) for position, name in enumerate(kept)])
        kind = with_call_of(SCHEMA.field("leaves").type, call)
        leaves = pa.array(table.column(index).to_pylist(), type=kind)
        pq.write_table(table.set_column(index, "leaves", leaves), path)
        if is_read:
            assert len(read_trees(path)) == 2
            continue
        with pytest.raises(ValueError, match=r"the column leaves has the type .*minglobal_steps"):
            read_trees(path)
