"""Checks of values that must be one of some: a table of what verl, vLLM and trees know, then optimisers.

verl and vLLM look most of them up late: in the workers, once the engines have started, or after the first rollout.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_tree.launch.checks.refusals import (
    ACTOR,
    ACTOR_ENGINES,
    CORRECTION,
    OTHER_ENGINES,
    ROLLOUT,
    Check,
    Finding,
    Findings,
    refusal,
    refusal_here,
    uses_critic,
    value_of,
)
from verl_tree.launch.checks.source import NotInSourceError, look_up, module_problem, source_of
from verl_tree.launch.command.composition import model_engine

_ABSENT = object()
"""Stands for a key that the configuration lacks; those of other engines lack some of verl's."""


def _is_vllm(config: DictConfig) -> bool:
    return value_of(config, f"{ROLLOUT}.name") == "vllm"


def _distils(config: DictConfig) -> bool:
    return value_of(config, "distillation.enabled") is True


@dataclass(frozen=True, slots=True)
class Choice:
    """A check that a value, and of a list every value, is one of some.

    Attributes:
        key: Of the value.
        known: The values, or what returns them.
        applies: For which configurations it holds.
        is_open: Code of the user's may bring others along, so it is a warning.
        more: What else the remedy says.
        reason: Why there is no choice: another value cannot work, and neither can none.
    """

    key: str
    known: Sequence[Any] | Callable[[], Sequence[Any]]
    applies: Callable[[DictConfig], bool] = lambda _: True
    is_open: bool = False
    more: str = ""
    reason: str = ""

    def __call__(self, config: DictConfig) -> Findings:
        """Yield a finding for each value that is none of those."""
        value = OmegaConf.select(config, self.key, default=None if self.reason else _ABSENT)
        if value is _ABSENT or not self.applies(config):
            return
        known = self.known() if callable(self.known) else self.known
        names = [each if isinstance(each, str) else json.dumps(each) for each in known]
        remedy = (
            f"{self.reason}; set it to {names[0]}" if self.reason else f"choose one of {', '.join(names)}{self.more}"
        )
        remedy += " (a warning only: your code may register it)" if self.is_open else ""
        for each in value if isinstance(value, ListConfig) else [value]:
            if each not in known:
                of_list = f"{each} is none of these; " if isinstance(value, ListConfig) else ""
                yield Finding(f"{self.key}={value}: {of_list}{remedy}", is_warning=self.is_open)


def choices(parents: Sequence[str], name: str, known: Sequence[Any], **options: Any) -> tuple[Choice, ...]:
    """Return the same choice for a key below several parents."""
    return tuple(Choice(f"{parent}.{name}", known, **options) for parent in parents)


def _policy_losses() -> list[str]:
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    return sorted(POLICY_LOSS_REGISTRY)


def _estimators() -> list[str]:
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    from verl_tree.trainer.advantages import ESTIMATORS

    return [*ESTIMATORS, *sorted(ADV_ESTIMATOR_REGISTRY.keys() - ESTIMATORS.keys())]


def _distillation_losses() -> list[str]:
    from verl.trainer.distillation.losses import DISTILLATION_SETTINGS_REGISTRY

    return list(DISTILLATION_SETTINGS_REGISTRY)


def _loggers() -> list[str]:
    from verl.utils.tracking import Tracking

    return [*Tracking.supported_backend, "tracking"]


def _devices() -> list[str]:
    from verl.plugin.platform.platform_manager import PlatformRegistry

    platforms = [PlatformRegistry.get(name) for name in PlatformRegistry.registered_names()]
    return list(dict.fromkeys(["cuda", "cpu", *(each().device_name for each in platforms if each is not None)]))


ON, OFF = (True,), (False, None)
CONTENTS = ("model", "optimizer", "extra", "hf_model")
DTYPES = ("bfloat16", "float16", "float32", "half", "float", "auto")
"""What vLLM takes as `--dtype`."""
LOAD_FORMATS = (
    *("dummy", "auto", "safetensors", "hf", "pt", "fastsafetensors", "instanttensor", "ipc_cache", "mistral"),
    *("modelexpress", "npcache", "runai_streamer", "runai_streamer_sharded", "sharded_state", "tensorizer"),
)
"""What vLLM takes as `--load-format`; it has no table of them that is read without its import."""

