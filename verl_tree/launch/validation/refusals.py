"""What the checks of a configuration share: the keys, how a value is refused, which roles are in use."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
ENGINES = (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config", "critic.fsdp")
MODELS = ("actor_rollout_ref.model", "critic.model")
DATA_KEYS = ("data.train_files", "data.val_files")

logger = logging.getLogger(__name__)


def refuse(config: DictConfig, key: str, remedy: str) -> None:
    """Raises the ValueError of a check: the key, its value and what to do about it."""
    raise ValueError(f"{key}={value_of(config, key)}: {remedy}")


def refuse_here(config: DictConfig, key: str, remedy: str, *, brings_code: bool = False) -> None:
    """Refuses what this machine lacks; warns only, where the processes of the run may see other files.

    verl reads the data, the model and the loops in Ray processes that it pins to no node.

    Args:
        config: The configuration.
        key: The option.
        remedy: What is missing, and what to do about it.
        brings_code: What is missing is a module, which Ray's runtime environment may bring along.
    """
    if _may_use_other_machines(config) or (brings_code and _has_own_modules(config)):
        where = "a warning only: the run's processes may see other files than this one"
        logger.warning("%s=%s: %s (%s)", key, value_of(config, key), remedy, where)
    else:
        refuse(config, key, remedy)


def refuse_true(config: DictConfig, keys: Sequence[str], remedy: str) -> None:
    """Refuses the first of the keys whose value is true."""
    for key in keys:
        if value_of(config, key):
            refuse(config, key, remedy)


def value_of(config: DictConfig, key: str) -> Any:
    """Returns the value of a dotted key; None where there is none."""
    return OmegaConf.select(config, key)


def uses_critic(config: DictConfig) -> bool:
    """Whether the run has a critic, as `verl.trainer.ppo.utils.need_critic` (0.9.1) decides."""
    enabled = config.critic.enable
    return config.algorithm.adv_estimator == "gae" if enabled is None else bool(enabled)


def uses_reference(config: DictConfig) -> bool:
    """Whether the run has a reference model."""
    return config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss


def data_files(config: DictConfig, key: str) -> list[str]:
    """Returns the files of one of `DATA_KEYS`, which takes a name or a list of them."""
    files = value_of(config, key)
    return [files] if isinstance(files, str) else list(files or [])


def column_names(path: Path) -> list[str]:
    """Returns the columns of a parquet file."""
    import pyarrow.parquet

    return pyarrow.parquet.read_schema(path).names


def has_scheme(path: str) -> bool:
    """Whether a path is on another file system (`hdfs://`)."""
    return "://" in path


def missing(path: str, kind: str) -> str:
    """Says that a path does not exist, where it was looked for, and that nobody expands a `~`."""
    expanded = os.path.expanduser(path)
    if expanded != path:
        return f"~ is not expanded; give {expanded}"
    where = "" if os.path.isabs(path) else f" in {os.getcwd()}"
    return f"no such {kind}{where}: {path}; give one that exists"


def _may_use_other_machines(config: DictConfig) -> bool:
    address = config.ray_kwargs.ray_init.get("address")
    return config.trainer.nnodes > 1 or "RAY_ADDRESS" in os.environ or address not in (None, "local")


def _has_own_modules(config: DictConfig) -> bool:
    runtime_env = config.ray_kwargs.ray_init.get("runtime_env") or {}
    bringers = ("working_dir", "py_modules", "pip", "uv", "conda", "container", "image_uri", "py_executable")
    return "PYTHONPATH" in (runtime_env.get("env_vars") or {}) or any(runtime_env.get(each) for each in bringers)
