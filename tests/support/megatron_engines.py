"""Megatron for a script of ranks: verl imports it wherever it is found, for seconds, so it has a folder of its own."""

import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".venv" / "megatron"
"""Where `scripts/setup.sh --extra megatron` puts it."""


def load() -> None:
    """Register the engines in this process: on trees, and verl's own."""
    sys.path.append(str(FOLDER))
    importlib.import_module("verl_tree.engine.megatron")


def forget_ranks() -> None:
    """Let the next worker lay the ranks out anew. A process has one layout of them, the first."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
