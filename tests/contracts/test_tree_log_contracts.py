"""verl 0.9.1 as the tree log relies on it: how validation draws rows, what they hold, and where wandb is."""

import inspect
from pathlib import Path

import pytest

pytest.importorskip("verl")

import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.utils.profiler import marked_timer
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.utils.tracking import Tracking


def test_rows_are_sampled_by_keywords_that_are_passed_on() -> None:
    inspect.signature(ReplayBuffer.sample).bind(None, global_steps=1, partition_id="val", batch_size=2)


def test_wandb_is_in_the_loggers_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    tracking = Tracking("project", "experiment", default_backend=["console", "wandb"])
    try:
        assert tracking.logger["wandb"] is wandb
    finally:
        tracking.finish()
    assert "wandb" not in Tracking("project", "experiment", default_backend="console").logger


def test_what_a_loop_adds_to_a_row_is_one_column_of_dictionaries() -> None:
    rows = [
        AgentLoopOutput(
            prompt_ids=[1],
            response_ids=[2] * length,
            response_mask=[1] * length,
            metrics=AgentLoopMetrics(),
            extra_fields={"recorded_calls": [(0, "root", 1, 1 + length, 1, 1)]},
        ).as_dict()
        for length in (2, 3)
    ]
    data = list_of_dict_to_tensordict(rows)
    assert [extra["recorded_calls"][0][3] for extra in data.get("extra_fields").tolist()] == [3, 4]
    assert [row.tolist() for row in data["responses"].unbind()] == [[2, 2], [2, 2, 2]]
    assert isinstance(data["responses"], torch.Tensor)


def test_a_timer_adds_its_seconds_under_its_name() -> None:
    timing: dict[str, float] = {}
    with marked_timer("tree_log", timing):
        pass
    assert list(timing) == ["tree_log"]
