"""The shared parts of the checks: findings, keys, and which parts of verl a configuration uses."""

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_tree.config import teaches_on_ranks
from verl_tree.configs import MODEL_ENGINES
from verl_tree.launch.command.composition import model_engine
from verl_tree.launch.command.environment import joins_running_cluster

logger = logging.getLogger(__name__)

ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
ACTOR_ENGINES = tuple(each.groups[0] for each in MODEL_ENGINES.values())
OTHER_ENGINES = tuple(group for each in MODEL_ENGINES.values() for group in each.groups[1:])
"""Where the engine configs of the actor may stand, and those of the other roles; a configuration has one engine."""
MODELS = ("actor_rollout_ref.model", "critic.model")
DATA_KEYS = ("data.train_files", "data.val_files")
CORRECTION = "algorithm.rollout_correction"
TEACHER_PATH = "distillation.teacher_models.teacher_model.model_path"


@dataclass(frozen=True, slots=True)
class Finding:
    """A reason why a configuration cannot work: the key, its value and the remedy.

    It is a warning if the training run may work all the same, because its processes may see other files.
    """

    message: str
    is_warning: bool = False

    @property
    def key(self) -> str:
        """What stands before the value: the key, in messages that have the form `key=value: remedy`."""
        return self.message.partition("=")[0]


Findings = Iterator[Finding]
Check = Callable[[DictConfig], Findings]
"""A check reads a resolved configuration and yields what is wrong. Checks are independent of each other."""


def settle(findings: Iterable[Finding]) -> None:
    """Log the warnings among what checks have found.

    Raises:
        ValueError: Settings cannot work; the message has a line for each, with its remedy.
    """
    refused = []
    for finding in findings:
        if finding.is_warning:
            logger.warning(finding.message)
        else:
            refused.append(finding.message)
    if refused:
        raise ValueError("\n".join(refused))


def refusal(config: DictConfig, key: str, remedy: str) -> Finding:
    """Return the finding that a key has a value that cannot work."""
    return Finding(f"{key}={value_of(config, key)}: {remedy}")


def refusal_here(config: DictConfig, key: str, remedy: str, *, brings_code: bool = False) -> Finding:
    """Return the finding that this machine lacks something; a warning where other machines may have it.

    `brings_code` says that it is a module, which Ray's runtime environment may bring along.
    """
    # Ray processes on other nodes read the model and the loops. Fine-tuning has no Ray.
    other_machines = "ray_kwargs" in config and (config.trainer.nnodes > 1 or joins_running_cluster(config))
    if other_machines or (brings_code and _has_own_modules(config)):
        remedy = f"{remedy} (a warning only: the training run's processes may see other files than this one)"
        return Finding(f"{key}={value_of(config, key)}: {remedy}", is_warning=True)
    return refusal(config, key, remedy)


def refusal_to_run(config: DictConfig, key: str, remedy: str) -> Finding:
    """Return the finding that a training run on this machine lacks something.

    It is a warning where others may have it, and where this machine is only asked, since it could not run the command.
    """
    if not lacks_cuda(config):
        return refusal_here(config, key, remedy)
    remedy = f"{remedy} (a warning only: this machine has no CUDA device)"
    return Finding(f"{key}={value_of(config, key)}: {remedy}", is_warning=True)


def value_of(config: DictConfig, key: str) -> Any:
    """Return the value of a dotted key, or None where there is none."""
    return OmegaConf.select(config, key)


def ranks_of(config: DictConfig, pool: str) -> int:
    """Return how many ranks a pool has (nodes x devices): `trainer`, or `ROLLOUT` for those that only generate."""
    return value_of(config, f"{pool}.nnodes") * value_of(config, f"{pool}.n_gpus_per_node")


def engines_of(config: DictConfig) -> dict[str, str]:
    """Return for each role in use where its engine config stands; the actor comes first."""
    groups = dict(zip((ACTOR, REF, "critic"), model_engine(config).groups, strict=True))
    is_used = {ACTOR: True, REF: uses_reference(config), "critic": uses_critic(config)}
    return {role: group for role, group in groups.items() if is_used[role]}


def uses_tree(config: DictConfig) -> bool:
    """Whether the tree engine trains instead of verl's own."""
    return config.tree.enabled is True


