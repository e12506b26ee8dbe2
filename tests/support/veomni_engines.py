"""VeOmni for a script of ranks: verl imports it wherever it is found, for seconds, so it has a folder of its own."""

import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".venv" / "veomni"
"""Where `scripts/setup.sh --extra veomni` puts it."""


def load() -> None:
    """Register the engines in this process: on trees, and verl's own."""
    sys.path.append(str(FOLDER))
    importlib.import_module("verl_tree.engine.veomni")


def forget_ranks() -> None:
    """Let the next worker lay the ranks out anew. A process has one layout of them, the first."""
    from veomni.distributed import parallel_state

    parallel_state._PARALLEL_STATE = None
    parallel_state._PARALLEL_STATE_REGISTRY.clear()
