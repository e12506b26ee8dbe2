"""Trainers that write down which phase they enter, so that a fault can come in a chosen one.

The file that the environment variable `MARKS` names gets a line `PHASE STEP` for each phase.
"""

import os
from pathlib import Path
from typing import Any

import ray
from omegaconf import DictConfig
from typing_extensions import override

from verl_tree.trainer import task_runner

MARKS_VARIABLE = "MARKS"
PHASES = ("generation", "log_probs", "update", "checkpoint", "weight_sync", "validation")
"""In the order of a step."""


def mark(phase: str, step: int) -> None:
    """Append a line to the file of marks."""
    with Path(os.environ[MARKS_VARIABLE]).open("a") as marks:
        marks.write(f"{phase} {step}\n")


def marking(trainer: type) -> type:
    """Return a subclass of a trainer that marks its phases."""

    class MarkingTrainer(trainer):
        def on_sample_begin(self) -> None:
            mark("generation", self.global_steps)
            super().on_sample_begin()

        def _compute_old_log_prob(self, *args: Any, **options: Any) -> Any:
            mark("log_probs", self.global_steps)
            return super()._compute_old_log_prob(*args, **options)

        def _update_actor(self, *args: Any, **options: Any) -> Any:
            mark("update", self.global_steps)
            return super()._update_actor(*args, **options)

        def _save_checkpoint(self) -> None:
            mark("checkpoint", self.global_steps)
            super()._save_checkpoint()

        def on_step_end(self) -> None:
            mark("weight_sync", self.global_steps)
            super().on_step_end()

        def _validate(self) -> dict[str, float]:
            mark("validation", self.global_steps)
            return super()._validate()

    return MarkingTrainer


@ray.remote
class MarkingTaskRunner(task_runner.TreeTaskRunner.__ray_metadata__.modified_class):  # type: ignore[attr-defined]
    """Our task runner with trainers that mark their phases."""

    @override
    def run(self, config: DictConfig) -> None:
        from verl_tree.trainer.modes import TREE_TRAINERS

        TREE_TRAINERS.update({mode: marking(trainer) for mode, trainer in TREE_TRAINERS.items()})
        super().run(config)
