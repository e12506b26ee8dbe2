"""The entry point: compose the configuration, check it, prepare the processes, train.

    python -m verl_tree.main_ppo data.train_files=... actor_rollout_ref.model.path=... [any verl override]

`python -m verl_tree.check` with the same arguments says whether they can work, and what will run where. `--cfg job`
prints the configuration, `--help` the options. Heavy modules are imported later, so both are quick.
"""

from omegaconf import DictConfig

from verl_tree.launch.composition import CONFIG_NAME, refused_in_brief, resolve, run_command
from verl_tree.launch.environment import set_ray_options, set_variables


def main() -> None:
    """Parse the command line and train."""
    run_command(run, config_name=CONFIG_NAME)


def run(config: DictConfig) -> None:
    """Train with a configuration of `verl_tree.launch.composition.compose_config`, which is resolved in place.

    What cannot work ends the process with the reasons.

    Raises:
        RuntimeError: A process died or hung; the message has the cause and the tail of its log.
    """
    with refused_in_brief():
        prepare(config)
    train(config)


def prepare(config: DictConfig) -> None:
    """Resolve, translate and check a configuration, and set what the training run's processes find around them.

    Raises:
        ValueError: Settings cannot work.
    """
    resolve(config)
    variables = set_variables(config)
    from verl_tree.launch.translation import translate
    from verl_tree.launch.validation import find_by_verl, validate
    from verl_tree.launch.validation.refusals import settle

    for line in translate(config):
        print(line)
    validate(config)
    settle(find_by_verl(config))
    bound_paths(config)
    set_ray_options(config, variables)


def bound_paths(config: DictConfig) -> None:
    """Tell the engines of a resolved configuration how long a path can be; `tree.capacity=auto` holds memory for it."""
    from verl_tree.launch.validation.capacity import longest_trajectory
    from verl_tree.launch.validation.refusals import ENGINES, value_of

    if config.tree.capacity == "auto" and config.tree.max_path_len is None:
        longest, _ = longest_trajectory(config)
        for key in ("tree", *(f"{engine}.tree" for engine in ENGINES)):
            value_of(config, key).max_path_len = longest


def train(config: DictConfig) -> None:
    """Start Ray and run the task runner under the watchdog; the configuration is one of `prepare`."""
    from verl.trainer.main_ppo import run_ppo
    from verl.utils.device import auto_set_device

    from verl_tree.config import TreeConfig
    from verl_tree.launch.watchdog import watch_run
    from verl_tree.trainer.task_runner import TreeTaskRunner

    auto_set_device(config)
    with watch_run(TreeConfig.from_mapping(config.tree).watchdog):
        run_ppo(config, task_runner_class=TreeTaskRunner)


if __name__ == "__main__":
    main()
