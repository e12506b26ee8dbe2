"""Checks that refuse a configuration that cannot work, before Ray starts and before any GPU time is spent."""

import contextlib
import copy
import io

from omegaconf import DictConfig

from verl_tree.launch.validation import (
    capacity,
    code,
    cpu_rollouts,
    flash_attn,
    images,
    inputs,
    modes,
    objective,
    prompts,
    resume,
    router_replay,
    settings,
    ulysses,
    values,
    variables,
)
from verl_tree.launch.validation.refusals import Finding, Findings, settle

__all__ = ["CHECKS", "find", "find_before_the_queue", "find_by_verl", "validate"]

CHECKS = (
    *values.CHECKS,
    *settings.CHECKS,
    *capacity.CHECKS,
    *objective.CHECKS,
    *ulysses.CHECKS,
    *router_replay.CHECKS,
    *flash_attn.CHECKS,
    *modes.CHECKS,
    *cpu_rollouts.CHECKS,
    *variables.CHECKS,
    *inputs.CHECKS,
    *prompts.CHECKS,
    *images.CHECKS,
    *resume.CHECKS,
    *code.CHECKS,
)
"""All checks, in the order in which a user should hear of problems."""


def find(config: DictConfig) -> Findings:
    """Yield everything that the checks find in a resolved configuration."""
    wrong = list(values.find_wrong_values(config))
    yield from wrong
    # The other checks compute with these values.
    for check in () if wrong else CHECKS:
        yield from check(config)


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
