"""Refuses a configuration that cannot work, before Ray starts and before any GPU time is spent."""

import logging

from omegaconf import DictConfig

from verl_tree.launch.validation import code, inputs, settings
from verl_tree.launch.validation.refusals import Findings

__all__ = ["CHECKS", "find", "validate"]

logger = logging.getLogger(__name__)

CHECKS = (*settings.CHECKS, *inputs.CHECKS, *code.CHECKS)
"""Every check, in the order in which a user should hear of the problems."""


def find(config: DictConfig) -> Findings:
    """Yield everything that the checks find.

    Args:
        config: The whole configuration, resolved.
    """
    for check in CHECKS:
        yield from check(config)


def validate(config: DictConfig) -> None:
    """Run the checks and log their warnings.

    Args:
        config: The whole configuration, resolved.

    Raises:
        ValueError: The first setting that cannot work, with its remedy.
    """
    for finding in find(config):
        if not finding.is_warning:
            raise ValueError(finding.message)
        logger.warning(finding.message)
