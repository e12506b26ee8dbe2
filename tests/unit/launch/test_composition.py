"""The configuration: which setting wins, and what is accepted on the command line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from verl.trainer import main_ppo as ppo_trainer

from verl_tree.launch.command.composition import (
    accept_verl_arguments,
    compose_config,
    cpu_threads,
    device_profile,
    prepare_hydra,
    verl_trainer_folder,
)

PROFILE = "profile=cpu"


def test_auto_is_the_profile_of_the_device() -> None:
    expected = "gpu" if torch.cuda.is_available() else "cpu"
    assert device_profile() == expected
    assert compose_config() == compose_config([f"profile={expected}"])


def test_profiles_set_the_device() -> None:
    assert compose_config(["profile=cpu"]).trainer.device == "cpu"
    gpu = compose_config(["profile=gpu"])
    assert gpu.trainer.device == "cuda"
    assert "num_gpus" not in gpu.ray_kwargs.ray_init
    assert gpu.actor_rollout_ref.rollout.dtype == "bfloat16"


def test_command_line_wins_over_the_profile() -> None:
    overrides = ["actor_rollout_ref.rollout.dtype=bfloat16", "trainer.n_gpus_per_node=2", "trainer.logger=[wandb]"]
    config = compose_config(["profile=cpu", *overrides])
    OmegaConf.resolve(config)
    assert config.actor_rollout_ref.rollout.dtype == "bfloat16"
    assert config.ray_kwargs.ray_init.num_gpus == 2
    assert config.trainer.logger == ["wandb"]


def test_separate_rollouts_of_the_cpu_profile() -> None:
    """Ranks, engine and pool of `separate_async`; the other modes keep verl's values."""
    ranks = ["profile=cpu", "trainer.n_gpus_per_node=2"]
    separate = [*ranks, "trainer.v1.trainer_mode=separate_async"]
    wide = [*separate, "actor_rollout_ref.rollout.nnodes=2", "actor_rollout_ref.rollout.n_gpus_per_node=3"]
    composed = [compose_config(overrides) for overrides in (ranks, separate, wide)]
    for config in composed:
        OmegaConf.resolve(config)
    assert [config.ray_kwargs.ray_init.num_gpus for config in composed] == [2, 3, 8]
    teachers = ["distillation.enabled=true", "distillation.nnodes=1"]
    assert compose_config(["profile=cpu", *teachers]).ray_kwargs.ray_init.num_gpus == 2
    assert compose_config(["profile=cpu", *teachers[:1]]).ray_kwargs.ray_init.num_gpus == 1, "it is on the ranks"
    assert [config.ray_kwargs.ray_init.num_cpus for config in composed] == [11, 14, 29]
    rollouts = [config.actor_rollout_ref.rollout for config in composed]
    assert [rollout.nnodes for rollout in rollouts] == [0, 1, 2]
    assert [rollout.checkpoint_engine.backend for rollout in rollouts] == ["naive", "gloo", "gloo"]
    module = "verl_tree.cpu.gloo_checkpoint_engine"
    assert [rollout.checkpoint_engine.custom_backend_module for rollout in rollouts] == [None, module, module]
    threads = [config.ray_kwargs.ray_init.runtime_env.env_vars.OMP_NUM_THREADS for config in composed]
    assert threads == [cpu_threads(2), cpu_threads(3), cpu_threads(8)]


def test_keys_that_verls_users_add_are_accepted() -> None:
    added = [
        "+actor_rollout_ref.rollout.enable_sleep_mode=true",
        "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=mine.Manager",
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:bf16}",
        "+trainer.brand_new=1",
    ]
    config = compose_config(["profile=cpu", *added])
    assert config.actor_rollout_ref.rollout.enable_sleep_mode is True
    assert config.actor_rollout_ref.rollout.agent.agent_loop_manager_class == "mine.Manager"
    assert config.actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype == "bf16"
    assert config.trainer.brand_new == 1


def test_only_single_plus_is_rewritten() -> None:
    arguments = ["a.a=1", "+a.b=2", "++a.c=3", "~a.d", "--cfg", "job"]
    assert accept_verl_arguments(arguments) == ["a.a=1", "++a.b=2", "++a.c=3", "~a.d", "--cfg", "job"]


