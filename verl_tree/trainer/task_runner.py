"""The Ray actor that runs a training run: verl's task runner, with our trainer as its synchronous one.

verl compares `trainer.v1.trainer_mode` with the literal "sync" in seven places, so our trainer has to have that name.
verl's own registration function refuses a second class for a name; but the registry is this process's own.
"""

import ray
from omegaconf import DictConfig
from verl.trainer.main_ppo import TaskRunnerV1


@ray.remote
class TreeTaskRunner(TaskRunnerV1.__ray_metadata__.modified_class):  # type: ignore[attr-defined]
    """verl's `TaskRunnerV1` with `TreePPOTrainerSync` as the trainer "sync"."""

    def run(self, config: DictConfig) -> None:
        """Train as a validated configuration says; see `TaskRunnerV1.run`."""
        # Starting the trainer's imports here keeps them out of the driver.
        from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

        from verl_tree.trainer.trainer import TreePPOTrainerSync

        TRAINER_REGISTRY["sync"] = TreePPOTrainerSync
        super().run(config)
