"""The rows of a step: found by their keys, and turned into trees; TransferQueue itself is in tests/e2e."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl")

import torch
import transfer_queue as tq
from scripted_llm import END, ScriptedClient, call_text, run_loop, tokenizer
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from rollout_hooks.capture.recording import RecordingClient
from rollout_hooks.capture.rows import RowLimits, session_rows
from rollout_hooks.capture.session_tree import SessionTree
from verl_tree.cost.model import Work
from verl_tree.records import CallRun, StoredTree
from verl_tree.records.page.content import page_content
from verl_tree.trainer.batching import MiniBatchPlan, RowAssignment
from verl_tree.trainer.step_rows import StepRows
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


def step_rows(rows: dict[str, dict[str, Any]], *, tag: dict[str, int] = TAG) -> StepRows:
    columns = list_of_dict_to_tensordict(list(rows.values()))
    return StepRows.from_columns(list(rows), tags=[tag] * len(rows), columns=columns)


def trees_of(rows: dict[str, dict[str, Any]], *, tag: dict[str, int] = TAG, step: int = 0) -> list[StoredTree]:
    """Make the trees of rows that are all still there at the end of the step."""
    columns = list_of_dict_to_tensordict(list(rows.values()))
    return step_rows(rows, tag=tag).trees(step=step, columns=columns)


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
    sampled = step_rows({key: row | {"rm_scores": torch.ones(len(row["responses"]))} for key, row in ROWS.items()})
    keys = ["a_0_1", "b_0_0", "a_1_0"]
    kept = sampled.select(keys)
    assert kept.keys == keys
    assert kept.rewards.tolist() == [3.0, 1.0, 2.0]
    results = [ROWS[key] | {"advantages": torch.full((len(ROWS[key]["responses"]),), float(len(key)))} for key in keys]
    results[0] |= {"response_mask": torch.tensor([1, 0, 0])}
    trees = kept.trees(step=1, columns=list_of_dict_to_tensordict(results))
    assert [[(leaf.session, leaf.leaf) for leaf in tree.leaves] for tree in trees] == [[(0, 1), (1, 0)], [(0, 0)]]
    assert trees[0].leaves[0].is_trained.tolist() == [False, False, True, False, False]
    assert [leaf.token_rewards.sum() for tree in trees for leaf in tree.leaves] == [3.0, 2.0, 1.0]
    assert [len(leaf.token_advantages) for tree in trees for leaf in tree.leaves] == [3, 2, 1]


def test_a_forest_is_made_once_for_the_same_rows_and_again_for_others() -> None:
    rows = step_rows(ROWS)
    assert [profile.num_leaves for profile in rows.profiles()] == [3, 1]
    columns = list_of_dict_to_tensordict(list(ROWS.values()))
    first, again = (rows.trees(step=1, columns=columns)[0].forest() for _ in range(2))
    assert first is again
    assert first.num_tokens == TokenForest.from_sequences([[1, 2, 8], [1, 2, 3, 6, 7], [1, 2, 3, 4]]).num_tokens
    fewer = rows.select(["a_0_1", "a_1_0"])
    columns = list_of_dict_to_tensordict([ROWS["a_0_1"], ROWS["a_1_0"]])
    assert fewer.trees(step=1, columns=columns)[0].forest().num_leaves == 2


def test_a_profile_counts_the_trained_tokens_at_the_end_of_the_rows() -> None:
    (profile, _) = step_rows(ROWS).profiles()
    # 8; 3 and 7; the 3 of session 1 is the one of session 0.
    assert profile.range_work(0, 3).num_scored == 3
    assert profile.range_work(0, 3).num_tokens == 2 + 1 + 3 + 1


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


def test_estimators_are_told_keys_tokens_and_response_lengths() -> None:
    told = step_rows(ROWS).select(["a_0_1", "b_0_0"]).announcement(weigh_sessions=True)
    assert told.weigh_sessions
    assert told.keys == ["a_0_1", "b_0_0"]
    assert [ids.tolist() for ids in told.sequences] == [[1, 2, 3, 6, 7], [1, 2, 5]]
    assert told.response_lens == [3, 1]
    assert (told.groups, told.sessions) == (["a", "b"], [0, 0])


def test_flat_counts_are_of_the_cells_that_a_tree_engine_would_share() -> None:
    sequences = ([1, 2, 3], [1, 2, 4, 5], [1, 2, 3], [9])
    rows = [{"input_ids": torch.tensor(row), "response_mask": torch.ones(1)} for row in sequences]
    # Cells: rows 0 and 1 (7 flat, 5 tree tokens); row 2 and padding (3, 3); row 3 (1, 1); padding alone (nothing).
    assignment = RowAssignment(
        row_order=(0, 1, 2, 4, 3, 5, 6, 7),
        num_padding=4,
        plan=MiniBatchPlan(rows=((2, 2), (1, 3)), num_rows=(3, 1)),
        predicted_s=(),
        num_cut_groups=0,
        num_lost_tokens=0,
    )
    counts = step_rows({f"u_{row}_0": columns for row, columns in enumerate(rows)}).flat_counts(assignment)
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
    assert (rows.keys, rows.groups, rows.fetch_trees(step=1)) == ([], [], [])


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
    assert made.fetch_calls() == {"a_0_0": (CallRun(0, "root", 2, 3, 6, 7),), "a_1_0": ()}
    del stored["extra_fields"]
    assert made.fetch_calls() == {"a_0_0": (), "a_1_0": ()}
    assert StepRows().fetch_calls() == {}


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
