"""Checks of single values: their kind and their range.

They come before all other checks, which compute with these values. verl takes many of them without a look: a run with
`rollout.n=0` or `lr=.nan` starts and fails minutes later, or never.
"""

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl_tree.config import TreeConfig
from verl_tree.configs import MODEL_ENGINES
from verl_tree.launch.checks.capacity import FORMER
from verl_tree.launch.checks.refusals import (
    ACTOR,
    CORRECTION,
    MODELS,
    REF,
    ROLLOUT,
    Finding,
    Findings,
    refusal,
    uses_critic,
    uses_reference,
    value_of,
)
from verl_tree.launch.command.composition import tree_values, verl_values

_ABSENT = object()
"""Stands for a key that the configuration lacks; those of other engines lack some of verl's."""


@dataclass(frozen=True, slots=True)
class Range:
    """A check that a number is at least `least` (above it, if `is_open`) and at most `most`; a whole one if `is_whole`.

    `applies` says for which configurations it holds. null is let through only with `or_null`, and .inf with `or_inf`.
    """

    key: str
    least: float = 1
    most: float = math.inf
    is_open: bool = False
    is_whole: bool = False
    or_null: bool = False
    or_inf: bool = False
    applies: Callable[[DictConfig], bool] = lambda _: True

    def __call__(self, config: DictConfig) -> Findings:
        """Yield a finding if the value is not in the range."""
        value = OmegaConf.select(config, self.key, default=_ABSENT)
        if value is _ABSENT or not self.applies(config) or (value is None and self.or_null):
            return
        if not self._holds(value):
            yield refusal(config, self.key, f"give {self}")

    def _holds(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float) or value > self.most:
            return False
        if isinstance(value, float) and math.isinf(value) and not self.or_inf:
            return False
        is_enough = value > self.least if self.is_open else value >= self.least
        return is_enough and (not self.is_whole or value % 1 == 0)

    def __str__(self) -> str:
        """Return the range in words, such as `a whole number of at least 1, or null`."""
        kind = "whole " if self.is_whole else "" if self.or_inf or not math.isinf(self.most) else "finite "
        least = f"{'above' if self.is_open else 'of at least'} {self.least:g}"
        bounds = [] if math.isinf(self.least) else [least]
        bounds += [] if math.isinf(self.most) else [f"at most {self.most:g}"]
        return f"a {kind}number {' and '.join(bounds)}".strip() + (", or null" if self.or_null else "")


def ranges(parent: str, *names: str, **options: Any) -> tuple[Range, ...]:
    """Return the same range for several keys below a parent."""
    return tuple(Range(f"{parent}.{name}", **options) for name in names)


def _layouts(role: int, **options: Any) -> Iterator[Range]:
    """Yield the range of the numbers of ranks in each engine config of a role, by its place in the table of engines."""
    for each in MODEL_ENGINES.values():
        yield Range(f"{each.groups[role]}.{each.ulysses}", or_null=each.ulysses == FORMER, **options)
        yield Range(f"{each.groups[role]}.expert_parallel_size", **options)


def _tiles(config: DictConfig) -> bool:
    return bool(value_of(config, f"{MODELS[0]}.tiled_mlp.enabled"))


COUNT: dict[str, Any] = {"least": 1, "is_whole": True}
PROBABILITY: dict[str, Any] = {"least": 0, "most": 1, "is_open": True}
SHARE: dict[str, Any] = {"least": 0, "most": 1}

RANGES: tuple[Range, ...] = (
    *ranges("data", "train_batch_size", "max_prompt_length", "max_response_length", **COUNT),
    # What numpy and torch take.
    Range("data.seed", least=-(2**63), most=2**64 - 1, is_whole=True, or_null=True),
    Range(f"{ROLLOUT}.seed", least=0, most=2**32 - 1, is_whole=True),
    *ranges(ROLLOUT, "n", "val_kwargs.n", "agent.num_workers", "prompt_length", "response_length", **COUNT),
    # A token of a prompt and one of its answer.
    Range(f"{ROLLOUT}.max_model_len", least=2, is_whole=True, or_null=True),
    *ranges(ROLLOUT, "tensor_model_parallel_size", "data_parallel_size", "max_num_seqs", **COUNT),
    Range(f"{ROLLOUT}.pipeline_model_parallel_size", **COUNT),
    *ranges(MODELS[0], "tiled_mlp.num_shards", **COUNT, applies=_tiles),
    *ranges(ACTOR, "ppo_mini_batch_size", "ppo_epochs", "ppo_max_token_len_per_gpu", **COUNT),
    *ranges(ACTOR, FORMER, **COUNT, or_null=True),
    *ranges(REF, FORMER, **COUNT, or_null=True, applies=uses_reference),
    *_layouts(0, **COUNT),
    *_layouts(1, **COUNT, applies=uses_reference),
    *_layouts(2, **COUNT, applies=uses_critic),
    *ranges("critic", "ppo_mini_batch_size", "ppo_epochs", **COUNT, applies=uses_critic),
    Range("distillation.nnodes", least=0, is_whole=True),
    Range("distillation.distillation_loss.topk", **COUNT, or_null=True),
    *ranges("trainer", "nnodes", "n_gpus_per_node", "total_epochs", **COUNT),
    *ranges("trainer", "total_training_steps", **COUNT, or_null=True),
    *ranges("trainer", "save_freq", "test_freq", least=-1, is_whole=True),
    # With 0 every token but one has the log-prob -inf. Validation may use it.
    *ranges(ROLLOUT, "temperature", least=0, is_open=True),
    *ranges(ROLLOUT, "val_kwargs.temperature", least=0),
    *ranges(ROLLOUT, "top_k", "val_kwargs.top_k", least=-1, is_whole=True),
    *ranges(ROLLOUT, "top_p", "val_kwargs.top_p", "gpu_memory_utilization", **PROBABILITY),
    *ranges(ACTOR, "optim.lr", "optim.weight_decay", least=0),
    *ranges(ACTOR, "clip_ratio", "clip_ratio_low", "clip_ratio_high", least=0, or_inf=True),
    *ranges(ACTOR, "entropy_coeff", "kl_loss_coef", least=-math.inf),
    *ranges(ACTOR, "grad_clip", least=0, is_open=True, or_inf=True),
    *ranges("critic", "optim.lr", "optim.weight_decay", least=0, applies=uses_critic),
    *ranges("critic", "cliprange_value", least=0, or_inf=True, applies=uses_critic),
    *ranges("algorithm", "gamma", "lam", **SHARE),
    Range("algorithm.kl_ctrl.kl_coef", least=-math.inf),
    # With 0 the agent gives every reward.
    Range("reward.num_workers", least=0, is_whole=True),
    Range("ray_kwargs.ray_init.num_cpus", **COUNT, or_null=True),
)
"""Numbers outside of which a training run cannot work."""

