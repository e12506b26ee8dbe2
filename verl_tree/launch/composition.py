"""The configuration `tree_ppo`: verl's, the `tree` options and the device profile, composed by Hydra.

Values that depend on other settings are OmegaConf resolvers in the YAML files, so Hydra's rules decide what wins. From
weakest to strongest: verl's defaults, `tree_ppo.yaml`, the profile, a config that includes these, the command line.
"""

import os
from collections.abc import Sequence

from hydra import compose, initialize_config_module
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from typing_extensions import override

from verl_tree.configs import FLAT_STRATEGY, TREE_STRATEGY

CONFIG_MODULE = "verl_tree.configs"
CONFIG_NAME = "tree_ppo"
VERL_CONFIGS = "pkg://verl.trainer.config"


class TreeSearchPath(SearchPathPlugin):
    """Hydra plugin that adds verl's configs and ours to the search path.

    Hydra reads `hydra.searchpath` from the primary config only, so without the plugin every recipe must repeat it.
    """

    @override
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="verl_tree", path=f"pkg://{CONFIG_MODULE}")
        search_path.append(provider="verl", path=VERL_CONFIGS)


def device_profile() -> str:
    """Return the profile that `profile=auto` stands for: `gpu` where torch sees CUDA, else `cpu`."""
    import torch

    return "gpu" if torch.cuda.is_available() else "cpu"


def tree_strategy(enabled: bool) -> str:
    """Return the name of the engine that `tree.enabled` chooses."""
    return TREE_STRATEGY if enabled else FLAT_STRATEGY


def cpu_threads(num_processes: int) -> str:
    """Return the threads for each of `num_processes` equal processes, as text for an environment variable."""
    # Each process leaves one core to Ray, the loops and vLLM's scheduler. On two cores, threads that waited for a busy
    # core made an update six times slower.
    return str(max(1, len(os.sched_getaffinity(0)) // num_processes - 1))


def prepare_hydra() -> None:
    """Register the search path and the YAML files' resolvers with Hydra; may be called again."""
    Plugins.instance().register(TreeSearchPath)
    OmegaConf.register_new_resolver("tree_cpu_threads", cpu_threads, replace=True)
    OmegaConf.register_new_resolver("tree_device_profile", device_profile, replace=True)
    OmegaConf.register_new_resolver("tree_strategy", tree_strategy, replace=True)


def compose_config(overrides: Sequence[str] = ()) -> DictConfig:
    """Compose the configuration as the command line does; interpolations are not resolved yet.

    Overrides are Hydra's, e.g. `["profile=cpu", "data.train_batch_size=8"]`.
    """
    prepare_hydra()
    with initialize_config_module(config_module=CONFIG_MODULE, version_base=None):
        return compose(config_name=CONFIG_NAME, overrides=accept_added_keys(overrides))


def accept_added_keys(arguments: Sequence[str]) -> list[str]:
    """Rewrite `+key=value` to Hydra's `++key=value` ("add or override"); everything else passes unchanged.

    verl's users write `+` for keys that its YAML lacks. Hydra would refuse that for a key that our files set.
    """
    return [f"+{each}" if each.startswith("+") and not each.startswith("++") else each for each in arguments]
