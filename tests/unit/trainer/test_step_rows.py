"""The rows of a step: found by their keys, profiled from shapes. TransferQueue itself is in tests/e2e."""

import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("verl")

import torch
import transfer_queue as tq
from scripted_llm import END, ScriptedClient, call_text, run_loop, tokenizer
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from rollout_hooks.capture.leaf_shapes import LEAF_SHAPE, LEAF_SHAPE_TAG, WrittenRow, leaf_shapes
from rollout_hooks.capture.recording import RecordingClient
from rollout_hooks.capture.rows import RowLimits, session_rows
from rollout_hooks.capture.session_tree import SessionTree
from verl_tree.cost.model import Work, WorkProfile
from verl_tree.records import CallRun, StoredTree, read_trees, write_trees
from verl_tree.records.page.content import page_content
from verl_tree.trainer.row_keys import group_rows
from verl_tree.trainer.rows import step_rows as step_rows_module
from verl_tree.trainer.rows import step_tokens
from verl_tree.trainer.rows.batching import MiniBatchPlan, RowAssignment
from verl_tree.trainer.rows.calls import calls_of_row
from verl_tree.trainer.rows.step_rows import StepRows, shapes_of_columns
from verl_tree.trainer.rows.step_tokens import cells_of, fetch_calls, fetch_trees, flat_counts
from verl_tree.tree import TokenForest

TAG = {"min_global_steps": 3, "max_global_steps": 4}


def row_of(response: Sequence[int], mask: Sequence[int], log_probs: Sequence[float], **values: Any) -> dict[str, Any]:
    """Make a row with the prompt 1 2."""
    prompt, tokens = torch.tensor([1, 2]), torch.tensor(response)
    row = {
        "prompts": prompt,
        "responses": tokens,
        "input_ids": torch.cat([prompt, tokens]),
        "response_mask": torch.tensor(mask),
        "rollout_log_probs": torch.tensor(log_probs),
        "extra_fields": {},
    }
    return row | values


def columns_of(rows: dict[str, dict[str, Any]]) -> TensorDict:
    return list_of_dict_to_tensordict(list(rows.values()))


def step_rows(rows: dict[str, dict[str, Any]]) -> StepRows:
    """Make the rows of a step as the driver finds them where their writers gave no shape."""
    return StepRows(list(rows), shapes_of_columns(list(rows), columns_of(rows)))


def trees_of(rows: dict[str, dict[str, Any]], *, tag: dict[str, int] = TAG, step: int = 0) -> list[StoredTree]:
    return step_tokens.trees_of(list(rows), tags=[tag] * len(rows), columns=columns_of(rows), step=step)


ROWS = {
    "b_0_0": row_of([5], [1], [-1.0]),
    "a_1_0": row_of([3, 4], [1, 0], [-0.5, 0.0]),
    "a_0_1": row_of([3, 6, 7], [1, 0, 1], [-0.25, 0.0, -2.0]),
    "a_0_0": row_of([8], [1], [0.0]),
}


def test_rows_become_trees_in_the_order_of_groups_sessions_and_leaves() -> None:
    trees = trees_of(ROWS, step=9)
    assert [(tree.step, tree.uid, [(leaf.session, leaf.leaf) for leaf in tree.leaves]) for tree in trees] == [
        (9, "a", [(0, 0), (0, 1), (1, 0)]),
        (9, "b", [(0, 0)]),
    ]
    last = trees[0].leaves[1]
    assert last.token_ids.tolist() == [1, 2, 3, 6, 7]
    assert last.prompt_len == 2
    assert last.is_trained.tolist() == [False, False, True, False, True]
    np.testing.assert_array_equal(last.log_probs, np.float32([np.nan, np.nan, -0.25, np.nan, -2.0]))
    assert (last.min_global_steps, last.max_global_steps) == (3, 4)
    assert (last.reward, last.token_advantages, last.calls) == (None, None, ())
    # A token that was sampled with certainty has a log-prob of 0, one that was only read has none.
    assert trees[0].leaves[0].log_probs[-1] == 0


