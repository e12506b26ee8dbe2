"""Try an agent: `rollout_hooks.try_agent`, whose `--config` may then name a file that builds on this project's own."""

import importlib
from collections.abc import Sequence

from verl_tree.launch.command.composition import prepare_hydra


def main(arguments: Sequence[str]) -> int:
    """Run one session and print it; return 1 if it failed, 2 if an argument is wrong."""
    prepare_hydra()
    # By its name: it imports verl, which the other commands do without.
    return importlib.import_module("rollout_hooks.try_agent").main(arguments)