def test_a_group_of_config_files_may_be_added(tmp_path: Path) -> None:
    (tmp_path / "scale").mkdir()
    (tmp_path / "scale" / "large.yaml").write_text("# @package _global_\ndata:\n  train_batch_size: 77\n")
    for added in ("+scale=large", "+scale@a.b=large"):
        assert accept_verl_arguments([added]) == [added]
    (tmp_path / "mine.yaml").write_text("defaults: [tree_ppo, _self_]\n")
    config = compose_config(["profile=cpu", f"--config-dir={tmp_path}", "--config-name=mine", "+scale=large"])
    assert config.data.train_batch_size == 77


def test_a_recipe_may_build_on_tree_ppo(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults:\n  - tree_ppo\n  - _self_\nactor_rollout_ref:\n  rollout:\n    n: 7\n"
    )
    prepare_hydra()
    with initialize_config_dir(str(tmp_path), version_base=None):
        config = compose("mine", overrides=["profile=cpu"])
        overridden = compose("mine", overrides=["profile=cpu", "actor_rollout_ref.rollout.n=3"])
    assert config.actor_rollout_ref.rollout.n == 7
    assert config.trainer.device == "cpu"
    assert overridden.actor_rollout_ref.rollout.n == 3


MINE = """
hydra:
  searchpath:
    - file://{folder}
defaults:
  - ppo_trainer
  - _self_
data:
  max_prompt_length: 77
actor_rollout_ref:
  rollout:
    n: 7
    dtype: float16
    multi_turn:
      enable: true
"""


@pytest.mark.parametrize(
    "name_it", ["--config-path={0} --config-name=mine", "--config-path {0} -cn mine.yaml", "--config-dir={0} -cn=mine"]
)
def test_a_file_that_builds_on_verls_trainer_is_composed_on_top_of_the_trees(tmp_path: Path, name_it: str) -> None:
    """Weakest to strongest: verl's defaults, tree_ppo.yaml, the profile, the user's file, the command line."""
    # A copy of verl's files on the search path, as in a checkout of verl, does not hide ours.
    (tmp_path / "mine.yaml").write_text(MINE.format(folder=verl_trainer_folder() / "config"))
    arguments = [*name_it.format(tmp_path).split(), "profile=cpu", "actor_rollout_ref.rollout.n=3"]
    config = compose_config(arguments)
    rollout = config.actor_rollout_ref.rollout
    assert config.data.max_response_length == 512  # verl's
    assert config.actor_rollout_ref.actor.strategy == "fsdp_tree"  # tree_ppo.yaml's
    assert rollout.free_cache_engine is False  # the profile's
    assert (config.data.max_prompt_length, rollout.dtype, rollout.multi_turn.enable) == (77, "float16", True)
    assert rollout.n == 3


def test_the_command_line_composes_a_file_of_the_users(tmp_path: Path) -> None:
    """Hydra's own command line, from another folder, finds the same."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "mine.yaml").write_text(MINE.format(folder=verl_trainer_folder() / "config"))
    for flag in ("--config-path", "--config-dir"):
        arguments = [f"{flag}=mine", "--config-name=mine", PROFILE]
        command = [sys.executable, "-m", "verl_tree.main_ppo", *arguments, "--cfg", "job"]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        assert OmegaConf.create(done.stdout) == compose_config([f"{flag}={folder}", *arguments[1:]])


def test_verls_own_files_keep_their_names() -> None:
    assert compose_config(["--config-name=ppo_trainer", PROFILE]) == compose_config([PROFILE])
    config = compose_config(["--config-path=./config", "--config-name=ppo_megatron_trainer.yaml", PROFILE])
    assert config.model_engine == "megatron"
    assert config.tree.enabled is True


def test_folders_are_found_as_verl_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    of_verl = str(verl_trainer_folder() / "config")
    assert of_verl == str(Path(ppo_trainer.__file__).parent / "config")
    arguments = ["--config-path=config", "-cp", "./config", "--config-path=conf", "--config-path=/a", "-cp=pkg://b"]
    here = str(tmp_path / "conf")
    expected = [f"--config-path={of_verl}", "-cp", of_verl, f"--config-path={here}", "--config-path=/a", "-cp=pkg://b"]
    assert accept_verl_arguments(arguments) == expected


def test_composing_imports_neither_verl_nor_torch() -> None:
    program = (
        "import sys; from verl_tree.launch.command.composition import compose_config; compose_config(['profile=cpu'])\n"
        "assert not {'verl', 'torch', 'ray'} & set(sys.modules)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


def test_threads_leave_a_core_to_the_others() -> None:
    num_cores = len(os.sched_getaffinity(0))
    assert cpu_threads(1) == str(max(1, num_cores - 1))
    assert cpu_threads(1000) == "1"
