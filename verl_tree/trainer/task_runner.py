"""The Ray actor of a training run: verl's task runner, with our trainers in place of verl's.

verl compares `trainer.v1.trainer_mode` with literals in many places, so our trainers need verl's names. verl's
registration function refuses a second class for a name, but each process has its own registry.
"""

import ray
from omegaconf import DictConfig
from verl.trainer.main_ppo import TaskRunnerV1


@ray.remote
class TreeTaskRunner(TaskRunnerV1.__ray_metadata__.modified_class):  # type: ignore[attr-defined]
    """verl's `TaskRunnerV1` with `TREE_TRAINERS`."""

    def run(self, config: DictConfig) -> None:
        """Train as a validated configuration says; see `TaskRunnerV1.run`."""
        # Imported here to keep the trainer's imports out of the driver.
        from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

        from verl_tree.trainer.modes import TREE_TRAINERS

        TRAINER_REGISTRY.update(TREE_TRAINERS)
        super().run(config)
