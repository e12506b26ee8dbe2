"""The configuration `tree_ppo`: verl's, the `tree` options and the device profile, composed by Hydra.

Values that depend on other settings are OmegaConf resolvers in the YAML files, so Hydra's rules decide what wins. From
weakest to strongest: verl's defaults, `tree_ppo.yaml`, the profile, a config that includes these, the command line.

A config file of the user's may build on `ppo_trainer`, as verl's do. Our file of that name stands first on the search
path and leads to `tree_ppo`, which finds verl's file under the name `verl_ppo_trainer`.
"""

import argparse
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hydra
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from typing_extensions import override

from verl_tree.configs import FSDP, MODEL_ENGINES, ModelEngine
from verl_tree.launch.command.misspelt import misspelt_option

CONFIG_MODULE = "verl_tree.configs"
CONFIG_FOLDER = Path(__file__).parents[2] / "configs"
CONFIG_NAME = "tree_ppo"
SFT_CONFIG_NAME = "tree_sft"
SFT_REFERENCE = "sft_trainer_engine"
"""verl's config file with all of its values for fine-tuning; those for training depend on the engine."""

FULL_ERROR = "HYDRA_FULL_ERROR"
"""The environment variable that asks Hydra for tracebacks."""

CONFIG_PATH_FLAGS = ("--config-path", "-cp")


class TreeSearchPath(SearchPathPlugin):
    """Hydra plugin that adds verl's configs and ours to the search path.

    Hydra reads `hydra.searchpath` from the primary config only, so without the plugin every recipe must repeat it.
    """

    @override
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        # First, because our `ppo_trainer` must hide verl's, which a folder of the user's may contain, too.
        search_path.prepend(provider="verl_tree", path=f"pkg://{CONFIG_MODULE}")
        search_path.append(provider="verl", path=f"file://{verl_trainer_folder() / 'config'}")


def device_profile() -> str:
    """Return the profile that `profile=auto` stands for: `gpu` where torch sees CUDA, else `cpu`."""
    if not _is_built_for_gpus():
        return "cpu"
    import torch

    return "gpu" if torch.cuda.is_available() else "cpu"


def _is_built_for_gpus() -> bool:
    """Whether the installed torch has code for GPUs; a small file of it says so, and torch itself takes seconds."""
    spec = find_spec("torch")
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError("torch is not installed; scripts/setup.sh installs it")
    version = runpy.run_path(os.path.join(spec.submodule_search_locations[0], "version.py"))
    return version["cuda"] is not None or version["hip"] is not None


def on_cpu(then: object, otherwise: object, *, _root_: DictConfig) -> object:
    """Return the first value where training runs on the processor, else the second."""
    return then if _root_.trainer.device == "cpu" else otherwise


def torch_device() -> str:
    """Return the device on which fine-tuning runs unless told otherwise: `cuda` where torch sees it, else `cpu`."""
    return "cuda" if device_profile() == "gpu" else "cpu"


def has_flash_attn() -> bool:
    """Whether flash-attn 2 is installed; the package flash_attn alone proves nothing, flash-attn-4 has it as well."""
    return find_spec("flash_attn_2_cuda") is not None


def flat_attention() -> str:
    """Return what verl's own engine computes attention with on CUDA: its default where that is installed, else sdpa."""
    return "flash_attention_2" if has_flash_attn() else "sdpa"


def tree_strategy(enabled: bool, *, _root_: DictConfig) -> str:
    """Return the name of the engine that `tree.enabled` and `model_engine` choose."""
    engine = model_engine(_root_)
    return engine.tree if enabled else engine.flat[0]


def packs_rows(enabled: bool, *, _root_: DictConfig) -> bool:
    """Return whether rows have no padding on a CPU: those of a tree, and those of Megatron's engine, which has ours."""
    return enabled or model_engine(_root_) is MODEL_ENGINES["megatron"]


def prompt_router(is_deterministic: bool) -> str | None:
    """Return the file of our router, or None where request ids alone must choose the server."""
    return None if is_deterministic else str(CONFIG_FOLDER / "prompt_router.yaml")