def test_what_becomes_known_later_is_found_for_the_row_it_belongs_to() -> None:
    """Rows were reordered and one was dropped; rollout correction took a token out of the mask."""
    keys = ["a_0_1", "b_0_0", "a_1_0"]
    results = {
        key: ROWS[key]
        | {
            "advantages": torch.full((len(ROWS[key]["responses"]),), float(len(key))),
            "rm_scores": torch.ones(len(ROWS[key]["responses"])),
        }
        for key in keys
    }
    results["a_0_1"] |= {"response_mask": torch.tensor([1, 0, 0])}
    trees = trees_of(results, step=1)
    assert [[(leaf.session, leaf.leaf) for leaf in tree.leaves] for tree in trees] == [[(0, 1), (1, 0)], [(0, 0)]]
    assert trees[0].leaves[0].is_trained.tolist() == [False, False, True, False, False]
    assert [leaf.token_rewards.sum() for tree in trees for leaf in tree.leaves] == [3.0, 2.0, 1.0]
    assert [len(leaf.token_advantages) for tree in trees for leaf in tree.leaves] == [3, 2, 1]


def test_leaves_that_made_no_row_are_stored_and_shown_and_not_counted(tmp_path: Path) -> None:
    left_out = [("abandoned", 2, [1, 2, 3, 9], [(1, "fork", 3, 4, None, None)])]
    rows = ROWS | {"a_0_1": ROWS["a_0_1"] | {"extra_fields": {"left_out_leaves": left_out}}}
    trees = trees_of(rows, step=9)
    write_trees(tmp_path / "trees.parquet", trees)
    for tree in (trees[0], read_trees(tmp_path / "trees.parquet")[0]):
        assert [(leaf.session, leaf.leaf) for leaf in tree.leaves] == [(0, 0), (0, 1), (1, 0)]
        assert tree.forest().num_tokens == 7  # 1 2, then 8, 3 and behind it 6 7 and 4
        (leaf,) = tree.left_out
        assert (leaf.session, leaf.leaf, leaf.token_ids.tolist(), leaf.prompt_len) == (0, 2, [1, 2, 3, 9], 2)
        assert (leaf.reward, leaf.is_trained.any(), leaf.calls) == (None, False, (CallRun(1, "fork", 3, 4),))
        page = page_content(tree, tokenizer=None)
        assert page["leaves"][-1]["info"] == {"left_out": "abandoned"}
        assert (page["num_tree_tokens"], sum(node["num_tokens"] for node in page["nodes"])) == (7, 8)


def test_roles_are_read_from_tags_and_stored_and_shown(tmp_path: Path) -> None:
    """The way of a role from the tag of a row to the page of its tree, for rows and for a leaf that made none."""
    left_out = [("dropped", 2, [1, 2, 3, 9], [(1, "fork", 3, 4, None, None)], "worker")]
    info = {"reward_extra_info": {"acc": 1}}
    rows = ROWS | {
        "a_0_1": ROWS["a_0_1"] | {"extra_fields": info},
        "a_1_0": ROWS["a_1_0"] | {"extra_fields": {"left_out_leaves": left_out}},
    }
    roles = {"a_0_1": "worker", "a_1_0": "planner"}
    tags = [TAG | ({"leaf_role": roles[key]} if key in roles else {}) for key in rows]
    trees = step_tokens.trees_of(list(rows), tags=tags, columns=columns_of(rows), step=9)
    write_trees(tmp_path / "trees.parquet", trees)
    again = read_trees(tmp_path / "trees.parquet")
    for first, second in (trees, again):
        assert [(leaf.session, leaf.leaf, leaf.role) for leaf in first.leaves + first.left_out] == [
            (0, 0, None),
            (0, 1, "worker"),
            (1, 0, "planner"),
            (1, 1, "worker"),
        ]
        assert [leaf.reward_extra_info or {} for leaf in first.leaves] == [{}, {"acc": 1}, {}]
        assert first.left_out[0].reward_extra_info == {"left_out": "dropped"}
        assert [leaf.role for leaf in second.leaves] == [None]
        page = page_content(first, tokenizer=None)
        assert page["roles"] == ["planner", "worker"]
        assert [leaf["role"] for leaf in page["leaves"]] == [None, "worker", "planner", "worker"]
        assert page["leaves"][1]["info"] == {"acc": "1"}
        assert page_content(second, tokenizer=None)["roles"] == []


def batch_of(tags: dict[str, dict[str, Any]]) -> KVBatchMeta:
    return KVBatchMeta(keys=list(tags), tags=list(tags.values()), partition_id="train", fields=None, extra_info={})


