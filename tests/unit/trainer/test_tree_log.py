"""From verl's rows to stored trees and pages; TransferQueue itself is in tests/e2e/test_runs.py."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl")

import torch
from omegaconf import OmegaConf
from scripted_llm import END, ScriptedClient, call_text, run_loop, tokenizer
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from rollout_hooks.capture.recording import RecordingClient
from rollout_hooks.capture.rows import RowLimits, session_rows
from rollout_hooks.capture.session_tree import SessionTree
from verl_tree.records import CallRun, StoredTree, read_trees
from verl_tree.records.page.content import page_content
from verl_tree.trainer import tree_log
from verl_tree.trainer.tree_log import NUM_SHOWN, TreeLog, trees_of_rows

TAG = {"min_global_steps": 3, "max_global_steps": 4}


def row_of(response: list[int], mask: list[int], log_probs: list[float], **values: Any) -> dict[str, Any]:
    """A row with the prompt 1 2."""
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


def test_rows_become_trees_in_the_order_of_groups_sessions_and_leaves() -> None:
    rows = {
        "b_0_0": row_of([5], [1], [-1.0]),
        "a_1_0": row_of([3, 4], [1, 0], [-0.5, 0.0]),
        "a_0_1": row_of([3, 6, 7], [1, 0, 1], [-0.25, 0.0, -2.0]),
        "a_0_0": row_of([8], [1], [0.0]),
    }
    trees = trees_of_rows(list(rows), tags=[TAG] * 4, data=list_of_dict_to_tensordict(list(rows.values())), step=9)
    assert [(tree.step, tree.uid, [(leaf.session, leaf.leaf) for leaf in tree.leaves]) for tree in trees] == [
        (9, "a", [(0, 0), (0, 1), (1, 0)]),
        (9, "b", [(0, 0)]),
    ]
    last = trees[0].leaves[1]
    assert last.token_ids.tolist() == [1, 2, 3, 6, 7] and last.prompt_len == 2
    assert last.is_trained.tolist() == [False, False, True, False, True]
    np.testing.assert_array_equal(last.log_probs, np.float32([np.nan, np.nan, -0.25, np.nan, -2.0]))
    assert (last.min_global_steps, last.max_global_steps) == (3, 4)
    assert last.reward is None and last.token_advantages is None and last.calls == ()
    # A token that was sampled with certainty has a log-prob of 0, one that was only read has none.
    assert trees[0].leaves[0].log_probs[-1] == 0


def test_recorded_calls_say_which_log_probs_are_of_sampled_tokens() -> None:
    calls = [(0, "root", 2, 4), (1, "fork", 5, 6)]
    row = row_of(
        [3, 4, 5, 6],
        [0, 0, 0, 1],
        [-0.5, 0.0, 0.0, -1.0],
        rm_scores=torch.tensor([0.0, 0.0, 0.0, 2.0]),
        advantages=torch.tensor([0.0, 0.0, 0.0, -3.0]),
        extra_fields={"recorded_calls": calls, "reward_extra_info": {"acc": True}},
    )
    (tree,) = trees_of_rows(["u_0_0"], tags=[{}], data=list_of_dict_to_tensordict([row]), step=0)
    (leaf,) = tree.leaves
    np.testing.assert_array_equal(leaf.log_probs, np.float32([np.nan, np.nan, -0.5, 0.0, np.nan, -1.0]))
    assert leaf.calls == (CallRun(0, "root", 2, 4), CallRun(1, "fork", 5, 6))
    assert (leaf.reward, leaf.advantage, leaf.reward_extra_info) == (2.0, -3.0, {"acc": True})
    assert (leaf.min_global_steps, leaf.max_global_steps) == (None, None)
    stored = leaf.row()
    for name in ("prompts", "responses", "input_ids", "response_mask", "rollout_log_probs", "rm_scores", "advantages"):
        assert stored[name].tolist() == row[name].tolist(), name


def tool_reply(prompt: str) -> str:
    return "the sum is 14" if "[" in prompt else call_text(3) + call_text(4)


def test_a_recorded_session_says_who_wrote_what() -> None:
    """verl's own tool loop, captured: its calls are in the row, and from there on the page."""
    tree = SessionTree(decode=tokenizer().decode)
    output = run_loop(ToolAgentLoop, RecordingClient(ScriptedClient(tool_reply), tree=tree), {"logprobs": True})
    rows = session_rows(tree, [output], limits=RowLimits(256, 256, wants_log_probs=True)).outputs
    row = rows[0].as_dict()
    row["input_ids"] = torch.cat([row["prompts"], row["responses"]])
    (stored,) = trees_of_rows(["u_0_0"], tags=[TAG], data=list_of_dict_to_tensordict([row]), step=1)
    (leaf,) = stored.leaves
    turns = [tokenizer().decode(leaf.token_ids[run.start : run.end].tolist()) for run in leaf.calls]
    assert turns == [call_text(3) + call_text(4) + END, "the sum is 14" + END]
    assert [(run.call, run.kind) for run in leaf.calls] == [(0, "root"), (1, "continuation")]
    (node,) = page_content(stored, tokenizer=tokenizer())["nodes"]
    assert [segment["who"] for segment in node["segments"]] == ["prompt", "model", "environment", "model"]
    assert node["segments"][1]["text"] == turns[0]


