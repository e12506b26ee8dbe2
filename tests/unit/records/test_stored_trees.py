"""Stored trees come back as they were: forest, masks, log-probs, rewards and advantages, each leaf its own."""

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model

from verl_tree.records import (
    FORMAT_VERSION,
    CallRun,
    StoredLeaf,
    StoredTree,
    end_nodes,
    files,
    forests,
    read_trees,
    write_trees,
)
from verl_tree.testing.synthetic import random_forest
from verl_tree.tree import TokenForest

NAN = float("nan")


def leaf_of(tokens: list[int], *, mask: list[int], log_probs: list[float] | None = None, **values) -> StoredLeaf:
    """Make a leaf whose prompt ends where its mask begins."""
    return StoredLeaf(
        session=values.pop("session", 0),
        leaf=values.pop("leaf", 0),
        token_ids=np.array(tokens),
        prompt_len=len(tokens) - len(mask),
        is_trained=np.array([0] * (len(tokens) - len(mask)) + mask, dtype=bool),
        log_probs=np.array([NAN] * len(tokens) if log_probs is None else log_probs),
        **values,
    )


def assert_same_leaf(left: StoredLeaf, right: StoredLeaf) -> None:
    """Bit for bit; NaN equals NaN."""
    for each in fields(StoredLeaf):
        one, other = getattr(left, each.name), getattr(right, each.name)
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype, each.name
            np.testing.assert_array_equal(one, other, err_msg=each.name, strict=True)
        else:
            assert one == other, each.name


def assert_same_trees(left: list[StoredTree], right: list[StoredTree]) -> None:
    assert [(tree.step, tree.uid) for tree in left] == [(tree.step, tree.uid) for tree in right]
    for one, other in zip(left, right, strict=True):
        for mine, theirs in zip(one.leaves, other.leaves, strict=True):
            assert_same_leaf(mine, theirs)
        for each in fields(TokenForest):
            np.testing.assert_array_equal(
                getattr(one.forest(), each.name), getattr(other.forest(), each.name), strict=True
            )


def random_leaf(rng: np.random.Generator, tokens: np.ndarray, *, row: int) -> StoredLeaf:
    """Masks, log-probs and values drawn for this leaf alone, so that leaves disagree about the tokens they share."""
    prompt_len = int(rng.integers(0, len(tokens) + 1))
    response_len = len(tokens) - prompt_len
    is_trained = np.concatenate([np.zeros(prompt_len, dtype=bool), rng.random(response_len) < 0.5])
    # Half of the leaves agree about log-probs wherever they have any, and differ in their masks only.
    values = -np.arange(len(tokens)) / 7 if rng.random() < 0.5 else -rng.exponential(size=len(tokens))
    log_probs = np.where(is_trained | (rng.random(len(tokens)) < 0.2), values, NAN)
    rewards, advantages = np.zeros(response_len), np.where(is_trained[prompt_len:], rng.normal(), 0)
    rewards[-1:] = rng.normal()
    kind = rng.integers(3)
    return StoredLeaf(
        session=row // 2,
        leaf=row % 2,
        token_ids=tokens,
        prompt_len=prompt_len,
        is_trained=is_trained,
        log_probs=log_probs,
        token_rewards=[None, rewards, rng.normal(size=response_len)][kind],
        token_advantages=[None, advantages, rng.normal(size=response_len)][rng.integers(3)],
        reward_extra_info=[None, {}, {"acc": 0.5, "text": "ü"}][rng.integers(3)],
        min_global_steps=[None, 3][kind % 2],
        max_global_steps=[None, 4][kind % 2],
        calls=tuple(
            CallRun(call, "fork", call, call + 1, *[(), (2, 2 + call)][rng.integers(2)])
            for call in range(min(len(tokens), rng.integers(3)))
        ),
    )


