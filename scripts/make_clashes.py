"""Makes the table of clashes in docs/from_verl.md from `verl_tree.clashes`.

    python scripts/make_clashes.py [--check]

`--check` changes nothing and fails if the page is out of date.
"""

import argparse
import re
import sys
from pathlib import Path

from verl_tree.clashes import CLASHES

PAGE = Path(__file__).parents[1] / "docs" / "from_verl.md"
START, END = "<!-- made by scripts/make_clashes.py: start -->\n", "<!-- made by scripts/make_clashes.py: end -->"


def shown(name: str) -> str:
    """Return the name of a feature as the page shows it: settings are code."""
    return re.sub(r"[\w.]+(!?=[\w,]+)|\w+[._][\w.]+", lambda match: f"`{match[0].replace(',', ', ')}`", name)


def page() -> str:
    """Return the page with the table: a line for each clash."""
    rows = [
        f"| {shown(clash.feature)} | {' and '.join(map(shown, clash.others))} | {clash.why} | {clash.remedy} |\n"
        for clash in CLASHES
    ]
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    table = "| setting | with | why | what to do |\n|---|---|---|---|\n" + "".join(rows)
    return f"{before}{START}\n{table}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the page is out of date")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        sys.exit("docs/from_verl.md is out of date: run python scripts/make_clashes.py")


if __name__ == "__main__":
    main()
