"""Checks that refuse a configuration that cannot work, before Ray starts and before any GPU time is spent."""

import contextlib
import copy
import io
from collections.abc import Collection

from omegaconf import DictConfig

from verl_tree.launch.checks import (
    capacity,
    choices,
    code,
    features,
    inputs,
    memory,
    modes,
    objects,
    prompts,
    resume,
    settings,
    teachers,
    values,
)
from verl_tree.launch.checks.refusals import Finding, Findings, settle

__all__ = ["CHECKS", "find", "find_before_the_queue", "find_by_verl", "validate"]

CHECKS = (
    settings.check_tree_options,
    *choices.CHECKS,
    *features.CHECKS,
    *settings.CHECKS,
    *capacity.CHECKS,
    *memory.CHECKS,
    *modes.CHECKS,
    *inputs.CHECKS,
    *teachers.CHECKS,
    *prompts.CHECKS,
    *resume.CHECKS,
    *code.CHECKS,
    *objects.CHECKS,
)
"""All checks, in the order in which a user should hear of problems."""


def find(config: DictConfig) -> Findings:
    """Yield everything that the checks find in a resolved configuration."""
    wrong = list(values.find_wrong_values(config))
    yield from wrong
    keys = dict.fromkeys(each.key for each in wrong)
    others = _with_other_values(config, keys) if keys else config
    if others is not None:
        # What would be said of a value that nobody gave is left out.
        found = (finding for check in CHECKS for finding in check(others))
        yield from (each for each in found if not any(key in each.message for key in keys))


def _with_other_values(config: DictConfig, keys: Collection[str]) -> DictConfig | None:
    """Return a translated copy without the wrong values, with which the other checks cannot compute."""
    from verl_tree.launch.checks.translation import translate

    others = values.set_aside(config, keys)
    if others is not None:
        translate(others)
    return others


def find_before_the_queue(config: DictConfig) -> Findings:
    """Yield what `find` does, and verl's own check; that this machine has no CUDA device is only a warning."""
    device = list(settings.check_device(config))
    others = [finding for finding in find(config) if finding not in device]
    if device:
        lacks = "this machine has no CUDA device; the training run needs one"
        yield Finding(f"trainer.device=cuda: {lacks}", is_warning=True)
    yield from others
    if all(finding.is_warning for finding in others):
        yield from find_by_verl(config)


def find_by_verl(config: DictConfig) -> Findings:
    """Yield what verl's own check of a resolved configuration finds, which a training run makes after ours."""
    from hydra.errors import HydraException
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    config = copy.deepcopy(config)
    options = {"use_reference_policy": need_reference_policy(config), "use_critic": need_critic(config)}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            validate_config(config, **options)
    except (ValueError, AssertionError, NotImplementedError, HydraException) as error:
        yield Finding(f"verl refuses the configuration: {error}")
    except (TypeError, AttributeError, ArithmeticError) as error:
        unset = ", ".join(f"{key}=null" for key in values.unset_numbers(config))
        remedy = f"give numbers for {unset}" if unset else "a value is of a kind that verl does not expect"
        yield Finding(f"verl refuses the configuration: it cannot compute with it ({error}); {remedy}")


def validate(config: DictConfig) -> None:
    """Run the checks on a resolved configuration and log their warnings.

    Raises:
        ValueError: Settings cannot work; the message has a line for each, with its remedy.
    """
    settle(find(config))