@settings(derandomize=True, deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**20), num_leaves=st.lists(st.integers(1, 9), max_size=4))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, seed: int, num_leaves: list[int]) -> None:
    rng = np.random.default_rng(seed)
    trees = [
        StoredTree(
            step=7,
            uid=f"group-{index}",
            leaves=tuple(
                random_leaf(rng, tokens, row=row)
                for row, tokens in enumerate(random_forest(rng, num_leaves=num, duplicate_probability=0.3))
            ),
        )
        for index, num in enumerate(num_leaves)
    ]
    path = tmp_path_factory.mktemp("trees") / "step.parquet"
    write_trees(path, trees)
    assert_same_trees(read_trees(path), trees)
    assert [forest.num_leaves for forest in forests(path)] == num_leaves
    if trees:
        assert_same_trees(read_trees(path, uid=trees[-1].uid), trees[-1:])


@pytest.fixture
def tree() -> StoredTree:
    """Make the forest of `TokenForest`'s docstring; 2 is trained after 1 on row 1 and only read on the others."""
    rows = [
        leaf_of([1, 2, 3, 4], mask=[0, 1, 1], log_probs=[NAN, NAN, -0.1, -0.2]),
        leaf_of([1, 2, 5], mask=[1, 0], log_probs=[NAN, -0.5, NAN]),
        leaf_of([1, 2], mask=[0]),
        leaf_of([1, 2, 3, 4], mask=[0, 1, 1], log_probs=[NAN, NAN, -0.1, -0.25]),
        leaf_of([7], mask=[1], log_probs=[-1.0]),
    ]
    return StoredTree(step=10, uid="u", leaves=tuple(replace(leaf, session=row) for row, leaf in enumerate(rows)))


def test_rows_are_nodes_and_leaves_lie_where_they_end(tree: StoredTree, tmp_path: Path) -> None:
    write_trees(tmp_path / "t.parquet", [tree])
    assert_same_trees(read_trees(tmp_path / "t.parquet"), [tree])
    rows = pq.read_table(tmp_path / "t.parquet").to_pylist()
    assert [row["token_ids"] for row in rows] == [[1, 2], [3, 4], [5], [7]]
    assert [row["parent"] for row in rows] == [-1, 0, 0, -1]
    assert [row["start"] for row in rows] == [0, 2, 2, 0]
    assert [[leaf["row"] for leaf in row["leaves"]] for row in rows] == [[2], [0, 3], [1], [4]]
    assert {(row["format_version"], row["step"], row["uid"], row["tree"]) for row in rows} == {(3, 10, "u", 0)}
    # Node 0 is told by row 2, its first leaf; row 1 trains the token 2, and only row 1 differs there.
    assert rows[0]["is_trained"] == [False, False]
    assert rows[0]["log_probs"] == [None, None]
    overrides = {leaf["row"]: leaf["overrides"] for row in rows for leaf in row["leaves"]}
    assert overrides[1] == [{"node": 0, "is_trained": [False, True], "log_probs": [None, -0.5]}]
    # Row 3 samples the same tokens as row 0 with another log-prob.
    assert [(each["node"], each["is_trained"]) for each in overrides[3]] == [(1, [True, True])]
    assert overrides[0] == overrides[2] == overrides[4] == []
    assert end_nodes(tree.forest()).tolist() == [1, 2, 0, 1, 3]


def test_leaves_that_differ_in_their_mask_only(tmp_path: Path) -> None:
    trained, read = leaf_of([1, 2, 3], mask=[1, 1]), leaf_of([1, 2, 4], mask=[0, 1])
    tree = StoredTree(step=1, uid="u", leaves=(trained, read))
    write_trees(tmp_path / "t.parquet", [tree])
    assert_same_trees(read_trees(tmp_path / "t.parquet"), [tree])
    rows = pq.read_table(tmp_path / "t.parquet").to_pylist()
    assert [len(leaf["overrides"]) for row in rows for leaf in row["leaves"]] == [0, 1]