MODES = ("sync", "colocate_async", "separate_async")
ACTOR_ONLY = "only the actor replays routes; the others route by themselves"
NO_QAT = "quantisation-aware training is not supported"

CHOICES: tuple[Choice, ...] = (
    Choice("trainer.use_v1", ON, reason="trees need verl's V1 trainer; the legacy trainer is not supported"),
    *choices(["trainer"], "v1.trainer_mode", MODES),
    *choices(["reward"], "reward_manager.source", ("register", "importlib"), more=": verl's own, and yours"),
    *choices(ACTOR_ENGINES, "router_replay.mode", ("disabled", "R2", "R3", None)),
    *choices(OTHER_ENGINES, "router_replay.mode", ("disabled", None), reason=ACTOR_ONLY),
    *choices((ACTOR, *ACTOR_ENGINES, *OTHER_ENGINES), "qat.enable", OFF, reason=NO_QAT),
    Choice("algorithm.adv_estimator", _estimators, more=", or register yours in a module of VERL_USE_EXTERNAL_MODULES"),
    Choice("distillation.distillation_loss.loss_mode", _distillation_losses, _distils),
    Choice(f"{ACTOR}.policy_loss.loss_mode", _policy_losses),
    Choice("trainer.logger", _loggers),
    Choice("trainer.device", _devices),
    *choices(["trainer"], "resume_mode", ("auto", "disable", "resume_path")),
    *choices(["algorithm"], "kl_ctrl.type", ("fixed", "adaptive")),
    *choices([CORRECTION], "rollout_is", ("token", "sequence", None)),
    *choices([ACTOR], "checkpoint.save_contents", CONTENTS),
    *choices([ACTOR], "checkpoint.load_contents", CONTENTS),
    *choices(["critic"], "checkpoint.save_contents", CONTENTS, applies=uses_critic),
    *choices(["critic"], "checkpoint.load_contents", CONTENTS, applies=uses_critic),
    *choices([ROLLOUT], "dtype", DTYPES, applies=_is_vllm),
    *choices([ROLLOUT], "load_format", LOAD_FORMATS, applies=_is_vllm, is_open=True),
)
"""Keys that must have a certain value, or one of some."""


def check_optimizers(config: DictConfig) -> Findings:
    """Find optimisers that do not exist, and betas that none takes. Some engines know a few by name."""
    for role in (ACTOR, "critic") if uses_critic(config) else (ACTOR,):
        optim = f"{role}.optim"
        module, name = value_of(config, f"{optim}.optimizer_impl"), value_of(config, f"{optim}.optimizer")
        if known := model_engine(config).optimizers:
            yield from Choice(f"{optim}.optimizer", known)(config)
        elif not (isinstance(module, str) and module) or not (isinstance(name, str) and name):
            yield refusal(config, f"{optim}.optimizer", f"give the name of a class in {optim}.optimizer_impl={module}")
        elif problem := module_problem(f"{module}.{name}"):
            remedy = f"{problem}; install it, or set torch.optim"
            yield refusal_here(config, f"{optim}.optimizer_impl", remedy, brings_code=True)
        else:
            try:
                look_up(source_of(module), name)
            except NotInSourceError as error:
                yield refusal_here(config, f"{optim}.optimizer", f"{error}; AdamW is verl's own", brings_code=True)
        betas = value_of(config, f"{optim}.betas")
        is_pair = isinstance(betas, ListConfig) and len(betas) == 2
        if not is_pair or not all(isinstance(each, int | float) and 0 <= each < 1 for each in betas):
            yield refusal(config, f"{optim}.betas", "give two numbers of at least 0 and below 1, such as [0.9,0.999]")


def check_thresholds(config: DictConfig) -> Findings:
    """Read the thresholds of the correction as verl does, after the first rollout."""
    from verl.trainer.ppo.rollout_corr_helper import _parse_rollout_is_threshold

    key = f"{CORRECTION}.rollout_is_threshold"
    if value_of(config, f"{CORRECTION}.rollout_is") and value_of(config, key) is not None:
        try:
            _parse_rollout_is_threshold(value_of(config, key))
        except (ValueError, TypeError) as error:
            yield refusal(config, key, f"{error} Give a positive number, or two as a text such as 0.5_2.0")


CHECKS: tuple[Check, ...] = (*CHOICES, check_optimizers, check_thresholds)