def cpu_threads(num_processes: int, num_spared: int = 1) -> str:
    """Return the threads for each of `num_processes` equal processes, as text for an environment variable.

    Each process leaves `num_spared` cores to Ray, the loops and vLLM's scheduler.
    """
    # On two cores, threads that waited for a busy core made an update of a small model six times slower.
    return str(max(1, len(os.sched_getaffinity(0)) // num_processes - num_spared))


def verl_trainer_folder() -> Path:
    """Return the folder of verl's entry points; verl is not imported, which takes seconds."""
    spec = find_spec("verl")
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError("verl is not installed; scripts/setup.sh installs it")
    return Path(spec.submodule_search_locations[0]) / "trainer"


def in_separate_async(then: object, otherwise: object, *, _root_: DictConfig) -> object:
    """Return the first value where rollouts have processes and ranks of their own, else the second."""
    return then if _root_.trainer.v1.trainer_mode == "separate_async" else otherwise


def cpu_ranks(*, _root_: DictConfig) -> int:
    """Return how many ranks this machine has: those that train, those of separate rollouts and those of teachers."""
    pools = [_root_.actor_rollout_ref.rollout] if in_separate_async(True, False, _root_=_root_) else []
    teachers = _root_.get("distillation") or {}
    if teachers.get("enabled") and teachers.get("nnodes"):
        pools.append(teachers)
    num_others = sum(_at_least_one(pool.n_gpus_per_node) * _at_least_one(pool.nnodes) for pool in pools)
    return _at_least_one(_root_.trainer.n_gpus_per_node) + num_others


def _at_least_one(num_devices: object) -> int:
    """Return a number of devices; 1 for what is none, which the checks refuse with its key."""
    return num_devices if isinstance(num_devices, int) and num_devices > 0 else 1


def logical_cpus(num_ranks: int) -> int:
    """Return the CPUs that Ray must count for so many ranks; verl waits for ever for a placement that does not fit."""
    # verl reserves up to three a rank; the trainer, the loops and TransferQueue need the others.
    return 5 + 3 * num_ranks


def prepare_hydra() -> None:
    """Register the search path, verl's configuration and the YAML files' resolvers with Hydra; may be called again."""
    Plugins.instance().register(TreeSearchPath)
    verl_config = OmegaConf.load(verl_trainer_folder() / "config" / "ppo_trainer.yaml")
    ConfigStore.instance().store(name="verl_ppo_trainer", node=verl_config, provider="verl")
    OmegaConf.register_new_resolver("tree_cpu_ranks", cpu_ranks, replace=True)
    OmegaConf.register_new_resolver("tree_cpu_threads", cpu_threads, replace=True)
    OmegaConf.register_new_resolver("tree_device_profile", device_profile, replace=True)
    OmegaConf.register_new_resolver("tree_device", torch_device, replace=True)
    OmegaConf.register_new_resolver("tree_flat_attention", flat_attention, replace=True)
    OmegaConf.register_new_resolver("tree_in_separate_async", in_separate_async, replace=True)
    OmegaConf.register_new_resolver("tree_logical_cpus", logical_cpus, replace=True)
    OmegaConf.register_new_resolver("tree_on_cpu", on_cpu, replace=True)
    OmegaConf.register_new_resolver("tree_packs_rows", packs_rows, replace=True)
    OmegaConf.register_new_resolver("tree_prompt_router", prompt_router, replace=True)
    OmegaConf.register_new_resolver("tree_strategy", tree_strategy, replace=True)


def compose_config(arguments: Sequence[str] = (), *, default_name: str = CONFIG_NAME) -> DictConfig:
    """Compose the configuration of a command line as Hydra does; interpolations are not resolved yet.

    Arguments are overrides, e.g. `["profile=cpu", "data.train_batch_size=8"]`, and may name a config file of the
    user's. Read are overrides, `--config-path`, `--config-name` and `--config-dir`; other flags change no value.
    `default_name` is `tree_ppo` or `tree_sft`.

    Raises:
        HydraException: An override or a config file is wrong.
        ValueError: The command line asks for an engine without trees, or has an option that is not there.
    """
    engine = asked_engine(arguments)
    prepare_hydra()
    parser = argparse.ArgumentParser(add_help=False)
    for long, short in (("--config-path", "-cp"), ("--config-name", "-cn"), ("--config-dir", "-cd")):
        parser.add_argument(long, short)
    parser.add_argument("overrides", nargs="*")
    options, _ = parser.parse_known_intermixed_args(accept_verl_arguments(arguments))
    overrides = options.overrides
    folder, added = options.config_path, options.config_dir and os.path.abspath(options.config_dir)
    if folder is None:
        folder, added = added, None
    if added is not None:
        overrides = [*overrides, f"hydra.searchpath=[file://{added}]"]
    name = options.config_name or default_name
    if folder is None:
        initialized = initialize_config_module(config_module=CONFIG_MODULE, version_base=None)
    else:
        initialized = initialize_config_dir(config_dir=folder, version_base=None)
    with initialized, _misspelt_refused(default_name, engine):
        return compose(config_name=name, overrides=overrides)


def run_command(run: Callable[[DictConfig], None], *, config_name: str) -> None:
    """Run an entry point with the configuration that the process's command line asks for.

    Raises:
        HydraException: An override or a config file is wrong.
        ValueError: The command line asks for an engine without trees, or has an option that is not there.
    """
    engine = asked_engine(sys.argv[1:])
    prepare_hydra()
    sys.argv[1:] = accept_verl_arguments(sys.argv[1:])
    given = os.environ.get(FULL_ERROR, "0")

    def task(config: DictConfig) -> None:
        os.environ[FULL_ERROR] = given
        run(config)

    # Else Hydra prints its errors itself and ends the process.
    os.environ[FULL_ERROR] = "1"
    try:
        with _misspelt_refused(config_name, engine):
            hydra.main(config_path=f"pkg://{CONFIG_MODULE}", config_name=config_name, version_base=None)(task)()
    finally:
        os.environ[FULL_ERROR] = given


@contextmanager
def _misspelt_refused(config_name: str, engine: ModelEngine) -> Iterator[None]:
    try:
        yield
    except HydraException as error:
        reference = SFT_REFERENCE if config_name == SFT_CONFIG_NAME else engine.values
        told = misspelt_option(error, {**_read_values(reference), "tree": tree_values()})
        if told is None:
            raise
        raise ValueError(told) from error


def verl_values(config: DictConfig) -> dict[str, Any]:
    """Return verl's own values for training, or for fine-tuning, interpolations as they stand; do not change them."""
    return _read_values(model_engine(config).values if "actor_rollout_ref" in config else SFT_REFERENCE)


@cache
def tree_values() -> dict[str, Any]:
    """Return the defaults of the `tree` options; do not change them."""
    values: Any = OmegaConf.to_container(OmegaConf.load(CONFIG_FOLDER / "tree" / "default.yaml"))
    return values


@cache
def _read_values(name: str) -> dict[str, Any]:
    values: Any = OmegaConf.to_container(OmegaConf.load(verl_trainer_folder() / "config" / f"{name}.yaml"))
    # Groups that the file takes from others, as in `- model@model: hf_model`.
    for each in values.pop("defaults", ()):
        if isinstance(each, dict):
            values |= {key.partition("@")[2]: {"_target_": None} for key in each}
    return values


def accept_verl_arguments(arguments: Sequence[str]) -> list[str]:
    """Rewrite what a command line for `verl.trainer.main_ppo` says differently; everything else passes unchanged.

    - `+key=value` becomes Hydra's `++key=value` ("add or override"). verl's users write `+` for keys that its YAML
      lacks, and Hydra would refuse that for a key that our files set. A name without a dot is a group of config files
      (`+scale=qwen3_8b`), for which Hydra knows `+` only.
    - A relative `--config-path` is looked for beside verl's entry points, as verl does, then in the working directory.
    """
    accepted, is_path = [], False
    for each in arguments:
        flag, equals, value = each.partition("=")
        if is_path:
            each = _config_folder(each)
        elif flag in CONFIG_PATH_FLAGS and equals:
            each = f"{flag}={_config_folder(value)}"
        elif each.startswith("+") and not each.startswith("++") and "." in flag.partition("@")[0]:
            each = f"+{each}"
        is_path = each in CONFIG_PATH_FLAGS
        accepted.append(each)
    return accepted


def asked_engine(arguments: Sequence[str]) -> ModelEngine:
    """Return the engine of a command line; FSDP where that says nothing, though a config file may name another.

    Raises:
        ValueError: It has no trees. Hydra would refuse the options of that engine first.
    """
    values = {flag.lstrip("+"): value for flag, _, value in (each.partition("=") for each in arguments)}
    return _engine_called(values.get("model_engine", FSDP))


def model_engine(config: DictConfig) -> ModelEngine:
    """Return the engine that `model_engine` of a configuration names; FSDP where it says nothing, as fine-tuning does.

    Raises:
        ValueError: It has no trees.
    """
    return _engine_called(config.get("model_engine", FSDP))


def _engine_called(name: object) -> ModelEngine:
    if (engine := MODEL_ENGINES.get(str(name))) is not None:
        return engine
    known = ", ".join(f"{known} ({engine.title})" for known, engine in MODEL_ENGINES.items())
    raise ValueError(
        f"model_engine={name}: trees run on {known} only; remove it, the options of that engine, and a config "
        "file that sets it"
    )


def _config_folder(name: str) -> str:
    if os.path.isabs(name) or "://" in name:
        return name
    of_verl = verl_trainer_folder() / name
    return str(of_verl.resolve()) if of_verl.is_dir() else os.path.abspath(name)