def test_a_shared_token_is_stored_once_and_a_constant_advantage_as_one_number(tmp_path: Path) -> None:
    constant = leaf_of([1, 2, 3], mask=[1, 0], token_advantages=[-0.5, 0.0], token_rewards=[0.0, 2.0])
    varying = leaf_of([1, 2, 4], mask=[1, 1], token_advantages=[-0.5, 0.5], token_rewards=[1.0, 2.0])
    assert (constant.advantage, constant.reward) == (-0.5, 2.0)
    assert (varying.advantage, varying.reward) == (None, 3.0)
    write_trees(tmp_path / "t.parquet", [StoredTree(step=1, uid="u", leaves=(constant, varying))])
    rows = pq.read_table(tmp_path / "t.parquet").to_pylist()
    assert sum(len(row["token_ids"]) for row in rows) == 4
    leaves = [leaf for row in rows for leaf in row["leaves"]]
    assert [leaf["token_advantages"] for leaf in leaves] == [None, [-0.5, 0.5]]
    assert [leaf["token_rewards"] for leaf in leaves] == [None, [1.0, 2.0]]
    assert [leaf["advantage"] for leaf in leaves] == [-0.5, None]


def test_a_row_has_verls_names() -> None:
    row = leaf_of([5, 6, 7], mask=[1, 0], log_probs=[NAN, -0.5, NAN], token_rewards=[0.0, 1.0]).row()
    expected = {
        "prompts": [5],
        "responses": [6, 7],
        "input_ids": [5, 6, 7],
        "response_mask": [1, 0],
        "rollout_log_probs": [-0.5, 0.0],
        "rm_scores": [0.0, 1.0],
    }
    assert {name: values.tolist() for name, values in row.items()} == expected
    assert "rollout_log_probs" not in leaf_of([5, 6], mask=[1]).row()


def test_reward_extra_info_is_json_of_numpy_values_too(tmp_path: Path) -> None:
    info = {"acc": np.float32(0.5), "ids": np.arange(2), "pred": "x", "missing": None}
    tree = StoredTree(step=1, uid="u", leaves=(leaf_of([1], mask=[1], reward_extra_info=info),))
    write_trees(tmp_path / "t.parquet", [tree])
    (stored,) = pq.read_table(tmp_path / "t.parquet").to_pylist()[0]["leaves"]
    assert json.loads(stored["reward_extra_info"]) == {"acc": 0.5, "ids": [0, 1], "pred": "x", "missing": None}