@pytest.mark.parametrize("response_length", [256, 60])
def test_a_captured_row_records_the_calls_of_what_is_left_of_it(response_length: int) -> None:
    """Whole, and cut inside the first call; the loop's own output is not there to help."""
    tree = SessionTree(decode=tokenizer().decode)
    run_loop(ToolAgentLoop, RecordingClient(ScriptedClient(tool_reply), tree=tree), {"logprobs": True})
    (row,) = session_rows(tree, [], limits=RowLimits(256, response_length, wants_log_probs=True)).outputs
    runs, prompt_len = row.extra_fields["recorded_calls"], len(row.prompt_ids)
    generated = [position - prompt_len for _, _, start, end in runs for position in range(start, end)]
    assert generated == [place for place, is_trained in enumerate(row.response_mask) if is_trained]
    assert [(call, kind) for call, kind, _, _ in runs] == [(0, "root"), (1, "continuation")][
        : 1 + (response_length > 60)
    ]


@dataclass
class Loggers:
    """verl's Tracking as far as it is asked."""

    logger: dict[str, Any] = field(default_factory=dict)


@dataclass
class Run:
    """A trainer as far as it is asked."""

    test_freq: int
    global_steps: int = 0
    total_training_steps: int = 100
    logger: Loggers = field(default_factory=Loggers)
    replay_buffer: Any = None

    @property
    def config(self) -> Any:
        return OmegaConf.create({"trainer": {"test_freq": self.test_freq}})

    @property
    def tokenizer(self) -> None:
        """Pages of ids."""


