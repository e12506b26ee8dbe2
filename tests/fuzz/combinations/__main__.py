"""The command; see the package."""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER.parents[2]), str(FOLDER.parents[1] / "support")]  # also of the ranks

NUM_TOGETHER = 50
"""Draws of one start of the ranks, and of a line of the report."""
LAST_LINES = 6
"""How much of what a failed draw printed is shown."""


def results(level: str, *, ranks: int, seeds: Sequence[int], fixed: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what became of each seed. After a draw that ended its processes, new ones go on behind it."""
    from rank_scripts import run_script

    with tempfile.TemporaryDirectory() as folder:
        for start in range(0, len(seeds), NUM_TOGETHER):
            left = list(seeds[start : start + NUM_TOGETHER])
            while left:
                out = Path(folder) / f"{left[0]}.json"
                lines = out.with_suffix(".lines")
                options = (f"--level={level}", f"--lines={lines}", f"--fixed={json.dumps(fixed)}")
                printed = None
                try:
                    run_script(str(FOLDER / "ranks.py"), *options, "--seeds", *map(str, left), num_ranks=ranks, out=out)
                except AssertionError as error:  # how `run_script` says that a rank has failed
                    printed = "\n".join(str(error).splitlines()[-LAST_LINES:])
                noted = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
                yield from (each for each in noted if "ends" in each)
                if printed is None:
                    break
                failed = next((each["begins"] for each in noted[::-1] if "begins" in each), left[0])
                by = [f"rank {each['rank']}: {each['detail']}" for each in noted if each.get("refused") == failed]
                printed += "".join(f"\nrefused by {each}" for each in by)
                yield {"ends": failed, "status": "wrong", "detail": printed}
                left = left[left.index(failed) + 1 :]


def main() -> int:
    """Run the draws and report them; return 1 if one was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.combinations", description=__doc__)
    parser.add_argument("--level", choices=("api", "engine"), required=True)
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=1, help="of the level engine")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", type=int, help="this seed alone")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="a feature that is not drawn")
    arguments = parser.parse_args()
    from tests.fuzz.combinations.drawing import differing
    from tests.fuzz.combinations.ranks import fixed_settings, level_of

    space, _ = level_of(arguments.level)
    given = {name: json.loads(value) for name, value in (each.split("=", 1) for each in arguments.set)}
    fixed = fixed_settings(arguments.level, ranks=arguments.ranks, given=given)
    only = arguments.only is not None
    seeds = [arguments.only] if only else range(arguments.first, arguments.first + arguments.count)
    statuses, on, sums, refusals = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    start = time.monotonic()
    for number, result in enumerate(results(arguments.level, ranks=arguments.ranks, seeds=seeds, fixed=given), start=1):
        settings = space.draw(result["ends"], fixed)
        on.update(differing(space, settings))
        statuses[result["status"]] += 1
        sums.update(
            sections=result.get("has_sections", False),
            gradients=result.get("num_gradients", 0),
            vacuous=result.get("num_vacuous", 0),
        )
        if result["status"] == "refused":
            refusals[result["detail"][:160]] += 1
        if result["status"] == "wrong" or only:
            print(f"seed {result['ends']}: {result['status']}: {result['detail']}")
            print("   ", *differing(space, settings))
        if number % NUM_TOGETHER == 0 or number == len(seeds):
            print(f"{number} draws, {time.monotonic() - start:.0f} s: {dict(statuses)}", flush=True)
    print("drawn:", ", ".join(f"{name} {count}" for name, count in sorted(on.items())))
    for message, count in refusals.most_common():
        print(f"refused {count} times: {message}")
    print(f"with sections: {sums['sections']}; gradients: {sums['gradients']}, of which {sums['vacuous']} are zero")
    return int(statuses["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
