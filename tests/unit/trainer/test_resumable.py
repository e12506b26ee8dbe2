"""Starts and ends of a training run: verl's own loop, checkpoints and file logger, with a model of one number."""

import json
import os
import resource
from collections.abc import Callable
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("verl")

import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_tree.launch.command.composition import compose_config
from verl_tree.trainer.starts.checkpoints import END_REQUEST, MARKER, TRACKER
from verl_tree.trainer.starts.resumable import ResumableTrainer

MODEL = "actor/model.pt"
CALLBACK = f"{__name__}.NotedSaves"


class NotedSaves(CheckpointCallback):
    """A callback of the user's, which notes what it finds."""

    found: ClassVar[list[tuple[int, bool]]] = []

    def on_save(self, trainer: Any, global_step: int, checkpoint_dir: str, **options: Any) -> None:  # noqa: ARG002
        self.found.append((global_step, (Path(checkpoint_dir) / MARKER).is_file()))


class Workers:
    """A worker group whose model is a number; it is a hundred thousand numbers on disk."""

    num_steps = 0

    def save_checkpoint(self, folder: str, _remote: None, step: int, max_ckpt_to_keep: int | None) -> None:
        assert max_ckpt_to_keep is None
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save(torch.full((100_000,), float(step)), Path(folder) / "model.pt")

    def load_checkpoint(self, local_path: str, del_local_after_load: bool) -> None:
        assert not del_local_after_load
        self.num_steps = int(torch.load(Path(local_path) / "model.pt")[0])

    def update_weights(self, step: int) -> None:
        """Send the weights of a step to the rollout."""
        self.num_steps = step


STARTS = count()


class SmallTrainer(ResumableTrainer, PPOTrainerSync):
    """Our trainer whose steps count; `at` is called in each of them."""

    def __init__(self, config: DictConfig, *, at: Callable[[int], None], num_steps: int) -> None:
        super().__init__(config)
        self.start, self.at = next(STARTS), at
        self.actor_rollout_wg = self.checkpoint_manager = Workers()
        self.train_dataloader = StatefulDataLoader(list(range(num_steps)))
        self.steps_per_epoch = self.total_training_steps = num_steps
        self._init_dump_executor()
        self._load_checkpoint()

    def step(self, metrics: dict[str, float], timing_raw: dict[str, float]) -> KVBatchMeta:  # noqa: ARG002
        assert self.actor_rollout_wg.num_steps == self.global_steps - 1, "weights of the step before"
        self.at(self.global_steps)
        return KVBatchMeta(partition_id="train", keys=[], tags=[])

    def _log_rollout_data(self, batch: Any, timing_raw: Any, rollout_data_dir: str) -> None:  # noqa: ARG002
        text, score = [f"text of {self.global_steps}"], [0.5]
        self._dump_generations(text, text, [None], score, {}, dump_path=rollout_data_dir)

    def _compute_metrics(self, batch: Any, metrics: dict[str, float], *_: Any, **__: Any) -> None:  # noqa: ARG002
        metrics["start"] = self.start


@cache
def composed() -> DictConfig:
    config = compose_config(["profile=cpu", "actor_rollout_ref.model.path=unused"])
    OmegaConf.set_struct(config, False)
    return config


