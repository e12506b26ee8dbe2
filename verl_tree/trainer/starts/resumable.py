"""verl's PPO trainer over several starts of one training run, and over disks that fail.

What differs from `PPOTrainer` (verl 0.9.1), each through an overridden method:

- A checkpoint (`_save_checkpoint`) gets a marker when it is complete and `require_whole` agrees, and a start
  (`_load_checkpoint`) goes on from the newest complete one (`checkpoints`).
- The file of verl's logger keeps the metrics of earlier starts (`on_validate_begin`, `on_train_begin`; `metrics_file`).
- Generations that cannot be written (`_dump_generations`) are missed, as trees are (`late_files`).
- A run may be asked to end after its step, with a checkpoint (`on_step_end`).
"""

from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from typing_extensions import override
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_tree.trainer.starts.checkpoints import END_REQUEST, folder_of, resume_from_complete, saving
from verl_tree.trainer.starts.marked_saves import MarkedSaves
from verl_tree.trainer.starts.metrics_file import EarlierMetrics, path_of
from verl_tree.trainer.told.late_files import LateFile, LateFiles

DUMP_KEYS = ("rollout_data_dir", "validation_data_dir")
"""Options of `trainer` that name a folder for generations."""


class ResumableTrainer(PPOTrainer):
    """verl's trainer whose starts go on from what is whole; put before a mode's class."""

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        self.checkpoint_callback = MarkedSaves(config, then=self.checkpoint_callback)
        self._saved_step = -1
        self._earlier_metrics: EarlierMetrics | None = None
        self._generations = LateFiles()

    @override
    def _load_checkpoint(self) -> None:
        resume_from_complete(self.config)
        super()._load_checkpoint()
        path = path_of(self.config)
        if path is not None:
            self._earlier_metrics = EarlierMetrics.take(path, last_step=self.global_steps)

    @override
    def _dump_generations(
        self,
        inputs: list[str],
        outputs: list[str],
        gts: list[Any],
        scores: list[float],
        reward_extra_infos_dict: dict[str, list[Any]],
        dump_path: str,
    ) -> None:
        # verl's thread gives its error to training, and the end of the process waits for it.
        columns = (inputs, outputs, gts, scores, reward_extra_infos_dict)
        write = partial(self._write_generations, *columns, dump_path, self.global_steps)
        named = " or ".join(f"trainer.{key}" for key in DUMP_KEYS if self.config.trainer.get(key) == dump_path)
        remedy = f"set {named} to another folder, or to null to store no generations"
        self._generations.add(LateFile(Path(dump_path, f"{self.global_steps}.jsonl"), write, remedy))

    @override
    def _shutdown_dump_executor(self) -> None:
        self._generations.wait()
        super()._shutdown_dump_executor()

    @override
    def _save_checkpoint(self) -> None:
        with saving(folder_of(self.config) / f"global_step_{self.global_steps}", step=self.global_steps):
            super()._save_checkpoint()
        self._saved_step = self.global_steps

    def require_whole(self) -> None:
        """Raise if no start is to go on from what was just saved; it gets no marker then."""

    @override
    def on_validate_begin(self) -> None:
        self._write_back_metrics()
        super().on_validate_begin()

    @override
    def on_train_begin(self) -> None:
        self._write_back_metrics()
        super().on_train_begin()

    def _write_back_metrics(self) -> None:
        """Write the metrics of earlier starts into verl's file, which is open by now and has no line yet."""
        if self._earlier_metrics is not None:
            self._earlier_metrics.write_back(self.logger.logger["file"].fp)
            self._earlier_metrics = None

    @override
    def on_step_end(self) -> None:
        if (folder_of(self.config) / END_REQUEST).exists():
            if self._saved_step != self.global_steps:
                self._save_checkpoint()
            # verl's loop ends behind its last step.
            self.total_training_steps = self.global_steps
            print(f"the training run ends after step {self.global_steps}, as it was asked to", flush=True)
        super().on_step_end()