def shaped(**tags: Any) -> dict[str, Any]:
    """Return the tags of a row that is alone in its group."""
    shapes = leaf_shapes([WrittenRow.of([1, 2, 3], response_mask=[1], reward=0.5)])
    return {LEAF_SHAPE_TAG: shapes[0].tobytes(), **tags}


def test_the_rows_of_a_step_know_their_roles() -> None:
    tags = {"a_0_0": shaped(leaf_role="p"), "b_0_0": shaped(), "c_0_0": shaped(leaf_role="w")}
    rows = StepRows.fetch(batch_of(tags))
    assert rows.roles == {"a_0_0": "p", "c_0_0": "w"}
    assert rows.take([1, 2]).roles == {"c_0_0": "w"}
    assert rows.select(["b_0_0"]).roles == {}
    assert (rows.take([0]) | rows.take([2, 1])).roles == rows.roles
    told = rows.announcement(weigh_sessions=False)
    assert told.groups == ["a|p", "b|", "c|w"]
    assert told.lone() == [0, 2]
    assert rows.take([1]).announcement(weigh_sessions=False).groups == ["b"]
    assert rows.role_weights({"p": 0.5, "q": 3}) == [0.5, 1.0, 1.0]


def test_rows_of_mixed_groups_are_those_that_something_is_learnt_from() -> None:
    """Rewards of prompt a differ, b's are equal; c is alone with a reward, d without; a role is a group of its own."""
    rewards = {"a_0_0": 1.0, "a_1_0": 0.0, "b_0_0": 1.0, "b_1_0": 1.0, "c_0_0": 1.0, "d_0_0": 0.0, "a_1_1": 1.0}
    rows = StepRows(list(rewards), np.zeros(len(rewards), LEAF_SHAPE))
    rows.shapes["reward"] = list(rewards.values())
    assert rows.of_mixed_groups().tolist() == [True, True, False, False, True, False, True]
    of_roles = replace(rows, roles={"a_0_0": "planner", "a_1_1": "planner"})
    assert of_roles.of_mixed_groups().tolist() == [False, False, False, False, True, False, False]


def test_rows_of_equal_rewards_cost_nothing_if_they_are_left_out() -> None:
    rows = step_rows(ROWS)
    live = np.array([key != "a_0_1" for key in rows.keys])
    (group, _) = rows.profiles(live=live)
    (left, _) = step_rows({key: row for key, row in ROWS.items() if key != "a_0_1"}).profiles()
    assert group.range_work(0, 3) == left.range_work(0, 2)


@pytest.mark.parametrize("role", ["", "two words", 3, "a" * 65])
def test_a_row_with_a_malformed_role_is_refused_with_its_key(role: Any) -> None:
    with pytest.raises(ValueError, match="of row b_0_0: give 1 to 64 letters, digits and _ - "):
        StepRows.fetch(batch_of({"a_0_0": shaped(), "b_0_0": shaped(leaf_role=role)}))


def test_a_profile_counts_the_trained_tokens_at_the_end_of_the_rows() -> None:
    (profile, _) = step_rows(ROWS).profiles()
    # 8; 3 and 7; the 3 of session 1 is the one of session 0.
    assert profile.range_work(0, 3).num_scored == 3
    assert profile.range_work(0, 3).num_tokens == 2 + 1 + 3 + 1


def test_a_profile_of_prompts_counts_what_an_engine_computes_under_that_option() -> None:
    """Of group a: the prompt 1 2, and responses of 1, 3 and 2 tokens, of which 1, 2 and 1 are trained."""
    shared, single = step_rows(ROWS).profiles(sharing="prompt")
    work = Work(num_tokens=2 + 1 + 3 + 2, num_visible_pairs=3 + 3 + 12 + 7, num_scored=4, num_nodes=4, num_packs=1)
    assert shared.range_work(0, 3) == work
    assert shared.lcp.tolist() == [0, 2, 2]
    assert single.range_work(0, 1) == step_rows(ROWS).profiles()[1].range_work(0, 1)


