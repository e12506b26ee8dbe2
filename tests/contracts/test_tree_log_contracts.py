"""verl 0.9.1 as `trainer.tree_log` relies on it: when rows exist, how validation draws them, where loggers are."""

import inspect
import re

import pytest

pytest.importorskip("verl")

import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.profiler import marked_timer
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.utils.tracking import Tracking


def test_validation_only_samples_from_the_buffer_and_then_clears_the_rows() -> None:
    source = inspect.getsource(PPOTrainer._validate)
    assert re.findall(r"self\.replay_buffer\b(.{8})", source) == [".sample("]
    assert source.index("self.replay_buffer.sample(") < source.index("tq.kv_clear(")
    assert source.index("tq.kv_clear(") < source.index("self._maybe_log_val_generations(")
    assert "_validate" not in vars(PPOTrainerSync)
    call = re.search(r"self\.replay_buffer\.sample\((.*?)\)\n", source, re.DOTALL)[1]
    names = re.findall(r"(\w+)=", call)
    assert names == ["global_steps", "partition_id", "batch_size"]
    inspect.signature(ReplayBuffer.sample).bind(None, **dict.fromkeys(names))


def test_rows_of_a_step_are_cleared_after_it() -> None:
    source = inspect.getsource(PPOTrainer.fit)
    assert source.index("batch = self.step(") < source.index("tq.kv_clear(")
    assert "self.logger = Tracking(" in source
    assert source.index("self.logger = Tracking(") < source.index("self._validate()")
    for name in ("total_training_steps", "global_steps", "test_freq"):
        assert name in source


def test_wandb_is_in_the_loggers_under_its_name() -> None:
    assert 'self.logger["wandb"] = wandb' in inspect.getsource(Tracking.__init__)
    assert "logger_instance.log(data=data, step=step)" in inspect.getsource(Tracking.log)
    tracking = Tracking("project", "experiment", default_backend="console")
    assert list(tracking.logger) == ["console"]


def test_what_a_loop_adds_to_a_row_is_one_column_of_dictionaries() -> None:
    rows = [
        AgentLoopOutput(
            prompt_ids=[1],
            response_ids=[2] * length,
            response_mask=[1] * length,
            metrics=AgentLoopMetrics(),
            extra_fields={"recorded_calls": [(0, "root", 1, 1 + length)]},
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
