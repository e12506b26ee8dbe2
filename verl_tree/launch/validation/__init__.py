"""Checks that refuse a configuration that cannot work, before Ray starts and before any GPU time is spent."""

import logging

from omegaconf import DictConfig

from verl_tree.launch.validation import code, inputs, settings
from verl_tree.launch.validation.refusals import Findings

__all__ = ["CHECKS", "find", "validate"]

logger = logging.getLogger(__name__)

CHECKS = (*settings.CHECKS, *inputs.CHECKS, *code.CHECKS)
"""All checks, in the order in which a user should hear of problems."""


def find(config: DictConfig) -> Findings:
    """Yield everything that the checks find in a resolved configuration."""
    for check in CHECKS:
        yield from check(config)


def validate(config: DictConfig) -> None:
    """Run the checks on a resolved configuration and log their warnings.

    Raises:
        ValueError: A setting cannot work; the message has the remedy.
    """
    for finding in find(config):
        if not finding.is_warning:
            raise ValueError(finding.message)
        logger.warning(finding.message)