def test_rows_that_no_loss_reads_cost_nothing() -> None:
    """Also where they are between others in DFS order; the group that has only such rows is free."""
    idle = {
        "a_0_0": {"response_mask": torch.tensor([0])},
        "a_0_2": row_of([3, 6, 7, 9], [0, 0, 0, 0], [0.0] * 4),
        "b_0_0": {"response_mask": torch.tensor([0])},
    }
    masked = {key: ROWS.get(key, {}) | idle.get(key, {}) for key in (*ROWS, "a_0_2")}
    rows = step_rows(masked)
    assert rows.groups == [[3, 2, 4, 1], [0]]
    group, free = rows.profiles()
    # 1 2 3 6 7 and 1 2 3 4, positions 1 and 3 of the group, are what is left; then 8 and 1 2 3 6 7 9.
    (left, _) = step_rows({key: masked[key] for key in ("a_0_1", "a_1_0", "b_0_0")}).profiles()
    assert sorted(group.order[:2].tolist()) == [1, 3]
    assert group.order[2:].tolist() == [0, 2]
    for start, end in ((0, 2), (0, 1), (1, 2)):
        assert group.range_work(start, end) == left.range_work(start, end)
    assert group.range_work(0, 4) == left.range_work(0, 2)
    assert group.range_work(1, 3) == left.range_work(1, 2)
    assert group.range_work(2, 4) == free.range_work(0, 1) == Work()
    assert group.lcp[2:].tolist() == [0, 0]


def test_estimators_are_told_keys_shape_and_response_lengths() -> None:
    """In verl's order, in which rows of a group need not be neighbours."""
    told = step_rows(ROWS).select(["a_0_1", "b_0_0", "a_1_0", "a_0_0"]).announcement(weigh_sessions=True)
    assert told.weigh_sessions
    assert told.keys == ["a_0_1", "b_0_0", "a_1_0", "a_0_0"]
    # a: 1 2 3 4 (row 2), 1 2 3 6 7 (row 0), 1 2 8 (row 3); b: 1 2 5 (row 1).
    assert told.shape.order.tolist() == [2, 0, 3, 1]
    assert told.shape.lcp.tolist() == [0, 3, 2, 0]
    assert told.shape.sequence_lens.tolist() == [5, 3, 4, 3]
    assert told.response_lens == [3, 1, 2, 1]
    assert (told.groups, told.sessions) == (["a", "b", "a", "a"], [0, 0, 1, 0])


def test_flat_counts_are_of_the_cells_that_a_tree_engine_would_share() -> None:
    sequences = ([1, 2, 3], [1, 2, 4, 5], [1, 2, 3], [9], [1, 2, 7], [8])
    # Cells: rows 0 and 1 (7 flat, 5 tree tokens), and row 4, which no loss reads; row 2 and padding (3, 3);
    # row 3 (1, 1); row 5, which no loss reads, and padding (nothing).
    assignment = RowAssignment(
        row_order=(0, 4, 1, 2, 6, 3, 5, 7, 8, 9),
        num_padding=4,
        plan=MiniBatchPlan(rows=((3, 2), (1, 4)), num_rows=(4, 2)),
        predicted_s=(),
        num_cut_groups=0,
        num_lost_tokens=0,
    )
    is_read = np.array([True, True, True, True, False, False])
    cells = list(cells_of([str(row) for row in range(6)], assignment, is_read=is_read))
    assert cells == [["0", "1"], ["2"], ["3"]]
    counts = flat_counts([np.array(sequences[int(key)]) for key in cell] for cell in cells)
    assert (counts.num_flat_tokens, counts.num_tree_tokens, counts.num_packed_tokens) == (11, 9, 11)
    assert counts.num_leaves == 4
    metrics = counts.metrics()
    assert metrics["tree/por"] == pytest.approx(2 / 11)
    assert (metrics["tree/err"], metrics["tree/compression"]) == (0.0, 1.0)


def test_several_batches_of_a_step_are_joined() -> None:
    first, second = (step_rows({key: ROWS[key] for key in keys}) for keys in (["b_0_0"], ["a_0_1", "a_0_0"]))
    joined = StepRows() | first | second
    assert joined.keys == ["b_0_0", "a_0_1", "a_0_0"]
    assert joined.groups == [[2, 1], [0]]


def test_a_row_that_was_not_read_in_this_step_is_an_error() -> None:
    with pytest.raises(KeyError, match="c_0_0"):
        step_rows(ROWS).select(["a_0_0", "c_0_0"])


def test_an_empty_step_has_no_tree() -> None:
    rows = StepRows.fetch(KVBatchMeta(partition_id="train", keys=[], tags=[]))
    assert (rows.keys, rows.groups, rows.profiles()) == ([], [], [])
    assert fetch_trees(KVBatchMeta(partition_id="train", keys=[], tags=[]), step=1) == []


