"""Fine-tune on trees with verl's SFT trainer: compose the configuration, check it, train.

    python -m verl_tree.main_sft data.train_files=... model.path=... [any override of verl's sft_trainer]
    torchrun --nproc-per-node=8 -m verl_tree.main_sft ...

`--cfg job` prints the configuration. docs/sft.md has the options.
"""

import os
from typing import TYPE_CHECKING

from verl_tree.launch.run.console import announce
from verl_tree.launch.run.ending import refused_in_brief

if TYPE_CHECKING:
    from omegaconf import DictConfig

ONE_RANK = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
"""What torchrun sets, where it does not start the process. Port 0 is any that is free."""


def main() -> None:
    """Parse the command line and train."""
    if os.environ.get("RANK", "0") == "0":
        announce("composing the configuration")
    from verl_tree.launch.command.composition import SFT_CONFIG_NAME, run_command

    with refused_in_brief():
        run_command(run, config_name=SFT_CONFIG_NAME)


def run(config: "DictConfig") -> None:
    """Train with a configuration of `compose_config(..., default_name="tree_sft")`, which is resolved in place.

    Settings that cannot work end the process with the reasons.

    Raises:
        ValueError: A row cannot work.
    """
    with refused_in_brief():
        prepare(config)
    if "RANK" not in os.environ:
        os.environ.update(ONE_RANK)
    from verl_tree.sft.trainer import train

    train(config)


def prepare(config: "DictConfig") -> None:
    """Resolve and check a configuration, and set what the process finds around it.

    Raises:
        ValueError: Settings cannot work.
    """
    from verl_tree.launch.command.environment import set_variables
    from verl_tree.launch.command.resolution import resolve
    from verl_tree.sft.checks import validate

    resolve(config)
    set_variables(config)
    validate(config)
    if config.tree.capacity == "auto" and config.tree.max_path_len is None:
        # No row is longer, so capacity=auto holds memory for such paths.
        config.tree.max_path_len = config.engine.tree.max_path_len = config.data.max_length


if __name__ == "__main__":
    main()
