"""Checks of values that are names: a table of what verl and vLLM know, and what they read of an optimiser.

They look most of them up late: in the workers, once the engines have started, or after the first rollout.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_tree.launch.checks.refusals import (
    ACTOR,
    CORRECTION,
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

_ABSENT = object()
"""Stands for a key that the configuration lacks; those of other engines lack some of verl's."""


def _is_vllm(config: DictConfig) -> bool:
    return value_of(config, f"{ROLLOUT}.name") == "vllm"


@dataclass(frozen=True, slots=True)
class Choice:
    """A check that a value, and of a list every value, is one of those that `names` returns.

    It is a warning if code of the user's may bring others along, `is_open`.
    """

    key: str
    names: Callable[[], Collection[str | None]]
    applies: Callable[[DictConfig], bool] = lambda _: True
    is_open: bool = False

    def __call__(self, config: DictConfig) -> Findings:
        """Yield a finding for each value that is none of the names."""
        value = OmegaConf.select(config, self.key, default=_ABSENT)
        if value is _ABSENT or not self.applies(config):
            return
        names = self.names()
        for each in value if isinstance(value, ListConfig) else [value]:
            if each not in names:
                of_list = f"{each} is none of these; " if isinstance(value, ListConfig) else ""
                remedy = f"{of_list}choose one of {', '.join('null' if name is None else name for name in names)}"
                remedy += " (a warning only: your code may register it)" if self.is_open else ""
                yield Finding(f"{self.key}={value}: {remedy}", is_warning=self.is_open)


def choices(parents: Collection[str], name: str, known: Collection[str | None], **options: Any) -> tuple[Choice, ...]:
    """Return the same choice for a key below several parents."""
    return tuple(Choice(f"{parent}.{name}", lambda: known, **options) for parent in parents)


def _policy_losses() -> list[str]:
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    return sorted(POLICY_LOSS_REGISTRY)


def _loggers() -> list[str]:
    from verl.utils.tracking import Tracking

    return [*Tracking.supported_backend, "tracking"]


def _devices() -> list[str]:
    from verl.plugin.platform.platform_manager import PlatformRegistry

    platforms = [PlatformRegistry.get(name) for name in PlatformRegistry.registered_names()]
    return list(dict.fromkeys(["cuda", "cpu", *(each().device_name for each in platforms if each is not None)]))


CONTENTS = ("model", "optimizer", "extra", "hf_model")
DTYPES = ("bfloat16", "float16", "float32", "half", "float", "auto")
"""What vLLM takes as `--dtype`."""
LOAD_FORMATS = (
    *("dummy", "auto", "safetensors", "hf", "pt", "fastsafetensors", "instanttensor", "ipc_cache", "mistral"),
    *("modelexpress", "npcache", "runai_streamer", "runai_streamer_sharded", "sharded_state", "tensorizer"),
)
"""What vLLM takes as `--load-format`; it has no table of them that is read without its import."""

CHOICES: tuple[Choice, ...] = (
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
"""Names that verl and vLLM look up late."""


def check_optimizers(config: DictConfig) -> Findings:
    """Find optimisers that do not exist, and betas that none takes."""
    for role in (ACTOR, "critic") if uses_critic(config) else (ACTOR,):
        optim = f"{role}.optim"
        module, name = value_of(config, f"{optim}.optimizer_impl"), value_of(config, f"{optim}.optimizer")
        if not (isinstance(module, str) and module) or not (isinstance(name, str) and name):
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
