"""Agent loops that branch, and the cursor that they steer."""

import importlib

BUILT_IN = ("blackbox", "compaction", "memory", "parallel_tools", "subagents", "tree_search")
"""Modules of the loops that every agent loop worker knows. Importing one registers its loop with verl."""


def register_built_in() -> None:
    """Register the built-in loops with verl, in this process."""
    for name in BUILT_IN:
        importlib.import_module(f"{__name__}.{name}")
