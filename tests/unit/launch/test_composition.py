"""The configuration: which setting wins, and what is accepted on the command line."""

import os
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from verl_tree.launch.composition import accept_added_keys, compose_config, cpu_threads, device_profile, prepare_hydra


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
    arguments = ["a=1", "+b=2", "++c=3", "~d", "--cfg", "job"]
    assert accept_added_keys(arguments) == ["a=1", "++b=2", "++c=3", "~d", "--cfg", "job"]


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


def test_threads_leave_a_core_to_the_others() -> None:
    num_cores = len(os.sched_getaffinity(0))
    assert cpu_threads(1) == str(max(1, num_cores - 1))
    assert cpu_threads(1000) == "1"