@st.composite
def drawn_groups(draw: st.DrawFn) -> dict[str, dict[str, Any]]:
    """Rows over two tokens: duplicates, prefixes, several roots and sessions, rows without a trained token."""
    rows = {}
    for uid in range(draw(st.integers(1, 3))):
        for session in range(draw(st.integers(1, 3))):
            for leaf in range(draw(st.integers(1, 4))):
                tokens = draw(st.lists(st.integers(0, 1), min_size=1, max_size=7))
                mask = draw(st.lists(st.integers(0, 1), min_size=1, max_size=len(tokens)))
                rows[f"{uid}_{session}_{leaf}"] = {
                    "input_ids": torch.tensor(tokens),
                    "response_mask": torch.tensor(mask),
                }
    return {key: rows[key] for key in draw(st.permutations(list(rows)))}


def tagged(rows: dict[str, dict[str, Any]], *, rewards: Sequence[float] | None = None) -> KVBatchMeta:
    """Make the batch of rows with the tags that our agent loop workers write."""
    keys = list(rows)
    written = [
        WrittenRow.of(row["input_ids"], response_mask=row["response_mask"], reward=reward)
        for row, reward in zip(rows.values(), rewards or [0.5] * len(rows), strict=True)
    ]
    tags: list[dict[str, Any]] = [{} for _ in keys]
    for group in group_rows(keys):
        for row, shape in zip(group, leaf_shapes([written[row] for row in group]), strict=True):
            tags[row][LEAF_SHAPE_TAG] = shape.tobytes()
    return KVBatchMeta(partition_id="train", keys=keys, tags=tags)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(rows=drawn_groups())
def test_profiles_of_tags_are_those_of_the_tokens(rows: dict[str, dict[str, Any]]) -> None:
    profiles = StepRows.fetch(tagged(rows)).profiles()
    for group, profile in zip(group_rows(list(rows)), profiles, strict=True):
        own = [rows[list(rows)[row]] for row in group]
        masks = []
        for row in own:
            num_tokens, num_masked = len(row["input_ids"]), len(row["response_mask"])
            masks.append(np.array([0] * (num_tokens - num_masked) + row["response_mask"].tolist(), dtype=bool))
        read = [place for place, mask in enumerate(masks) if mask[1:].any()]
        forest = TokenForest.from_sequences([own[place]["input_ids"].numpy() for place in read])
        expected = WorkProfile.from_forest(forest, trained=[masks[place] for place in read])
        idle = [place for place in range(len(own)) if place not in read]
        assert profile.order.tolist() == [read[leaf] for leaf in expected.order.tolist()] + idle
        for name in ("lcp", "path_counts"):
            values, known = getattr(profile, name), getattr(expected, name)
            np.testing.assert_array_equal(values[: len(read)], known, err_msg=name)
            assert not values[len(read) :].any(), "rows that no loss reads are free"
        sums, known = profile.cumulative_counts, expected.cumulative_counts
        np.testing.assert_array_equal(sums[: len(known)], known)
        assert (sums[len(known) :] == known[-1]).all()


