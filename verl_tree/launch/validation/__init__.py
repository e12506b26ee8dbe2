"""Refuses a configuration that cannot work, before Ray starts and before any GPU time is spent."""

from verl_tree.launch.validation.settings import validate

__all__ = ["validate"]
