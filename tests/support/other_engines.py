"""VeOmni and Megatron for a script of ranks: verl imports each where it is found, for seconds, so it has a folder."""

import importlib
import sys
from pathlib import Path


def folder_of(engine: str) -> Path:
    """Return where `scripts/setup.sh --extra ENGINE` puts what an engine needs."""
    return Path(__file__).parents[2] / ".venv" / engine


def load(engine: str) -> None:
    """Register the engines in this process: on trees, and verl's own."""
    sys.path.append(str(folder_of(engine)))
    importlib.import_module(f"verl_tree.engine.{engine}")


def forget_ranks(engine: str) -> None:
    """Let the next worker lay the ranks out anew. A process has one layout of them, the first."""
    if engine == "veomni":
        from veomni.distributed import parallel_state

        parallel_state._PARALLEL_STATE = None
        parallel_state._PARALLEL_STATE_REGISTRY.clear()
    elif engine == "megatron":
        from megatron.core import parallel_state as layout

        layout.destroy_model_parallel()
