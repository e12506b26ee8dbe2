"""Random settings: a command is accepted, or refused with the key; nothing else happens, whatever the values are."""

import contextlib

import pytest
from fuzzing import fuzzed
from hypothesis import example, given
from hypothesis import strategies as st
from input_cases import composed
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

pytest.importorskip("verl")

from verl_tree.launch.composition import resolve
from verl_tree.launch.environment import ray_env_vars
from verl_tree.launch.plan import capacity_lines, layout_lines
from verl_tree.launch.translation import translate
from verl_tree.launch.validation import find_before_the_queue

ROLLOUT = "actor_rollout_ref.rollout"
JUNK = [None, 0, -1, 1, 2, 7, 10**12, 10**400, 0.5, -0.5, 1e308, float("inf"), float("nan"), True, False]
JUNK += ["", "x", "nonsense", "../..", "1", "auto", "é" * 50, [], [1], ["x"], [None], {}, {"a": 1}]

NAMED = ("=", "full_key: ", "Interpolation key ", "not a supported primitive", "tree has no option", "verl refuses")
"""Parts of messages that say what is wrong: ours, those of OmegaConf (one names no key), those of verl's own check."""


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
    except (ValueError, OmegaConfBaseException) as error:
        return [str(error)]
    ray_env_vars(config)
    translate(config)
    found = [each.message for each in find_before_the_queue(config) if not each.is_warning]
    if not found:
        assert capacity_lines(config)
        assert layout_lines(config)
    return found


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
def test_no_value_makes_a_check_crash(changes: list[tuple[str, object]]) -> None:
    config = composed()
    for key, value in changes:
        with contextlib.suppress(OmegaConfBaseException):  # Hydra refuses a list for a group by itself
            OmegaConf.update(config, key, value, force_add=True)
    for message in refusals(config):
        assert any(named in message for named in NAMED), message


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
        ("actor_rollout_ref.model.lora_rank", None, "verl refuses the configuration: it cannot compute with it ("),
    ],
)
def test_a_refusal_names_the_key_and_the_remedy(key: str, value: object, remedy: str) -> None:
    config = composed()
    OmegaConf.update(config, key, value, force_add=True)
    (message,) = refusals(config)
    assert message.startswith(remedy)
    assert key in message


def test_all_groups_that_are_none_are_told_at_once() -> None:
    config = composed()
    config.trainer, config.data = 1, [2]
    with pytest.raises(ValueError, match="no group of options") as error:
        resolve(config)
    assert [line.partition(":")[0] for line in str(error.value).splitlines()] == ["data=[2]", "trainer=1"]
