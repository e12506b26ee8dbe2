"""The Ray actor that runs the training: verl's task runner, with our trainer as its synchronous one.

verl compares `trainer.v1.trainer_mode` with the literal "sync" in seven places, so our trainer has to have
that name; verl's own registration function refuses a second class for a name. The registry is this process'
own.
"""

import ray
from omegaconf import DictConfig
from verl.trainer.main_ppo import TaskRunnerV1


@ray.remote
class TreeTaskRunner(TaskRunnerV1.__ray_metadata__.modified_class):
    """verl's `TaskRunnerV1` with `TreePPOTrainerSync` as the trainer "sync"."""

    def run(self, config: DictConfig) -> None:
        """Trains as `config` says; see `TaskRunnerV1.run`.

        Raises:
            ValueError: another trainer mode than "sync".
        """
        mode = config.trainer.v1.trainer_mode
        if mode != "sync":
            raise ValueError(f"trainer.v1.trainer_mode={mode} is not supported; set trainer.v1.trainer_mode=sync")
        # Starting the trainer's imports here keeps them out of the driver.
        from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

        from verl_tree.trainer.trainer import TreePPOTrainerSync

        TRAINER_REGISTRY[mode] = TreePPOTrainerSync
        super().run(config)