def test_a_newer_file_names_both_versions_and_the_remedy(
    tree: StoredTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = files.SCHEMA.with_metadata({files.VERSION_KEY: b"7"})
    monkeypatch.setattr(files, "SCHEMA", newer)
    write_trees(tmp_path / "t.parquet", [tree])
    with pytest.raises(ValueError, match=rf"format version 7 .* up to {FORMAT_VERSION}: .* newer"):
        read_trees(tmp_path / "t.parquet")


def test_a_file_of_version_1_has_calls_without_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its struct of a call ends before the versions of the weights."""
    calls = (CallRun(0, "root", 0, 2, 3, 4), CallRun(1, "fork", 2, 3, None, None))
    old_call = pa.struct(list(files.CALL)[:4])
    old_leaf = pa.struct(
        [(each.name, pa.list_(old_call) if each.name == "calls" else each.type) for each in files.LEAF]
    )
    index = files.SCHEMA.get_field_index("leaves")
    old = files.SCHEMA.set(index, pa.field("leaves", pa.list_(old_leaf)))
    monkeypatch.setattr(files, "LEAF", old_leaf)
    monkeypatch.setattr(files, "SCHEMA", old.with_metadata({files.VERSION_KEY: b"1"}))
    tree = StoredTree(step=1, uid="u", leaves=(leaf_of([1, 2, 3], mask=[1, 1], calls=calls),))
    write_trees(tmp_path / "t.parquet", [tree])
    monkeypatch.undo()
    assert "min_global_steps" not in str(
        pq.read_schema(tmp_path / "t.parquet").field("leaves").type.value_type.field("calls")
    )
    (read,) = read_trees(tmp_path / "t.parquet")
    assert read.leaves[0].calls == (CallRun(0, "root", 0, 2), CallRun(1, "fork", 2, 3))


def test_another_file_is_refused_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(ValueError, match=r"no stored trees: give a file that tree\.dump_dir"):
        read_trees(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"t\.parquet is no parquet file: give one that tree\.dump_dir"):
        read_trees(path)


def test_a_group_that_is_not_in_the_file_is_refused_with_those_that_are(tree: StoredTree, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_trees(path, [replace(tree, uid=f"u-{index}") for index in range(10)])
    with pytest.raises(
        ValueError, match=r"uid='zzz' is not in .*t\.parquet, .* 'u-0', 'u-1', .*'u-7' and 2 more: give"
    ):
        read_trees(path, uid="zzz")
    write_trees(path, [])
    assert read_trees(path) == []
    with pytest.raises(ValueError, match="holds no tree at all"):
        read_trees(path, uid="zzz")


def test_the_documented_trees_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "stored_trees.md").read_text()
    (example,) = [block.split("```")[0] for block in page.split("```python\n")[1:] if "write_trees(" in block]
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "docs/stored_trees.md", "exec"), {})
    assert capsys.readouterr().out == example.rsplit("#", 1)[1].lstrip()


def test_the_documented_fine_tuning_is_that_on_flat_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As printed: the step it takes is that of the mean over the trained tokens of the rewarded leaves, row by row."""
    page = (Path(__file__).parents[3] / "docs" / "stored_trees.md").read_text()
    (example,) = [block.split("```")[0] for block in page.split("```python\n")[1:] if "tree_log_probs(" in block]
    monkeypatch.chdir(tmp_path)
    leaves = [
        leaf_of([1, 2, 3, 4, 5, 6], mask=[1, 1, 0, 1], token_rewards=[0, 0, 0, 1]),
        leaf_of([1, 2, 3, 4, 7], mask=[1, 1, 1], token_rewards=[0, 0, 2], leaf=1),
        leaf_of([1, 2, 3, 8], mask=[1, 1], token_rewards=[0, -1], leaf=2),
    ]
    trees = [StoredTree(step=10, uid="a", leaves=tuple(leaves)), StoredTree(step=10, uid="b", leaves=(leaves[2],))]
    write_trees("runs/trees/step_000010.parquet", trees)
    model, flat = tiny_model().double(), tiny_model().double()
    flat.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    exec(compile(example, "docs/stored_trees.md", "exec"), {"read_trees": read_trees} | locals())
    losses = []
    for leaf in leaves[:2]:
        ids = torch.tensor(leaf.token_ids[None].astype(int))
        scores = flat(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        losses.append(-scores[torch.tensor(leaf.is_trained[1:])].sum())
    (sum(losses) / 6).backward()
    for (name, value), other in zip(model.named_parameters(), flat.parameters(), strict=True):
        step = before[name] - 0.5 * other.grad
        assert (value - step).abs().max() <= 1e-10 * step.abs().max(), name
    assert max((value - before[name]).abs().max() for name, value in model.named_parameters()) > 1e-4


def test_a_write_that_fails_leaves_the_old_file(
    tree: StoredTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "t.parquet"
    write_trees(path, [tree])

    def break_off(_table: pa.Table, where: Path, **_options: object) -> None:
        where.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(files.pq, "write_table", break_off)
    with pytest.raises(OSError, match="disk full"):
        write_trees(path, [tree, tree])
    assert [each.name for each in path.parent.iterdir()] == ["t.parquet"]
    assert len(read_trees(path)) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": np.array([2**31])}, "32-bit"),
        ({"token_ids": np.array([], dtype=int)}, "at least one"),
        ({"prompt_len": 2}, "prompt_len=2 of 1"),
        ({"is_trained": np.ones(2, dtype=bool)}, "is_trained has shape"),
        ({"token_rewards": np.ones(3)}, "token_rewards has shape"),
    ],
)
def test_leaves_that_do_not_fit_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(leaf_of([1], mask=[1]), **change)
    with pytest.raises(ValueError, match="no leaves"):
        StoredTree(step=0, uid="u", leaves=())
