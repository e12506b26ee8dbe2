"""A composed configuration becomes one of plain values, and is refused if it is not whole.

The checks, the translations and verl itself read keys without asking whether they are there. What a command line or a
config file deleted, or put in a group's place, is therefore refused here, before anything computes with it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_tree.launch.command.composition import model_engine, tree_values, verl_values

_MOST_KEYS = 5
"""How many of the missing keys a message names."""

OWN_GROUPS: dict[str, Any] = {"ray_kwargs": {"ray_init": {"runtime_env": {"env_vars": {}}}}}
"""Groups that verl's files lack, and a configuration may."""


def resolve(config: DictConfig) -> None:
    """Resolve a configuration in place.

    Raises:
        ValueError: It is not one of ours, asks for an engine without trees, lacks options, has an interpolation that
            leads nowhere, or values still to be given.
    """
    require_trees(config)
    model_engine(config)  # the groups of another engine have other options
    require_groups(config)
    try:
        OmegaConf.resolve(config)
    except OmegaConfBaseException as error:
        # In the order of the keys, so the first that stands as it was written is what failed.
        key, value = next(_interpolations(OmegaConf.to_container(config, resolve=False)), ("an interpolation", ""))
        cause = str(error).splitlines()[0]
        raise ValueError(f"{key}={value}: {cause}; give it a value, or the name of a key that has one") from error
    require_values(config)
    # An interpolation may have put something else in the place of a group.
    require_groups(config)


def require_trees(config: DictConfig) -> None:
    """Raise ValueError for a configuration that builds on neither `tree_ppo` nor `tree_sft`."""
    if "tree" not in config:
        raise ValueError(
            "the configuration has no group `tree`: list `ppo_trainer` or `tree_ppo` first among the defaults of your "
            "config file (`tree_sft` for fine-tuning), or add --config-name=tree_ppo"
        )


def require_groups(config: DictConfig) -> None:
    """Raise ValueError for values where options are grouped, and for options that are not there."""
    values: Any = OmegaConf.to_container(config, resolve=False)
    defaults = {**verl_values(config), "tree": tree_values()}
    wrong = dict(_values_for_groups(values, defaults)) | dict(_values_for_groups(values, OWN_GROUPS))
    if wrong:
        remedy = "this is no group of options; remove it, and set the options of the group one by one"
        raise ValueError("\n".join(f"{key}={value}: {remedy}" for key, value in wrong.items()))
    lacking = list(_lacking(values, defaults))
    if lacking:
        raise ValueError(_deleted(lacking))


def _deleted(lacking: Sequence[str]) -> str:
    keys = ", ".join(f"{key}=(deleted)" for key in lacking[:_MOST_KEYS])
    if len(lacking) == 1:
        return f"{keys}: it is read; remove `~{lacking[0]}`, or what replaces its group, or give it a value"
    others = f" and {len(lacking) - _MOST_KEYS} more" if len(lacking) > _MOST_KEYS else ""
    return f"{keys}{others}: they are read; remove what deletes them (`~KEY`) or what replaces their group"


def _values_for_groups(values: dict[str, Any], defaults: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, default in defaults.items():
        value = values.get(name)
        if not isinstance(default, dict) or name not in values:
            continue
        if isinstance(value, dict):
            yield from _values_for_groups(value, default, f"{prefix}{name}.")
        elif (value is not None or default) and not str(value).startswith(("${", "???")):
            yield f"{prefix}{name}", value


def _lacking(values: dict[str, Any], defaults: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, default in defaults.items():
        if name not in values:
            yield f"{prefix}{name}"
        elif isinstance(default, dict) and isinstance(values[name], dict):
            yield from _lacking(values[name], default, f"{prefix}{name}.")


def _interpolations(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the keys and texts of the values that are not resolved, in the order of the keys."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _interpolations(each, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _interpolations(each, f"{key}[{number}]")
    elif isinstance(value, str) and "${" in value:
        yield key, value


def require_values(config: DictConfig) -> None:
    """Raise ValueError for keys of a resolved configuration that are still to be given (`???`)."""
    # verl leaves this one open for whoever uses a reward model.
    uses_reward_model = OmegaConf.select(config, "reward.reward_model.enable")
    unused = set() if uses_reward_model else {"reward.reward_model.rollout.name"}
    missing = sorted(OmegaConf.missing_keys(config) - unused)
    if missing:
        keys = ", ".join(f"{key}=???" for key in missing)
        raise ValueError(f"{keys}: no value; give it on the command line or in your config file")
