"""The Ray actor of a training run: verl's task runner, with our trainers in place of verl's.

verl compares `trainer.v1.trainer_mode` with literals in many places, so our trainers need verl's names. verl's
registration function refuses a second class for a name, but each process has its own registry.
"""

import sys

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
        try:
            super().run(config)
        finally:
            if "wandb" in sys.modules:
                # verl has ended wandb's run. wandb's own process would be told to end when this one does, but Ray ends
                # both at once, and a traceback would be the last that is seen of a good run.
                sys.modules["wandb"].teardown()

    def init_agent_loop_manager(self) -> None:
        """Start the agent loop workers and wait until they are there; see `TaskRunnerV1`.

        verl does not wait, and their imports, half a minute on a slow machine, would be in the time of the first step.
        """
        from verl_tree.trainer.teacher import without_servers

        with without_servers(self.config):
            super().init_agent_loop_manager()
        # A manager of the user's may keep its workers elsewhere.
        workers = getattr(self.agent_loop_manager, "agent_loop_workers", [])
        ray.get([worker.__ray_ready__.remote() for worker in workers])
        print("agent loops started", flush=True)