GROUPS = frozenset(each.key.partition(".")[0] for each in RANGES)

TEXTS = (f"{CORRECTION}.rollout_is_threshold",)
"""Numbers that may be a text as well: two of them, `0.5_2.0`."""

PATH_ENDINGS = ("path", "_dir")


def check_kinds(config: DictConfig, *, texts: Collection[str] = ()) -> Findings:
    """Find values of another kind than verl's defaults: a text for a number, a number for a switch, NaN anywhere.

    `texts` are the keys of numbers that may be a text as well.
    """
    values = dict(_leaves(OmegaConf.to_container(config)))
    for key, value in values.items():
        if isinstance(value, float) and math.isnan(value):
            yield Finding(f"{key}={value}: this is not a number; give one")
    # Of our own options the group only: `TreeConfig` checks what is in it.
    defaults = {"tree": {"enabled": None}, **dict(_leaves(verl_values(config)))}
    for key, default in defaults.items():
        is_text = key in texts and isinstance(values.get(key), str)
        if key in values and (asked := _kind(default)) is not None and not (is_text or _is_kind(values[key], default)):
            yield Finding(f"{key}={values[key]}: this is no {asked}; give one")
    for key, value in values.items():
        # Data files may be a list.
        if key.endswith(PATH_ENDINGS) and isinstance(value, bool | int | float | dict | list):
            yield Finding(f"{key}={value}: this is no path; give one")
        elif key.endswith("_class") and isinstance(value, bool | int | float | list):
            yield Finding(f"{key}={value}: this is no class; give package.module.Class")


def unset_numbers(config: DictConfig) -> list[str]:
    """Return the keys that are null where verl has a number."""
    values, defaults = dict(_leaves(OmegaConf.to_container(config))), dict(_leaves(verl_values(config)))
    return [key for key, default in defaults.items() if _kind(default) == "number" and values.get(key, 0) is None]


def _kind(default: Any) -> str | None:
    """Return what must stand where verl has this default, or None where anything may."""
    match default:
        case bool():
            return "switch (true or false)"
        case int() | float():
            return "number"
        case dict():
            return "group of options"
    return None


def _is_kind(value: Any, default: Any) -> bool:
    match value:
        case None:
            # verl reads a null as "not set" nearly everywhere; `RANGES` names where it must not stand.
            return not isinstance(default, dict) or not default
        case bool():
            return isinstance(default, bool)
        case int() | float():
            return isinstance(default, int | float) and (not isinstance(default, bool) or value in (0, 1))
        case dict():
            return isinstance(default, dict)
    return False


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all values below, and all groups, with their dotted keys."""
    for key, each in value.items():
        yield f"{prefix}{key}", each
        if isinstance(each, Mapping):
            yield from _leaves(each, f"{prefix}{key}.")


def check_tree_values(config: DictConfig) -> Findings:
    """Build the tree options, which look at their values."""
    try:
        TreeConfig.from_mapping(config.tree)
    except ValueError as error:
        yield from map(Finding, str(error).splitlines())


def find_wrong_values(config: DictConfig) -> Findings:
    """Yield the values of a wrong kind, and of the right kind the numbers out of their range."""
    wrong = list(check_kinds(config, texts=TEXTS))
    yield from wrong
    keys = {each.key for each in wrong}
    # `resolve` refuses values in the place of groups, below which nothing can be asked.
    has_groups = all(isinstance(config.get(name), DictConfig) for name in config if name in GROUPS)
    for check in RANGES if has_groups else ():
        if check.key not in keys:
            yield from check(config)


def set_aside(config: DictConfig, keys: Collection[str]) -> DictConfig | None:
    """Return a copy with verl's own values for some keys, and None if these do not go with the others.

    So the other checks can compute, and what is wrong besides is told at once.
    """
    defaults = {**dict(_leaves(verl_values(config))), **dict(_leaves({"tree": tree_values()}))}
    copied = copy.deepcopy(config)
    with open_dict(copied):
        for key in keys:
            OmegaConf.update(copied, key, defaults.get(key), merge=False, force_add=True)
    try:
        OmegaConf.resolve(copied)
    except OmegaConfBaseException:
        return None
    return None if any(find_wrong_values(copied)) else copied
