"""verl's hook after each save of a checkpoint, taken to mark the checkpoint as complete."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from typing_extensions import override
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback

from verl_tree.trainer.starts.checkpoints import mark_complete


class MarkedSaves(CheckpointCallback):
    """A callback that marks each saved checkpoint and then calls the user's (`trainer.checkpoint_callback_class`).

    The trainer's `require_whole` is called before that, and raises if the checkpoint is not to be marked.
    """

    def __init__(self, config: DictConfig, *, then: CheckpointCallback) -> None:
        super().__init__(config)
        self.then = then

    @override
    def on_save(
        self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **kwargs: Any
    ) -> None:
        trainer.require_whole()
        # Files may still be written after an asynchronous save, which FSDP does not have.
        if not async_save:
            mark_complete(Path(checkpoint_dir), step=global_step)
        self.then.on_save(
            trainer=trainer, global_step=global_step, checkpoint_dir=checkpoint_dir, async_save=async_save, **kwargs
        )
