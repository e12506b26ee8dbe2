"""The environment variables and Ray options of a training run's processes.

When verl is imported, it imports the modules named in `VERL_USE_EXTERNAL_MODULES`. Naming `verl_tree.cpu.platform`
there registers our CPU platform in the driver and in every Ray actor.
"""

import importlib
import json
import os
import sys

from omegaconf import DictConfig, OmegaConf, open_dict

PLATFORM_MODULE = "verl_tree.cpu.platform"
MODULES_VARIABLE = "VERL_USE_EXTERNAL_MODULES"
PLATFORM_VARIABLE = "VERL_PLATFORM"
LEVEL_VARIABLE = "SAGEMAKER_CONTAINER_LOG_LEVEL"
"""The server of vLLM 0.24 imports a package that gives the root logger this level, else ERROR; vLLM 0.31's does not.

The level is verl's, so that warnings of ours and of verl's still show in a process that imports the server.
"""
RAY_METRICS_VARIABLE = "RAY_enable_metrics_collection"
"""Ray 2.60 can crash a process in the moment in which its metric exporter starts: two threads use one list.

Ray starts a worker again, but nobody starts the driver again. On a machine without a GPU nobody reads Ray's metrics
either, so they are off there. Elsewhere dashboards need them.
"""


LOGGERS_VARIABLES = (
    "VERL_FILE_LOGGER_PATH",
    "VERL_FILE_LOGGER_ROOT",
    "TENSORBOARD_DIR",
    "WANDB_MODE",
    "WANDB_DIR",
    "WANDB_PROJECT",
    "HF_HUB_OFFLINE",
)
"""What a shell says of where metrics go, and whether a network is asked; none is a secret.

Processes of a running cluster have the environment of its `ray start`, not that of the command.
"""

JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""What Ray's job server tells the command of a job of its runtime environment."""


def ray_env_vars(config: DictConfig) -> dict[str, str]:
    """Return the environment variables that the driver and every Ray actor of the training run need."""
    variables = {
        MODULES_VARIABLE: ",".join([*external_modules(config), PLATFORM_MODULE]),
        LEVEL_VARIABLE: _set_by_user(config, LEVEL_VARIABLE, default="WARNING"),
    }
    if config.trainer.device == "cpu":
        variables[PLATFORM_VARIABLE] = "cpu"
        variables[RAY_METRICS_VARIABLE] = _set_by_user(config, RAY_METRICS_VARIABLE, default="0")
    return variables


def set_variables(config: DictConfig) -> dict[str, str]:
    """Set `ray_env_vars` for this process and return them; call it before verl is imported."""
    variables = ray_env_vars(config)
    os.environ.update(variables)
    if "verl" in sys.modules:
        # It was imported before, and with it the modules of the variables as they were then.
        importlib.import_module(PLATFORM_MODULE)
    return variables


def external_modules(config: DictConfig) -> list[str]:
    """Return the user's modules for verl to import: those named in Ray's variables, else those named in the shell."""
    names = _set_by_user(config, MODULES_VARIABLE, default="")
    return [name for name in names.split(",") if name not in ("", PLATFORM_MODULE)]


def _set_by_user(config: DictConfig, name: str, *, default: str) -> str:
    """Return a variable's value in the command's Ray options, else in the shell, else the default."""
    # Fine-tuning has no Ray.
    for_ray = OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars") or {}
    value = for_ray.get(name)
    return os.environ.get(name, default) if value is None else str(value)


def joins_running_cluster(config: DictConfig) -> bool:
    """Whether Ray joins a cluster that somebody else started (`ray start`, `ray job submit`)."""
    return "RAY_ADDRESS" in os.environ or config.ray_kwargs.ray_init.get("address") not in (None, "local")


def _of_the_shell() -> dict[str, str]:
    """Return `LOGGERS_VARIABLES` of this process, but those of `ray job submit`, which Ray refuses to hear twice."""
    job = json.loads(os.environ.get(JOB_VARIABLE, "{}")).get("runtime_env", {}).get("env_vars", {})
    return {name: os.environ[name] for name in LOGGERS_VARIABLES if name in os.environ and name not in job}


def set_ray_options(config: DictConfig, variables: dict[str, str]) -> None:
    """Set in `ray_kwargs.ray_init` the processes' environment variables and whether Ray joins or starts a cluster."""
    ray_init = config.ray_kwargs.ray_init
    with open_dict(ray_init):
        given = {**(ray_init.runtime_env.get("env_vars") or {}), **variables}
        ray_init.runtime_env.env_vars = given
        if joins_running_cluster(config):
            ray_init.runtime_env.env_vars = _of_the_shell() | given
            # Ray refuses sizes for a cluster that it did not start.
            ray_init.num_cpus = None
            ray_init.num_gpus = None
        elif ray_init.get("num_cpus") is not None or ray_init.get("num_gpus") is not None:
            # Sizes ask for a cluster of our own; without an address Ray would join another one on this machine.
            ray_init.address = "local"
