"""The trainers by the value of `trainer.v1.trainer_mode`: verl's own classes between `TreeTrainer` and `BesideRows`.

docs/asynchronous.md says what the two asynchronous ones do with trees. For pyright `PPOTrainerSync` and the others are
`PPOTrainer` itself, because verl's decorator says no more of them.
"""

import logging

from typing_extensions import override
from verl.trainer.ppo.v1 import trainer_separate_async
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_tree.trainer.detach_worker import TreeDetachActorWorker
from verl_tree.trainer.portions.beside_rows import BesideRows
from verl_tree.trainer.trainer import TreeTrainer


class TreePPOTrainerSync(TreeTrainer, PPOTrainerSync, BesideRows):  # pyright: ignore[reportGeneralTypeIssues]
    """verl's synchronous trainer with trees."""


class TreePPOTrainerColocateAsync(TreeTrainer, PPOTrainerColocateAsync, BesideRows):  # pyright: ignore[reportGeneralTypeIssues]
    """verl's asynchronous trainer on the GPUs of the rollout, with trees."""


class TreePPOTrainerSeparateAsync(TreeTrainer, PPOTrainerSeparateAsync, BesideRows):  # pyright: ignore[reportGeneralTypeIssues]
    """verl's asynchronous trainer on GPUs of its own, with trees."""

    actor_worker = TreeDetachActorWorker

    @override
    def _setup(self) -> None:
        # With hybrid_engine=false verl 0.9.1 calls logger.info(..., flush=True), which is a TypeError unless the logger
        # drops the message before.
        logger = trainer_separate_async.logger
        level = logger.level
        logger.setLevel(logging.WARNING)
        try:
            super()._setup()
        finally:
            logger.setLevel(level)


TREE_TRAINERS: dict[str, type[TreeTrainer]] = {
    "sync": TreePPOTrainerSync,
    "colocate_async": TreePPOTrainerColocateAsync,
    "separate_async": TreePPOTrainerSeparateAsync,
}
"""verl compares the mode with literals, so our trainers take the names of verl's."""
