"""The options: refused where they are wrong, documented once, and reaching the engine of every role through Hydra."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass

from verl_tree.config import TreeConfig, WatchdogConfig
from verl_tree.engine_config import TreeFSDPEngineConfig, TreeVeOmniEngineConfig
from verl_tree.launch.command.composition import compose_config


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"enabled": "yes"}, ["tree.enabled='yes'", "true or false"]),
        ({"capacity": 1}, ["tree.capacity=1", "null"]),
        ({"capacity": 8.5}, ["tree.capacity=8.5"]),
        ({"capacity": "max"}, ["tree.capacity='max'", "'auto'"]),
        ({"memory_gib": 0}, ["tree.memory_gib=0", "null"]),
        ({"memory_gib": "4"}, ["tree.memory_gib='4'", "GiB"]),
        ({"capacity": True}, ["tree.capacity=True"]),
        ({"relay": "yes"}, ["tree.relay='yes'", "auto, always, never"]),
        ({"relay_store": "disk"}, ["tree.relay_store='disk'", "device, host"]),
        ({"packing": ""}, ["tree.packing=''", "auto"]),
        ({"packing": "single_path"}, ["tree.packing='single_path'", "auto, heuristic, exact", "benchmarks/packing.py"]),
        ({"max_loss_terms": 0}, ["tree.max_loss_terms=0", "null"]),
        ({"max_path_len": "9"}, ["tree.max_path_len='9'", "null"]),
        ({"gate": True}, ["tree.gate=True", "auto, always, never"]),
        ({"backend": 3}, ["tree.backend=3", "auto"]),
        ({"shared_tokens": None}, ["tree.shared_tokens=None", "sum"]),
        ({"rows": "last"}, ["tree.rows='last'", "all, longest"]),
        ({"session_weight": "prompt"}, ["tree.session_weight='prompt'", "leaf, session"]),
        *[
            (
                {"role_weight": value},
                [f"tree.role_weight={value!r} must be", "of at least 0 by role", "null"],
            )
            for value in (
                *({"p": weight} for weight in (-1, float("nan"), float("inf"), "1", True, None)),
                *({name: 1} for name in ("", "two words", "a" * 65, 3)),
                {"planner:0.5": None},  # what Hydra reads where the space behind the colon is missing
                *([1.0], "planner", 2, False),
            )
        ],
        ({"logits_chunk_size": 0}, ["tree.logits_chunk_size=0", "1024"]),
        ({"drift": "off"}, ["tree.drift='off'", "heal, fork"]),
        ({"drift_max_tokens": 0}, ["tree.drift_max_tokens=0", "tree.drift=fork"]),
        ({"dump_dir": ""}, ["tree.dump_dir=''", "null"]),
        ({"dump_dir": 3}, ["tree.dump_dir=3", "folder"]),
        ({"show_every": -1}, ["tree.show_every=-1", "0 shows no trees"]),
        ({"console": "off"}, ["tree.console='off'", "steps, all"]),
        ({"watchdog": {"timeout_s": 0}}, ["tree.watchdog.timeout_s=0", "positive"]),
        ({"watchdog": {"poll_s": float("inf")}}, ["tree.watchdog.poll_s=inf", "finite"]),
        ({"watchdog": {"timeout_s": float("nan")}}, ["tree.watchdog.timeout_s=nan", "finite"]),
        ({"watchdog": {"poll_s": "2"}}, ["tree.watchdog.poll_s='2'"]),
        ({"watchdog": {"log_tail_lines": 0}}, ["tree.watchdog.log_tail_lines=0"]),
        ({"watchdog": {"enabled": 1}}, ["tree.watchdog.enabled=1"]),
        ({"watchdog": {"timeout": 3}}, ["tree.watchdog.timeout=3: no such option", "timeout_s"]),
        ({"watchdog": 3}, ["tree.watchdog=3", "mapping"]),
        ({"capcity": 64}, ["tree.capcity=64: no such option", "capacity"]),
    ],
)
def test_bad_option_names_value_and_remedy(values: dict, names: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^tree") as error:
        TreeConfig.from_mapping(values)
    for name in names:
        assert name in str(error.value)


def test_options_pass_through_and_take_defaults() -> None:
    options = TreeConfig(capacity=64)
    assert TreeConfig.from_mapping(options) is options
    assert TreeConfig.from_mapping({}) == TreeConfig()
    assert TreeConfig.from_mapping({"watchdog": {"poll_s": 1}}).watchdog == WatchdogConfig(poll_s=1)


def test_roles_weigh_what_the_command_says() -> None:
    config = compose_config(["profile=cpu", "tree.role_weight={planner: .5, worker/a.b-c_2: 0}"])
    assert TreeConfig.from_mapping(config.tree).role_weight == {"planner": 0.5, "worker/a.b-c_2": 0.0}
    engine = omega_conf_to_dataclass(config.actor_rollout_ref.actor).engine
    assert engine.tree.role_weight == {"planner": 0.5, "worker/a.b-c_2": 0.0}


def test_yaml_defaults_are_the_dataclass_defaults() -> None:
    config = compose_config(["profile=cpu"])
    assert TreeConfig.from_mapping(config.tree) == TreeConfig()


def test_every_option_is_documented_and_the_page_is_made_from_the_yaml() -> None:
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "scripts/make_options.py", "--check"], cwd=root, check=True)
    documented = re.findall(r"^\| `(tree\.[\w.]+)`", (root / "docs" / "options.md").read_text(), flags=re.MULTILINE)
    options = [f"tree.{each.name}" for each in fields(TreeConfig)]
    assert documented == options + [f"tree.watchdog.{each.name}" for each in fields(WatchdogConfig)]


@pytest.mark.parametrize(
    ("engine_class", "strategy"),
    [
        *((TreeFSDPEngineConfig, strategy) for strategy in ("fsdp_tree", "fsdp2", "fsdp")),
        *((TreeVeOmniEngineConfig, strategy) for strategy in ("veomni_tree", "veomni")),
    ],
)
def test_engine_config_takes_both_engines(engine_class: type[Any], strategy: str) -> None:
    engine = engine_class(strategy=strategy, tree={"capacity": 99})
    assert engine.strategy == strategy
    assert engine.tree == TreeConfig(capacity=99)


def test_engine_config_keeps_verls_check() -> None:
    with pytest.raises(AssertionError, match="megatron"):
        TreeFSDPEngineConfig(strategy="megatron")
    with pytest.raises(AssertionError, match="fsdp2 not supported"):
        TreeVeOmniEngineConfig(strategy="fsdp_tree")


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