def uses_flat(config: DictConfig) -> bool:
    """Whether verl's own engine does."""
    return not uses_tree(config)


def uses_cpu(config: DictConfig) -> bool:
    """Whether everything runs on the CPU."""
    return config.trainer.device == "cpu"


def lacks_cuda(config: DictConfig) -> bool:
    """Whether the training run needs CUDA and torch sees none on this machine."""
    import torch

    return config.trainer.device == "cuda" and not torch.cuda.is_available()


def uses_critic(config: DictConfig) -> bool:
    """Whether there is a critic, as `verl.trainer.ppo.utils.need_critic` (0.9.1) decides."""
    enabled = value_of(config, "critic.enable")
    return value_of(config, "algorithm.adv_estimator") == "gae" if enabled is None else bool(enabled)


def fine_tunes(config: DictConfig) -> bool:
    """Whether it is the configuration of fine-tuning (`verl_tree.main_sft`)."""
    return "actor_rollout_ref" not in config


def models_of(config: DictConfig) -> tuple[str, ...]:
    """Return the groups of the models in use; that of the policy comes first."""
    return ("model",) if fine_tunes(config) else MODELS if uses_critic(config) else MODELS[:1]


def corrections(config: DictConfig) -> list[str]:
    """Return which parts of the correction for old rows are asked for."""
    return [name for name in ("rollout_is", "rollout_rs", "bypass_mode") if value_of(config, f"{CORRECTION}.{name}")]


def uses_reference(config: DictConfig) -> bool:
    """Whether there are reference workers, of a reference model or a teacher."""
    return config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss or uses_teacher_here(config)


def uses_teacher_here(config: DictConfig) -> bool:
    """Whether the reference workers have a teacher's model."""
    settings = value_of(config, "distillation")
    return isinstance(settings, DictConfig) and teaches_on_ranks(cast("Mapping[str, Any]", settings))


def data_files(config: DictConfig, key: str) -> list[str]:
    """Return the files of one of `DATA_KEYS`, which takes a name or a list of them."""
    files = value_of(config, key)
    return [each for each in (files if isinstance(files, ListConfig) else [files]) if isinstance(each, str)]


def is_parquet_here(name: str) -> bool:
    """Whether a name is that of a parquet file on this machine."""
    return name.endswith(".parquet") and os.path.isfile(name)


def columns(name: str) -> list[str]:
    """Return the columns of a parquet file; none of another file, one that is not here, or one that is damaged."""
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_schema(name).names if is_parquet_here(name) else []
    except (pyarrow.ArrowException, OSError):
        return []


def model_settings(path: Any) -> dict[str, Any]:
    """Return a model's config.json; nothing if it is not on this machine."""
    return model_file(path, "config.json")


def model_file(path: Any, name: str) -> dict[str, Any]:
    """Return a JSON file of a model; nothing if it is not on this machine."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if not isinstance(path, str):
        return {}
    file: Any = os.path.join(path, name)
    if not os.path.isdir(path):
        try:
            file = try_to_load_from_cache(path, name)
        except HFValidationError:
            return {}
    if not isinstance(file, str) or not os.path.isfile(file):
        return {}
    with open(file) as opened:
        return json.load(opened)


def text_settings(path: Any) -> dict[str, Any]:
    """Return the text part of a model's config.json; nothing if it is not on this machine."""
    settings = model_settings(path)
    return settings | settings.get("text_config", {})


def has_scheme(path: str) -> bool:
    """Whether a path is on another file system (`hdfs://`)."""
    return "://" in path


def missing(path: str, kind: str) -> str:
    """Return the message that a path does not exist, with where it was looked for."""
    expanded = os.path.expanduser(path)
    if expanded != path:
        return f"~ is not expanded; give {expanded}"
    where = "" if os.path.isabs(path) else f" in {os.getcwd()}"
    return f"no such {kind}{where}: {path}; give one that exists"


def _has_own_modules(config: DictConfig) -> bool:
    runtime_env = value_of(config, "ray_kwargs.ray_init.runtime_env") or {}
    bringers = ("working_dir", "py_modules", "pip", "uv", "conda", "container", "image_uri", "py_executable")
    return "PYTHONPATH" in (runtime_env.get("env_vars") or {}) or any(runtime_env.get(each) for each in bringers)