def test_the_bytes_that_reach_the_driver_do_not_depend_on_the_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read but the tags, and these are as long for rows of ten times the tokens."""

    def read(*_: object, **__: object) -> None:
        raise AssertionError("the driver reads a column")

    monkeypatch.setattr(step_rows_module, "fetch", read)
    num_bytes = []
    for repeat in (1, 10):
        longer = {
            key: {name: row[name].repeat(repeat) for name in ("input_ids", "response_mask")}
            for key, row in ROWS.items()
        }
        batch = tagged(longer, rewards=[1.0, 2.0, 3.0, 4.0])
        rows = StepRows.fetch(batch)
        assert rows.rewards.tolist() == [1.0, 2.0, 3.0, 4.0]
        assert [int(profile.path_counts[:, 0].sum()) for profile in rows.profiles()] == [12 * repeat, 3 * repeat]
        num_bytes.append(len(pickle.dumps(batch)))
    assert num_bytes[0] == num_bytes[1]


@pytest.mark.parametrize("missing", ["tag", "row"])
def test_tokens_are_read_once_a_shape_is_missing_and_the_log_says_so_once(
    missing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A row of others has no tag; where a row between two others was dropped, what these share is not known."""
    rows = {key: row | {"rm_scores": torch.full((len(row["responses"]),), 0.25)} for key, row in ROWS.items()}
    batch = tagged(rows)
    if missing == "tag":
        del batch.tags[1][LEAF_SHAPE_TAG]
    else:
        # 1 2 3 6 7 stands between 1 2 3 4 and 1 2 8.
        rows = {key: row for key, row in rows.items() if key != "a_0_1"}
        batch = batch.select_keys(list(rows))

    def read(keys: Sequence[str], names: Sequence[str], *, partition_id: str) -> TensorDict:
        assert partition_id == "train"
        known = [name for name in names if name in rows[keys[0]]]  # as TransferQueue: what no row has is left out
        return columns_of({key: {name: rows[key][name] for name in known} for key in keys})

    monkeypatch.setattr(step_rows_module, "fetch", read)
    step_rows_module._tell_missing_shapes.cache_clear()
    fetched, _ = StepRows.fetch(batch), StepRows.fetch(batch)
    expected = step_rows(rows)
    np.testing.assert_array_equal(fetched.shapes["num_shared"], expected.shapes["num_shared"])
    assert fetched.rewards.tolist() == [0.25 * len(row["responses"]) for row in rows.values()]
    assert len([record for record in caplog.records if LEAF_SHAPE_TAG in record.getMessage()]) == 1


def test_rows_that_are_scored_later_have_their_rewards_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read_names = []

    def read(keys: Sequence[str], names: Sequence[str], *, partition_id: str) -> TensorDict:  # noqa: ARG001
        read_names.append(names)
        return columns_of({key: {"rm_scores": torch.tensor([0.5, 0.25])} for key in keys})

    monkeypatch.setattr(step_rows_module, "fetch", read)
    rows = StepRows.fetch(tagged(ROWS, rewards=[np.nan] * len(ROWS)))
    assert rows.rewards.tolist() == [0.75] * len(ROWS)
    assert read_names == [("rm_scores",)]


@pytest.mark.parametrize("score", [np.nan, np.inf])
def test_a_row_whose_reward_is_no_finite_number_is_named(monkeypatch: pytest.MonkeyPatch, score: float) -> None:
    def read(keys: Sequence[str], _names: Sequence[str], *, partition_id: str) -> TensorDict:  # noqa: ARG001
        return columns_of({key: {"rm_scores": torch.tensor([0.5, score])} for key in keys})

    monkeypatch.setattr(step_rows_module, "fetch", read)
    with pytest.raises(ValueError, match=rf"row {next(iter(ROWS))}: the reward is {score}; .*custom_reward_function"):
        StepRows.fetch(tagged(ROWS, rewards=[np.nan] * len(ROWS)))


def test_a_reward_beyond_float32_is_named() -> None:
    with pytest.raises(ValueError, match=rf"row {list(ROWS)[1]}: the reward is 1e\+39; .*also in float32"):
        StepRows.fetch(tagged(ROWS, rewards=[0.0, 1e39, *[0.0] * (len(ROWS) - 2)]))


def test_recorded_calls_say_which_log_probs_are_of_sampled_tokens() -> None:
    calls = [(0, "root", 2, 4, 6, 7), (1, "fork", 5, 6)]  # rows that an earlier release stored have no versions
    row = row_of(
        [3, 4, 5, 6],
        [0, 0, 0, 1],
        [-0.5, 0.0, 0.0, -1.0],
        rm_scores=torch.tensor([0.0, 0.0, 0.0, 2.0]),
        advantages=torch.tensor([0.0, 0.0, 0.0, -3.0]),
        extra_fields={"recorded_calls": calls, "reward_extra_info": {"acc": True}},
    )
    (tree,) = trees_of({"u_0_0": row}, tag={})
    (leaf,) = tree.leaves
    np.testing.assert_array_equal(leaf.log_probs, np.float32([np.nan, np.nan, -0.5, 0.0, np.nan, -1.0]))
    assert leaf.calls == (CallRun(0, "root", 2, 4, 6, 7), CallRun(1, "fork", 5, 6))
    assert (leaf.reward, leaf.advantage, leaf.reward_extra_info) == (2.0, -3.0, {"acc": True})
    assert (leaf.min_global_steps, leaf.max_global_steps) == (None, None)
    stored = leaf.row()
    for name in ("prompts", "responses", "input_ids", "response_mask", "rollout_log_probs", "rm_scores", "advantages"):
        assert stored[name].tolist() == row[name].tolist(), name


