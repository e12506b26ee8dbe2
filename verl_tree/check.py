"""Ask about a training command before it queues for GPUs: every finding, the translations, and what will run where.

    python -m verl_tree.check [the arguments of verl_tree.main_ppo]      `verl-tree check` is the same

    --plan TREES.parquet    how long an update of these stored trees would take, and how much memory, under the best
                            capacities: with --gpu NAME by a data sheet, with --costs METRICS.jsonl by a run's own times
    --plan "prompt=8000 branches=16x600 tools=4x150"    the same of trees that nobody has stored

Nothing starts: no Ray, no GPU, no network. The exit status is 1 if the command would be refused. On a machine without a
GPU, `profile=gpu` asks about one that has some.
"""

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from verl_tree.launch.run.console import announce
from verl_tree.launch.run.ending import refusal_lines, refusals

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl_tree.launch.run.layouts import Accept

PLAN = ("plan", "gpu", "costs")
"""Options of the plan; see `verl_tree.launch.run.layouts`."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Report on the arguments, those of the command line if None, and exit with 0 or 1; `--help` says what this is."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return
    parser = argparse.ArgumentParser(prog="verl_tree.check", add_help=False, allow_abbrev=False)
    for name in PLAN:
        parser.add_argument(f"--{name}")
    options, arguments = parser.parse_known_args(arguments)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    start_s = time.monotonic()
    announce("checking the command")
    is_valid, text = report(arguments, **vars(options))
    print(text)
    print(f"\n{'The command can run' if is_valid else 'The command cannot run'}. ({time.monotonic() - start_s:.1f} s)")
    sys.exit(0 if is_valid else 1)


def report(arguments: Sequence[str], **plan: str | None) -> tuple[bool, str]:
    """Return whether the command would be accepted, and the text that says why, or what it would do.

    `plan` has the values of `PLAN` that are given.
    """
    from verl_tree.launch.checks import find_before_the_queue
    from verl_tree.launch.checks.translation import translate

    @cache
    def accept(overrides: tuple[str, ...]) -> "DictConfig | None":
        try:
            config = _composed([*arguments, *overrides])
            translate(config)
            return None if any(not each.is_warning for each in find_before_the_queue(config)) else config
        except refusals():
            return None

    try:
        return _report_composed(_composed(arguments), accept=lambda overrides: accept(tuple(overrides)), **plan)
    except refusals() as error:
        return False, "\n".join(["Refused", *(f"  {line}" for line in refusal_lines(error))])


def _composed(arguments: Sequence[str]) -> "DictConfig":
    from verl_tree.launch.command.composition import compose_config
    from verl_tree.launch.command.resolution import resolve

    config = compose_config(arguments)
    resolve(config)
    return config


def _report_composed(
    config: "DictConfig",
    *,
    accept: "Accept",
    plan: str | None = None,
    gpu: str | None = None,
    costs: str | None = None,
) -> tuple[bool, str]:
    from verl_tree.launch.checks import find_before_the_queue
    from verl_tree.launch.checks.translation import translate
    from verl_tree.launch.checks.values import find_wrong_values
    from verl_tree.launch.command.environment import set_variables
    from verl_tree.launch.run.plan import capacity_lines, layout_lines

    # verl reads them when it is imported, which the checks do.
    set_variables(config)
    lines = translate(config)
    findings = list(find_before_the_queue(config))
    refused = [each.message for each in findings if not each.is_warning]
    # The plan is computed with values that may be what is refused.
    is_computable = not any(find_wrong_values(config))
    planned = []
    if plan is not None and is_computable and not refused:
        from verl_tree.launch.run.layouts import plan_lines

        planned = plan_lines(config, accept=accept, trees=plan, gpu=gpu, costs=costs)
    sections = {
        "Translated": lines,
        "Capacity": capacity_lines(config) if is_computable else [],
        "What runs where": layout_lines(config) if is_computable else [],
        "Plan": planned,
        "Warnings": [each.message for each in findings if each.is_warning],
        "Refused": refused,
    }
    blocks = ["\n".join([title, *(f"  {each}" for each in content)]) for title, content in sections.items() if content]
    return not refused, "\n\n".join(blocks)


if __name__ == "__main__":
    main()
