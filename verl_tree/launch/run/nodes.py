"""What the nodes of a Ray cluster must have in common; looked at once Ray has started and before any process of a run.

The trainer runs on the node of the command (`on_this_node`), and so do its ranks where these are one node's
(`trainer.pools`). So logs, metrics, trees, pages and these ranks' checkpoints lie on that node. What processes of other
nodes open must be there under the same path.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from omegaconf import DictConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.utils.device import get_resource_name

from verl_tree.configs import MODEL_ENGINES
from verl_tree.launch.checks.code import ROUTER_KEY, TOOL_KEYS
from verl_tree.launch.checks.loop_entries import LOOPS_KEY
from verl_tree.launch.checks.refusals import (
    TEACHER_PATH,
    Finding,
    Findings,
    has_scheme,
    models_of,
    refusal,
    settle,
    value_of,
)
from verl_tree.launch.command.composition import model_engine
from verl_tree.trainer.pools import near_trainer

CHECKPOINTS = "trainer.default_local_dir"
MODEL_FILES = ("path", "tokenizer_path", "hf_config_path", "lora_adapter_path")
OTHER_FILES = (
    LOOPS_KEY,
    *TOOL_KEYS,
    ROUTER_KEY,
    TEACHER_PATH,
    "reward.reward_model.model_path",
    "reward.custom_reward_function.path",
)
"""What else agent loops, tools, rewards and servers open; their processes may be on any node."""


def on_this_node() -> dict[str, Any]:
    """Return Ray's options for an actor on the node of the command, unless Ray gives that node no work."""
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)}


def check_nodes(config: DictConfig) -> None:
    """Look whether the cluster has room for the ranks, and the other nodes what their processes open. Ray has started.

    Raises:
        ValueError: Ranks do not fit, or a file or folder is missing on a node, or must be shared and is not.
    """
    here = ray.get_runtime_context().get_node_id()
    nodes = [each for each in ray.nodes() if each["Alive"] and each["Resources"].get("CPU", 0) > 0]
    settle(_find_small_nodes(config, [each["Resources"] for each in nodes]))
    others = {each["NodeID"]: each["NodeManagerAddress"] for each in nodes if each["NodeID"] != here}
    if others:
        settle(_find_unlike_nodes(config, others))


def _find_small_nodes(config: DictConfig, sizes: list[dict[str, float]]) -> Findings:
    """Find that Ray's nodes, of these sizes, have room for fewer than `trainer.nnodes`: verl would wait for ever."""
    num_ranks, device = config.trainer.n_gpus_per_node, get_resource_name()
    least = {device: num_ranks, "CPU": 3 * num_ranks}
    num_fitting = sum(int(min(size.get(name, 0) // num for name, num in least.items())) for size in sizes)
    if num_fitting < config.trainer.nnodes:
        asked = " and ".join(f"{num} {name}" for name, num in least.items())
        remedy = f"Ray has room for {num_fitting} with {asked} each, and verl would wait for ever for the others"
        yield refusal(config, "trainer.nnodes", f"{remedy}; ray start --num-cpus=... counts places, not cores")


def _find_unlike_nodes(config: DictConfig, others: dict[str, str]) -> Findings:
    """Compare the nodes `others`, ids and addresses, with this one."""
    keys = [*(f"{model}.{name}" for model in models_of(config) for name in MODEL_FILES), *OTHER_FILES]
    given = {key: value_of(config, key) for key in keys}
    # What is not here either may be a name on the hub, or known to nobody, of which other checks tell.
    paths = {key: path for key, path in given.items() if isinstance(path, str) and os.path.exists(path)}
    with _shown_folder(config) as shown:
        missing = _missing([*paths.values(), *shown], nodes=others)
    for key, path in paths.items():
        if nodes := [node for node, lacked in missing.items() if path in lacked]:
            yield refusal(config, key, f"not on {_named(nodes)}; put a copy there, or take a path that all nodes share")
    if nodes := [node for node, lacked in missing.items() if lacked.intersection(shown)]:
        is_near = near_trainer([config.trainer.n_gpus_per_node] * config.trainer.nnodes) is not None
        yield from _find_own_folders(config, nodes, is_near=is_near)


def _find_own_folders(config: DictConfig, nodes: list[str], *, is_near: bool) -> Findings:
    """Say what comes of it that these nodes have a folder of their own; with `is_near` no rank is there."""
    writers = None
    if config.trainer.v1.trainer_mode != "sync":
        writers = "processes of TransferQueue, anywhere, save the prompts in flight"
    elif not is_near and model_engine(config) is MODEL_ENGINES["megatron"]:
        writers = "Megatron's ranks save and load together"
    where = f"the folder is another one on {_named(nodes)}"
    if writers:
        remedy = f"{writers}, and {where}; take a path that all nodes share, or trainer.save_freq=-1"
        yield refusal(config, CHECKPOINTS, remedy)
    elif not is_near:
        remedy = f"{where}, where ranks save; a start needs the same nodes, and complete.json knows no file there"
        yield Finding(refusal(config, CHECKPOINTS, remedy).message, is_warning=True)


@contextmanager
def _shown_folder(config: DictConfig) -> Iterator[list[str]]:
    """Yield a new file among the checkpoints, by which nodes know the folder; none if nothing is saved."""
    folder = Path(config.trainer.default_local_dir).absolute()
    if config.trainer.save_freq == -1 or has_scheme(str(folder)):
        yield []
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".seen_by_nodes_") as file:
        yield [file.name]


def _missing(paths: list[str], *, nodes: dict[str, str]) -> dict[str, set[str]]:
    """Return for the address of each node, given by its id, which paths it lacks."""

    @ray.remote(num_cpus=0)
    def lacks(paths: list[str]) -> set[str]:
        # Not a function of this module, whose imports take a node many seconds.
        return {path for path in paths if not os.path.exists(path)}

    asked = {
        address: lacks.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(paths)
        for node, address in nodes.items()
    }
    return {address: ray.get(each) for address, each in asked.items()}


def _named(nodes: list[str]) -> str:
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(sorted(nodes))}"