def test_calls_are_read_by_row_and_rows_that_nobody_recorded_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        "a_0_0": row_of([5], [1], [-1.0], extra_fields={"recorded_calls": [(0, "root", 2, 3, 6, 7)]}),
        "a_1_0": row_of([5], [1], [-1.0]),
    }
    made = step_rows(rows)
    stored = list_of_dict_to_tensordict(list(rows.values()))

    def read(*, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        assert (keys, partition_id) == (list(rows), "train")
        return stored.select(*select_fields, strict=False)

    monkeypatch.setattr(tq, "kv_batch_get", read)
    assert fetch_calls(made) == {"a_0_0": (CallRun(0, "root", 2, 3, 6, 7),), "a_1_0": ()}
    del stored["extra_fields"]
    assert fetch_calls(made) == {"a_0_0": (), "a_1_0": ()}
    assert fetch_calls(StepRows()) == {}


def test_what_the_reward_function_said_may_be_a_field_of_its_own() -> None:
    """uni-agent writes no `extra_fields`."""
    row = row_of([3], [1], [-1.0], reward_extra_info={"acc": 0.5})
    del row["extra_fields"]
    (tree,) = trees_of({"u_0_0": row})
    assert (tree.leaves[0].reward_extra_info, tree.leaves[0].calls) == ({"acc": 0.5}, ())
    (tree,) = trees_of({"u_0_0": row | {"extra_fields": {"reward_extra_info": {"acc": 1.0}}}})
    assert tree.leaves[0].reward_extra_info == {"acc": 1.0}


def tool_reply(prompt: str) -> str:
    return "the sum is 14" if "[" in prompt else call_text(3) + call_text(4)


def test_a_recorded_session_says_who_wrote_what() -> None:
    """The calls of verl's own tool loop are in the row, and from there on the page."""
    tree = SessionTree(decode=tokenizer().decode)
    output = run_loop(ToolAgentLoop, RecordingClient(ScriptedClient(tool_reply), tree=tree), {"logprobs": True})
    rows = session_rows(tree, [output], limits=RowLimits(256, 256, wants_log_probs=True)).outputs
    row = rows[0].as_dict()
    row["input_ids"] = torch.cat([row["prompts"], row["responses"]])
    (stored,) = trees_of({"u_0_0": row})
    (leaf,) = stored.leaves
    turns = [tokenizer().decode(leaf.token_ids[run.start : run.end].tolist()) for run in leaf.calls]
    assert turns == [call_text(3) + call_text(4) + END, "the sum is 14" + END]
    assert [(run.call, run.kind) for run in leaf.calls] == [(0, "root"), (1, "continuation")]
    assert {(run.min_global_steps, run.max_global_steps) for run in leaf.calls} == {(7, 7)}, "what the server said"
    steps = calls_of_row(row["extra_fields"], is_trained=leaf.is_trained)
    assert steps == [(run.start, run.end, None) for run in leaf.calls], "the steps of gigpo"
    (node,) = page_content(stored, tokenizer=tokenizer())["nodes"]
    assert [passage["who"] for passage in node["passages"]] == ["prompt", "model", "environment", "model"]
    assert node["passages"][1]["text"] == turns[0]


@pytest.mark.parametrize("response_length", [256, 60])
def test_a_captured_row_records_the_calls_of_what_is_left_of_it(response_length: int) -> None:
    """Whole, and cut inside the first call; the loop's own output is not there to help."""
    tree = SessionTree(decode=tokenizer().decode)
    run_loop(ToolAgentLoop, RecordingClient(ScriptedClient(tool_reply), tree=tree), {"logprobs": True})
    (row,) = session_rows(tree, [], limits=RowLimits(256, response_length, wants_log_probs=True)).outputs
    runs, prompt_len = row.extra_fields["recorded_calls"], len(row.prompt_ids)
    generated = [position - prompt_len for _, _, start, end, *_ in runs for position in range(start, end)]
    assert generated == [place for place, is_trained in enumerate(row.response_mask) if is_trained]
    assert [(call, kind) for call, kind, *_ in runs] == [(0, "root"), (1, "continuation")][: 1 + (response_length > 60)]
