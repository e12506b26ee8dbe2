"""Random settings: a command is accepted, or refused with the key; nothing else happens, whatever the values are."""

import contextlib
import re

import pytest
from fuzzing import fuzzed
from hypothesis import example, given
from hypothesis import strategies as st
from input_cases import composed
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

pytest.importorskip("verl")

from verl_tree.launch.checks import find_before_the_queue
from verl_tree.launch.checks.translation import translate
from verl_tree.launch.command.environment import ray_env_vars
from verl_tree.launch.command.resolution import resolve
from verl_tree.launch.run.plan import capacity_lines, layout_lines

ROLLOUT = "actor_rollout_ref.rollout"
JUNK = [None, 0, -1, 1, 2, 7, 10**12, 10**400, 0.5, -0.5, 1e308, float("inf"), float("nan"), True, False]
DELETED = "~"
JUNK += [DELETED, "", "x", "nonsense", "../..", "1", "auto", "é" * 50, [], [1], ["x"], [None], {}, {"a": 1}]

NAMED = re.compile(r"[\w.\[\]]+=|verl refuses")
"""How messages begin: ours with a key and its value; those of verl's own check name what verl names."""


def keys(group: dict, prefix: str = ""):
    for key, value in group.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from keys(value, f"{prefix}{key}.")


SETTINGS = st.tuples(
    st.deferred(lambda: st.sampled_from(list(keys(OmegaConf.to_container(composed()))))), st.sampled_from(JUNK)
)


def refusals(config: DictConfig) -> list[str]:
    """Do with a composed configuration what `python -m verl_tree.check` does; return why it is refused."""
    try:
        resolve(config)
    except ValueError as error:
        return [str(error)]
    ray_env_vars(config)
    translate(config)
    found = [each.message for each in find_before_the_queue(config) if not each.is_warning]
    if not found:
        assert capacity_lines(config)
        assert layout_lines(config)
    return found


def changed(changes: list[tuple[str, object]]) -> DictConfig:
    """Return the CPU configuration with keys set to values, or deleted, in this order."""
    config = composed()
    for key, value in changes:
        parent, _, name = key.rpartition(".")
        group = OmegaConf.select(config, parent) if parent else config
        if value != DELETED:
            with contextlib.suppress(OmegaConfBaseException):  # Hydra refuses a list for a group by itself
                OmegaConf.update(config, key, value, force_add=True)
        elif isinstance(group, DictConfig) and name in group:
            del group[name]
    return config


@fuzzed(25)
@given(st.lists(SETTINGS, min_size=1, max_size=3))
@example([("critic", 10**12)])
@example([("ray_kwargs.ray_init.runtime_env.env_vars", 1)])
@example([("trainer.n_gpus_per_node", 0)])
@example([("trainer.n_gpus_per_node", "x"), ("tree", None)])
@example([(f"{ROLLOUT}.response_length", "x")])
@example([(f"{ROLLOUT}.multi_turn.format", "nonsense"), (f"{ROLLOUT}.agent.default_agent_loop", "tool_agent")])
@example([("data.train_files", 7)])
@example([("data.train_files", [1])])
@example([("tree.watchdog.poll_s", 1e308)])
@example([("actor_rollout_ref", None), ("actor_rollout_ref.actor.optim._target_", None)])
@example([("actor_rollout_ref.ref", DELETED)])
@example([("actor_rollout_ref.actor.fsdp_config", None), ("actor_rollout_ref.actor.fsdp_config.qat", 1)])
@example([("actor_rollout_ref.actor.profiler", DELETED)])
@example([("trainer.v1", DELETED)])
@example([(f"{ROLLOUT}.pipeline_model_parallel_size", 0)])
@example([("actor_rollout_ref.model.tiled_mlp.enabled", True), ("actor_rollout_ref.model.tiled_mlp.num_shards", 0)])
@example([("tree.logits_chunk_size", "x")])
@example([("ray_kwargs.ray_init.runtime_env.env_vars.VLLM_CPU_KVCACHE_SPACE", [1])])
@example([("tree", None), ("tree.enabled", True)])
@example([("tree.watchdog", {"a": 1})])
@example([("model_engine", "x"), ("critic", DELETED)])
def test_no_value_makes_a_check_crash(changes: list[tuple[str, object]]) -> None:
    for message in refusals(changed(changes)):
        assert NAMED.match(message), message


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("critic", 10**12, "critic=1000000000000: this is no group of options"),
        ("actor_rollout_ref.actor", "x", "actor_rollout_ref.actor=x: this is no group of options"),
        ("tree.watchdog", 1, "tree.watchdog=1: this is no group of options"),
        ("trainer.n_gpus_per_node", 0, "trainer.n_gpus_per_node=0: give a whole number of at least 1"),
        ("trainer.n_gpus_per_node", "x", "trainer.n_gpus_per_node=x: this is no number"),
        (
            "tree.watchdog.poll_s",
            1e308,
            "tree.watchdog.poll_s=1e+308 must be a positive and finite number of seconds, at most",
        ),
        ("data.train_files", [1], "data.train_files=[1]: names no file"),
        ("critic", DELETED, "critic=(deleted): it is read; remove `~critic`"),
        ("data.seed", "${data.sed}", "data.seed=${data.sed}: Interpolation key 'data.sed' not found; give it a value"),
        ("data.val_files", ["a", "${nope}"], "data.val_files[1]=${nope}: Interpolation key 'nope' not found"),
        ("actor_rollout_ref.model.lora_rank", None, "verl refuses the configuration: it cannot compute with it ("),
    ],
)
def test_a_refusal_names_the_key_and_the_remedy(key: str, value: object, remedy: str) -> None:
    (message,) = refusals(changed([(key, value)]))
    assert message.startswith(remedy)
    assert key in message


def test_all_groups_that_are_none_are_told_at_once() -> None:
    config = composed()
    config.trainer, config.data = 1, [2]
    with pytest.raises(ValueError, match="no group of options") as error:
        resolve(config)
    assert [line.partition(":")[0] for line in str(error.value).splitlines()] == ["data=[2]", "trainer=1"]


def test_what_an_emptied_group_lacks_is_counted() -> None:
    (message,) = refusals(changed([("critic", None), ("critic.enable", True), ("trainer.v1.sampler", DELETED)]))
    keys, _, remedy = message.partition(": ")
    missing, others = keys.split(" and ")
    assert len(missing.split(", ")) == 5
    assert missing.startswith("critic.")
    # All of the critic's but `enable`, and the sampler.
    num_missing = len(composed().critic)
    assert others == f"{num_missing - 5} more"
    assert "what replaces their group" in remedy


def test_an_interpolation_may_not_lead_to_another_group() -> None:
    (message,) = refusals(changed([("distillation", "${data}")]))
    assert message.startswith("distillation._target_=(deleted), distillation.enabled=(deleted)")
