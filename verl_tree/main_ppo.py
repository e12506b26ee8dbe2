"""The entry point: compose the configuration, refuse what cannot work, prepare the processes, train.

    python -m verl_tree.main_ppo data.train_files=... actor_rollout_ref.model.path=... [any verl override]

`--cfg job` prints the configuration, `--help` the options. Everything heavy is imported after that.
"""

import os
import sys

import hydra
from omegaconf import DictConfig, OmegaConf, open_dict

from verl_tree.launch.composition import CONFIG_MODULE, CONFIG_NAME, accept_added_keys, prepare_hydra

PLUGIN = "verl_tree.cpu.platform"
MODULES_VARIABLE = "VERL_USE_EXTERNAL_MODULES"
PLATFORM_VARIABLE = "VERL_PLATFORM"


def main() -> None:
    """Parses the command line and trains."""
    prepare_hydra()
    sys.argv[1:] = accept_added_keys(sys.argv[1:])
    _composed()


@hydra.main(config_path=f"pkg://{CONFIG_MODULE}", config_name=CONFIG_NAME, version_base=None)
def _composed(config: DictConfig) -> None:
    run(config)


def run(config: DictConfig) -> None:
    """Trains as a composed configuration says.

    Args:
        config: The configuration of `verl_tree.launch.composition.compose_config`; resolved in place.

    Raises:
        ValueError: A setting that cannot work.
        RuntimeError: A process of the run died or hung; the message has the cause and the tail of its log.
    """
    OmegaConf.resolve(config)
    environment = process_environment(config)
    os.environ.update(environment)
    import verl_tree.cpu.platform  # noqa: F401 - before anything of verl asks for the platform
    from verl_tree.launch.validation import validate

    validate(config)
    adapt_ray_options(config, environment)
    train(config)


def process_environment(config: DictConfig) -> dict[str, str]:
    """Returns the environment variables that the driver and every Ray actor of the run need.

    verl imports the modules of `VERL_USE_EXTERNAL_MODULES` in each process; those that the user named, for Ray or
    in the shell, stay first.
    """
    of_ray = config.ray_kwargs.ray_init.runtime_env.get("env_vars") or {}
    named = of_ray.get(MODULES_VARIABLE, os.environ.get(MODULES_VARIABLE, ""))
    modules = [each for each in named.split(",") if each]
    environment = {MODULES_VARIABLE: ",".join([each for each in modules if each != PLUGIN] + [PLUGIN])}
    if config.trainer.device == "cpu":
        environment[PLATFORM_VARIABLE] = "cpu"
    return environment


def adapt_ray_options(config: DictConfig, environment: dict[str, str]) -> None:
    """Adds the environment to Ray's options, and tells a cluster to join from one to start.

    A cluster that runs already (`RAY_ADDRESS`, `ray_kwargs.ray_init.address`) keeps the sizes it was started with.

    Args:
        config: The configuration; `ray_kwargs.ray_init` is changed in place.
        environment: Variables for every process of the run (`process_environment`).
    """
    ray_init = config.ray_kwargs.ray_init
    with open_dict(ray_init):
        ray_init.runtime_env.env_vars = {**(ray_init.runtime_env.get("env_vars") or {}), **environment}
        if "RAY_ADDRESS" in os.environ or ray_init.get("address") not in (None, "local"):
            # Ray refuses sizes for a cluster that it did not start (`ray start`, `ray job submit`).
            ray_init.num_cpus = None
            ray_init.num_gpus = None
        elif ray_init.get("num_cpus") is not None or ray_init.get("num_gpus") is not None:
            # Sizes ask for a cluster of our own; without an address Ray would join another one on this machine.
            ray_init.address = "local"


def train(config: DictConfig) -> None:
    """Starts Ray and runs the task runner to its end, watched.

    Args:
        config: A valid, resolved configuration.
    """
    from verl.trainer.main_ppo import run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    from verl_tree.config import TreeConfig
    from verl_tree.launch.watchdog import watch_run
    from verl_tree.trainer.task_runner import TreeTaskRunner

    auto_set_device(config)
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    with watch_run(TreeConfig.from_mapping(config.tree).watchdog):
        run_ppo(config, task_runner_class=TreeTaskRunner)


if __name__ == "__main__":
    main()
