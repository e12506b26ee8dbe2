"""The entry point: compose the configuration, check it, prepare the processes, train.

    python -m verl_tree.main_ppo data.train_files=... actor_rollout_ref.model.path=... [any verl override]

`python -m verl_tree.check` with the same arguments says whether they can work, and what will run where. `--cfg job`
prints the configuration, `--help` the options. Modules that take seconds are imported later: the first line is on
the terminal at once, and so is a wrong value.
"""

import gc
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_tree.launch.run.console import Console, announce
from verl_tree.launch.run.ending import AfterRay, ended_in_brief, refused_in_brief

if TYPE_CHECKING:
    from omegaconf import DictConfig


def main() -> None:
    """Parse the command line and train."""
    try:
        with Console() as console, refused_in_brief(or_interrupted=True):
            announce("composing the configuration")
            from verl_tree.launch.command.composition import CONFIG_NAME, run_command

            def task(config: "DictConfig") -> None:
                run(config, console=console)

            run_command(task, config_name=CONFIG_NAME)
    finally:
        # Else Python looks through all that was imported before it ends, seconds after the last line.
        gc.freeze()


def run(config: "DictConfig", *, console: Console) -> None:
    """Train with a configuration of `verl_tree.launch.command.composition.compose_config`, which is resolved in place.

    What cannot work ends the process with the reasons, and what fails later with the cause. `console` has been entered.
    """
    console.reached("configuration composed", doing="checking it")
    with refused_in_brief():
        prepare(config, console=console)
    console.record(Path(config.trainer.default_local_dir, "logs", f"run_{time.strftime('%Y%m%d_%H%M%S')}.log"))
    console.reached("configuration checked", doing="starting Ray")
    train(config)


def prepare(config: "DictConfig", *, console: Console) -> None:
    """Resolve, translate and check a configuration, and set what the training run's processes find around them.

    Raises:
        ValueError: Settings cannot work.
    """
    from verl_tree.launch.checks import find_by_verl, validate
    from verl_tree.launch.checks.refusals import settle
    from verl_tree.launch.checks.resume import find_leftovers
    from verl_tree.launch.checks.translation import translate
    from verl_tree.launch.checks.values import check_tree_values, find_wrong_values
    from verl_tree.launch.command.environment import set_ray_options, set_variables
    from verl_tree.launch.command.resolution import resolve

    resolve(config)
    console.is_brief = config.tree.console == "steps"
    # Other checks import what takes seconds; then all that is wrong is told together.
    for wrong in (*find_wrong_values(config), *check_tree_values(config)):
        print(f"{wrong.message}; looking for what else is wrong", flush=True)
    variables = set_variables(config)
    for line in translate(config):
        print(line)
    validate(config)
    settle(find_by_verl(config))
    settle(find_leftovers())
    bound_paths(config)
    set_ray_options(config, variables)


def bound_paths(config: "DictConfig") -> None:
    """Tell the engines of a resolved configuration how long a path can be; `tree.capacity=auto` holds memory for it."""
    from verl_tree.launch.checks.capacity import longest_trajectory
    from verl_tree.launch.checks.refusals import value_of
    from verl_tree.launch.command.composition import model_engine

    if config.tree.capacity == "auto" and config.tree.max_path_len is None:
        longest, _ = longest_trajectory(config)
        for key in ("tree", *(f"{engine}.tree" for engine in model_engine(config).groups)):
            value_of(config, key).max_path_len = longest


def train(config: "DictConfig") -> None:
    """Start Ray and run the task runner under the watchdog; the configuration is one of `prepare`.

    If a node of the cluster lacks what the run needs, if every session of a step failed, or if a process fails, dies or
    hangs, this process ends with the cause.
    """
    from verl.trainer.main_ppo import run_ppo
    from verl.utils.device import auto_set_device

    from verl_tree.launch.run.nodes import check_nodes, on_this_node
    from verl_tree.trainer.task_runner import TreeTaskRunner

    auto_set_device(config)
    with ended_in_brief(config) as set_handler:

        def first() -> dict[str, Any]:
            set_handler()
            with refused_in_brief():
                check_nodes(config)
            return on_this_node()

        run_ppo(config, task_runner_class=AfterRay(TreeTaskRunner, first))


if __name__ == "__main__":
    main()
