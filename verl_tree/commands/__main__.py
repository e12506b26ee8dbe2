"""The command `verl-tree`, which `python -m verl_tree.commands` is, too.

    verl-tree COMMAND [arguments]      verl-tree COMMAND --help

A command's module has `main(arguments)`, which returns what `sys.exit` takes. It is imported when the command is
called, so none waits for what another one needs, or asks for its packages.
"""

import importlib
import sys
from collections.abc import Sequence

from verl_tree.launch.command.misspelt import did_you_mean

COMMANDS = {
    "check": ("verl_tree.check", "every finding about a training command, before it queues for GPUs"),
    "try-agent": ("verl_tree.commands.try_agent", "run one session of an agent, without a training run"),
    "show": ("verl_tree.commands.show", "make the page of a stored tree"),
    "canary": ("verl_tree.commands.canary", "compare stored trees with the flat forward of a model"),
    "plot": ("verl_tree.commands.plot", "draw the metrics of training runs"),
    "workspace": ("verl_tree.commands.workspace", "make the dashboards: wandb, TensorBoard, Grafana"),
}
"""The module of each command, and what it does."""

OF_EXTRA = ("matplotlib", "tensorboard", "wandb", "wandb_workspaces")
"""Modules of the extra `dashboards`, which only `plot` and `workspace` import."""


def main(arguments: Sequence[str] | None = None) -> int | None:
    """Run the command that the first argument names, with the others, and return its exit status; None is 0."""
    name, *others = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(_help())
        return None
    if name not in COMMANDS:
        meant = did_you_mean(name, COMMANDS) or ";"
        sys.exit(f"verl-tree {name}: no such command{meant} There are {', '.join(COMMANDS)}")
    module, _ = COMMANDS[name]
    try:
        return importlib.import_module(module).main(others)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in OF_EXTRA:
            raise
        sys.exit(f"verl-tree {name} needs {error.name}: pip install 'verl-tree[dashboards]'")


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {purpose}" for name, (_, purpose) in COMMANDS.items()]
    return "\n".join(["usage: verl-tree COMMAND [arguments]", "", *lines, "", "verl-tree COMMAND --help says more."])


if __name__ == "__main__":
    sys.exit(main())
