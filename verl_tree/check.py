"""Ask about a training command before it queues for GPUs: every finding, the translations, and what will run where.

    python -m verl_tree.check [the arguments of verl_tree.main_ppo]

Nothing starts: no Ray, no GPU, no network. The exit status is 1 if the command would be refused. On a machine without a
GPU, `profile=gpu` asks about one that has some.
"""

import logging
import sys
import time
import warnings
from collections.abc import Sequence

from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from verl_tree.launch.composition import compose_config, resolve


def main() -> None:
    """Report on the command line and exit with 0 or 1."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    start_s = time.monotonic()
    is_valid, text = report(sys.argv[1:])
    print(text)
    print(f"\n{'The command can run' if is_valid else 'The command cannot run'}. ({time.monotonic() - start_s:.1f} s)")
    sys.exit(0 if is_valid else 1)


def report(arguments: Sequence[str]) -> tuple[bool, str]:
    """Return whether the command would be accepted, and the text that says why, or what it would do."""
    try:
        config = compose_config(arguments)
        resolve(config)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        causes = [str(each).strip() for each in (error, error.__cause__) if each is not None]
        return False, "\n".join(["Refused", *(f"  {line}" for cause in causes for line in cause.splitlines())])
    return _report_composed(config)


def _report_composed(config: DictConfig) -> tuple[bool, str]:
    from verl_tree.launch.environment import set_variables

    # verl reads them when it is imported, which the checks do.
    set_variables(config)
    from verl_tree.launch.plan import capacity_lines, layout_lines
    from verl_tree.launch.translation import translate
    from verl_tree.launch.validation import find_before_the_queue

    lines = translate(config)
    findings = list(find_before_the_queue(config))
    refused = [each.message for each in findings if not each.is_warning]
    sections = {
        "Translated": lines,
        "Capacity": capacity_lines(config),
        "What runs where": layout_lines(config),
        "Warnings": [each.message for each in findings if each.is_warning],
        "Refused": refused,
    }
    blocks = ["\n".join([title, *(f"  {each}" for each in content)]) for title, content in sections.items() if content]
    return not refused, "\n\n".join(blocks)


if __name__ == "__main__":
    main()