def train(
    folder: Path, *options: str, at: Callable[[int], None] = lambda _: None, num_steps: int = 6, save_freq: int = 2
) -> int:
    """Train to the end; return the number of this start, which is in the metrics."""
    trainer = {
        "default_local_dir": f"{folder}/checkpoints",
        "save_freq": save_freq,
        "test_freq": -1,
        "val_before_train": False,
        "logger": ["file"],
    }
    config = OmegaConf.merge(composed(), {"trainer": trainer}, OmegaConf.from_dotlist(list(options)))
    OmegaConf.resolve(config)
    small = SmallTrainer(config, at=at, num_steps=num_steps)
    try:
        small.fit(agent_loop_manager=None)
    finally:
        small.logger.finish()
    return small.start


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for a run. No row is in TransferQueue, which is not started."""
    monkeypatch.setattr(tq, "kv_clear", lambda **_: None)
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", f"{tmp_path}/metrics.jsonl")
    return tmp_path


def steps_logged(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def fail_at(step: int) -> Callable[[int], None]:
    def fail(now: int) -> None:
        if now == step:
            raise KeyError("a worker died")

    return fail


def test_a_resumed_run_is_the_run_that_was_not_interrupted(folder: Path) -> None:
    with pytest.raises(KeyError, match="a worker died"):
        train(folder, at=fail_at(4))
    assert steps_logged(folder) == [1, 2, 3]
    train(folder)
    assert steps_logged(folder) == [1, 2, 3, 4, 5, 6]
    starts = {json.loads(line)["data"]["start"] for line in (folder / "metrics.jsonl").read_text().splitlines()}
    assert len(starts) == 2
    assert (folder / "checkpoints" / TRACKER).read_text() == "6"


def test_a_truncated_checkpoint_costs_its_steps_only(folder: Path) -> None:
    train(folder, num_steps=5)
    newest = folder / "checkpoints/global_step_5" / MODEL
    os.truncate(newest, newest.stat().st_size // 2)
    seen: list[int] = []
    train(folder, at=seen.append)
    assert seen == [5, 6]
    assert steps_logged(folder) == [1, 2, 3, 4, 5, 6]


def test_no_start_goes_on_from_a_checkpoint_that_lacks_what_a_server_took_with_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(trainer: SmallTrainer) -> None:
        if trainer.global_steps == 4:
            raise RuntimeError("a server died")

    with monkeypatch.context() as patch:
        patch.setattr(SmallTrainer, "require_whole", lost)
        with pytest.raises(RuntimeError, match="a server died"):
            train(folder)
    seen: list[int] = []
    train(folder, at=seen.append)
    assert seen == [3, 4, 5, 6]


def test_a_run_that_is_asked_to_end_saves_its_step_and_goes_on_from_it(folder: Path) -> None:
    request = folder / "checkpoints" / END_REQUEST

    def ask_in_step_3(step: int) -> None:
        if step == 3:
            request.touch()

    train(folder, at=ask_in_step_3)
    assert steps_logged(folder) == [1, 2, 3]
    assert (folder / "checkpoints/global_step_3" / MARKER).is_file()
    request.unlink()
    seen: list[int] = []
    train(folder, at=seen.append)
    assert seen == [4, 5, 6]


def test_a_step_that_is_saved_anyway_is_saved_once(folder: Path) -> None:
    NotedSaves.found.clear()
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / END_REQUEST).touch()
    train(folder, f"trainer.checkpoint_callback_class={CALLBACK}", save_freq=1)
    assert NotedSaves.found == [(1, True)], "the user's callback finds a complete checkpoint"


def test_a_checkpoint_that_does_not_fit_says_where_and_the_one_before_stays(folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def refuse_large_files(step: int) -> None:
        if step == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))

    try:
        with pytest.raises(RuntimeError, match=r"step 4 was not saved.*bytes free.*trainer\.default_local_dir"):
            train(folder, at=refuse_large_files)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(each.name for each in (folder / "checkpoints").glob("global_step_*")) == ["global_step_2"]
    seen: list[int] = []
    train(folder, at=seen.append)
    assert seen == [3, 4, 5, 6]


def test_generations_that_a_full_disk_does_not_take_are_missed(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The thread that verl has for it would end training with the error."""
    dumps = folder / "dumps"
    dumps.mkdir()
    # Every write to it fails as on a full disk.
    (dumps / "2.jsonl").symlink_to("/dev/full")
    train(folder, f"trainer.rollout_data_dir={dumps}", num_steps=4)
    assert steps_logged(folder) == [1, 2, 3, 4]
    written = {step: json.loads((dumps / f"{step}.jsonl").read_text()) for step in (1, 3, 4)}
    assert [written[step]["output"] for step in (1, 3, 4)] == ["text of 1", "text of 3", "text of 4"]
    (missed,) = [each for each in caplog.messages if "not written" in each]
    assert missed == (
        f"{dumps}/2.jsonl: not written ([Errno 28] No space left on device); training goes on without it. To stop "
        "this, set trainer.rollout_data_dir to another folder, or to null to store no generations"
    )
