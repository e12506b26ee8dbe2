"""Fuzzes capture: random sessions, whose rows are judged by the engine's own record (`fuzz_checks`).

    python tests/fuzz/capture --count 10000 --first 0 --driver tokens

Prints a line every 1,000 sessions, and each seed that breaks a rule, with the rule. Exit code 1 if one does.
"""

import argparse
import logging
import os
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "verl_tree.cpu.platform")
sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from fuzz_drivers import DRIVERS, run_session  # behind what its modules are found by


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="sessions of each driver")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--driver", choices=DRIVERS, action="append", help="by default all of them in turn")
    arguments = parser.parse_args()
    logging.disable(logging.ERROR)
    num_broken = 0
    for name in arguments.driver or DRIVERS:
        totals, started_s = Counter(), time.monotonic()
        for number in range(arguments.count):
            seed = arguments.first + number
            try:
                totals += run_session(name, seed)
            except Exception as error:  # noqa: BLE001  # whatever the product raises is what is looked for
                num_broken += 1
                place = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{Path(place.filename).name}:{place.lineno}"
                print(f"{name}: seed {seed} broke: {type(error).__name__}: {error} ({where})", flush=True)
            if (number + 1) % 1000 == 0 or number + 1 == arguments.count:
                counts = ", ".join(f"{count} {key}" for key, count in totals.items())
                print(f"{name}: {number + 1} sessions, {num_broken} broke in all, {counts}, "
                      f"{time.monotonic() - started_s:.0f} s", flush=True)  # fmt: skip
    return int(num_broken > 0)


if __name__ == "__main__":
    sys.exit(main())