class Buffer:
    """Samples one batch of two prompts, as many times as asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def sample(self, **options: Any) -> tuple[KVBatchMeta, dict[str, float]]:
        self.asked.append(options)
        return KVBatchMeta(partition_id="val", keys=["y_0_0", "x_0_0"], tags=[TAG, TAG]), {"metric": 1.0}


@pytest.fixture
def stored_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What TransferQueue would give: prompt 1 2 and one token that names the group."""

    def kv_batch_get(*, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        return list_of_dict_to_tensordict([row_of([ord(key[0])], [1], [-1.0]) for key in keys])

    monkeypatch.setattr(tree_log.tq, "kv_batch_get", kv_batch_get)


def log_of(tmp_path: Path, **options: Any) -> TreeLog:
    tree = {"dump_dir": None, "show_every": 0} | options
    return TreeLog.from_config(
        OmegaConf.create({"tree": tree, "trainer": {"default_local_dir": str(tmp_path / "checkpoints")}})
    )


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


BATCH = KVBatchMeta(partition_id="train", keys=[f"{name}_0_0" for name in "abcdef"], tags=[TAG] * 6)


def test_a_folder_gets_a_file_a_step_and_a_validation(tmp_path: Path, stored_rows: None) -> None:
    log, run = log_of(tmp_path, dump_dir=str(tmp_path / "trees")), Run(test_freq=5, global_steps=10)
    log.log_step(run, BATCH)
    buffer = run.replay_buffer = Buffer()
    with log.watch_validation(run):
        assert run.replay_buffer.sample(batch_size=2)[1] == {"metric": 1.0}
    assert run.replay_buffer is buffer and buffer.asked == [{"batch_size": 2}]
    assert names(tmp_path) == ["trees/step_000010.parquet", "trees/val_000010.parquet"]
    assert [tree.uid for tree in read_trees(tmp_path / "trees/step_000010.parquet")] == list("abcdef")
    # By their tokens, not in the order of arrival.
    assert [tree.uid for tree in read_trees(tmp_path / "trees/val_000010.parquet")] == ["x", "y"]


def test_without_options_nothing_is_read_or_written(tmp_path: Path) -> None:
    log, run = log_of(tmp_path), Run(test_freq=5)
    buffer = run.replay_buffer = Buffer()
    log.log_step(run, BATCH)
    with log.watch_validation(run):
        assert run.replay_buffer is buffer
    assert names(tmp_path) == []


def test_pages_are_shown_first_then_rarely_then_last(tmp_path: Path, stored_rows: None) -> None:
    log, run = log_of(tmp_path, show_every=20), Run(test_freq=8, total_training_steps=48)
    run.replay_buffer = Buffer()
    for run.global_steps in range(0, 49, 8):
        log.log_step(run, BATCH)
        with log.watch_validation(run):
            run.replay_buffer.sample()
    shown = ["000000", "000024", "000048"]
    assert names(tmp_path) == [f"checkpoints/trees/val_{step}_{n}.html" for step in shown for n in range(2)]
    assert "123" not in (tmp_path / "checkpoints/trees/val_000000_0.html").read_text().split('id="content">')[0]


def test_a_run_without_validation_shows_training_trees(tmp_path: Path, stored_rows: None) -> None:
    log, run = log_of(tmp_path, show_every=3), Run(test_freq=-1)
    for run.global_steps in range(1, 6):
        log.log_step(run, BATCH)
    steps = ["000001", "000004"]
    assert names(tmp_path) == [f"checkpoints/trees/step_{step}_{n}.html" for step in steps for n in range(NUM_SHOWN)]


def test_the_buffer_comes_back_when_validation_fails(tmp_path: Path, stored_rows: None) -> None:
    log, run = log_of(tmp_path, show_every=1), Run(test_freq=1)
    buffer = run.replay_buffer = Buffer()
    with pytest.raises(RuntimeError, match="no rows"), log.watch_validation(run):
        raise RuntimeError("no rows")
    assert run.replay_buffer is buffer and names(tmp_path) == [] and log.last_shown is None


def test_wandb_gets_a_table_with_the_pages(tmp_path: Path, stored_rows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path))
    wandb.init(project="test", mode="offline", dir=tmp_path, settings=wandb.Settings(console="off"))
    try:
        log, run = log_of(tmp_path, show_every=1), Run(test_freq=-1, global_steps=7)
        run.logger.logger["wandb"] = wandb
        log.log_step(run, BATCH)
        media = Path(wandb.run.dir) / "media"
        (table,) = media.rglob("*.table.json")
        content = json.loads(table.read_text())
        assert content["columns"][:2] == ["step", "uid"] and content["columns"][-1] == "tree"
        assert [row[:4] for row in content["data"]] == [[7, uid, 1, 3] for uid in "abcd"]
        # wandb keeps what is in a table's cells in the table's artifact.
        staged = [path.read_text() for path in (tmp_path / "artifacts" / "staging").iterdir()]
        pages = [text for text in staged if text.startswith("<!DOCTYPE html>")]
        assert len(pages) == NUM_SHOWN and all("default-src 'none'" in page for page in pages)
    finally:
        wandb.finish()


def test_an_empty_step_is_no_tree(tmp_path: Path) -> None:
    assert tree_log.fetch_trees(KVBatchMeta(partition_id="train", keys=[], tags=[]), step=1) == []
    with pytest.raises(ValueError, match="no leaves"):
        StoredTree(step=1, uid="u", leaves=())
