"""The options: refused where they are wrong, and reaching the engine through Hydra with the promised precedence."""

import os
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass

from verl_tree.config import TreeConfig, TreeFSDPEngineConfig, WatchdogConfig
from verl_tree.launch.composition import accept_added_keys, compose_config, cpu_threads, device_profile


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"enabled": "yes"}, ["tree.enabled='yes'", "true or false"]),
        ({"capacity": 1}, ["tree.capacity=1", "null"]),
        ({"capacity": 8.5}, ["tree.capacity=8.5"]),
        ({"capacity": True}, ["tree.capacity=True"]),
        ({"packing": ""}, ["tree.packing=''", "auto"]),
        ({"max_loss_terms": 0}, ["tree.max_loss_terms=0", "null"]),
        ({"max_path_len": "9"}, ["tree.max_path_len='9'", "null"]),
        ({"gate": True}, ["tree.gate=True", "auto, always, never"]),
        ({"backend": 3}, ["tree.backend=3", "auto"]),
        ({"shared_tokens": "max"}, ["tree.shared_tokens='max'", "sum, mean, once"]),
        ({"logits_chunk_size": 0}, ["tree.logits_chunk_size=0", "1024"]),
        ({"drift": "off"}, ["tree.drift='off'", "heal, fork"]),
        ({"drift_max_tokens": 0}, ["tree.drift_max_tokens=0", "tree.drift=fork"]),
        ({"dump_dir": ""}, ["tree.dump_dir=''", "null"]),
        ({"dump_dir": 3}, ["tree.dump_dir=3", "folder"]),
        ({"show_every": -1}, ["tree.show_every=-1", "0 shows no trees"]),
        ({"watchdog": {"timeout_s": 0}}, ["tree.watchdog.timeout_s=0", "positive"]),
        ({"watchdog": {"poll_s": "2"}}, ["tree.watchdog.poll_s='2'"]),
        ({"watchdog": {"log_tail_lines": 0}}, ["tree.watchdog.log_tail_lines=0"]),
        ({"watchdog": {"enabled": 1}}, ["tree.watchdog.enabled=1"]),
        ({"watchdog": {"timeout": 3}}, ["tree.watchdog has no option timeout", "timeout_s"]),
        ({"watchdog": 3}, ["tree.watchdog=3", "mapping"]),
        ({"capcity": 64}, ["tree has no option capcity", "capacity"]),
    ],
)
def test_bad_option_names_value_and_remedy(values: dict, names: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        TreeConfig.from_mapping(values)
    for name in names:
        assert name in str(error.value)


def test_options_pass_through_and_take_defaults() -> None:
    options = TreeConfig(capacity=64)
    assert TreeConfig.from_mapping(options) is options
    assert TreeConfig.from_mapping({}) == TreeConfig()
    assert TreeConfig.from_mapping({"watchdog": {"poll_s": 1}}).watchdog == WatchdogConfig(poll_s=1)


def test_yaml_defaults_are_the_dataclass_defaults() -> None:
    config = compose_config(["profile=cpu"])
    assert TreeConfig.from_mapping(config.tree) == TreeConfig()


@pytest.mark.parametrize("strategy", ["fsdp_tree", "fsdp2", "fsdp"])
def test_engine_config_takes_both_engines(strategy: str) -> None:
    engine = TreeFSDPEngineConfig(strategy=strategy, tree={"capacity": 99})
    assert engine.strategy == strategy
    assert engine.tree == TreeConfig(capacity=99)


def test_engine_config_keeps_verls_check() -> None:
    with pytest.raises(AssertionError, match="megatron"):
        TreeFSDPEngineConfig(strategy="megatron")


@pytest.mark.parametrize(("enabled", "strategy"), [("true", "fsdp_tree"), ("false", "fsdp2")])
def test_options_reach_the_engine_of_every_role(enabled: str, strategy: str) -> None:
    config = compose_config(["profile=cpu", f"tree.enabled={enabled}", "tree.capacity=777"])
    OmegaConf.resolve(config)
    for role in (config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.critic):
        assert role.strategy == strategy
    engines = [
        omega_conf_to_dataclass(config.actor_rollout_ref.actor).engine,
        omega_conf_to_dataclass(config.actor_rollout_ref.ref.fsdp_config),
        omega_conf_to_dataclass(config.critic.fsdp),
    ]
    for engine in engines:
        assert isinstance(engine, TreeFSDPEngineConfig)
        assert engine.tree.capacity == 777
        assert engine.tree.enabled == (enabled == "true")
        assert engine.mixed_precision == {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    assert engines[0].strategy == strategy


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
    from hydra import compose, initialize_config_dir

    from verl_tree.launch.composition import prepare_hydra

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
