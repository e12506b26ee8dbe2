"""Makes the table of docs/models.md from what tests have shown.

    python -m pytest -o junit_family=xunit1 --junitxml=results.xml TESTS
    python scripts/make_models.py results.xml [--check]

A test shows something by one call, `record_property("FAMILY | COLUMN", value)`: a number, of which the table shows the
largest of all tests, or a word. What passed tests have shown replaces what they had shown in `DATA`; without a file of
results the table is made from `DATA` alone. `--check` changes nothing and fails if the page is out of date.
"""

import csv
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from made_pages import ROOT, new_parser, require_current, with_part

PAGE, DATA = ROOT / "docs" / "models.md", ROOT / "docs" / "benchmarks" / "data" / "models.csv"
COLUMNS = (
    "log-probs",
    "gradients",
    "relay",
    "checkpointing",
    "LoRA",
    "engine, 1 rank",
    "engine, 2 ranks",
    "Ulysses",
    "critic",
    "VeOmni",
    "Megatron",
    "router replay",
    "whole run",
    "backends",
)


class Shown(NamedTuple):
    """What one test has shown of a family."""

    family: str
    column: str
    value: str
    test: str


def shown_by(results: Path) -> list[Shown]:
    """Return what the passed tests of a JUnit file have shown; of a test's values of one cell the largest."""
    found: dict[tuple[str, str, str], str] = {}
    for case in ElementTree.parse(results).getroot().iter("testcase"):
        if any(case.find(each) is not None for each in ("failure", "error", "skipped")):
            continue
        test = f"{case.get('classname')}::{case.get('name')}"
        for each in case.iter("property"):
            family, is_shown, column = str(each.get("name")).partition(" | ")
            if is_shown:
                if column not in COLUMNS:
                    sys.exit(f"{test} shows {column!r}; the columns are {', '.join(COLUMNS)}")
                key = (family, column, test)
                found[key] = cell([found[key], str(each.get("value"))]) if key in found else str(each.get("value"))
    return [Shown(family, column, value, test) for (family, column, test), value in found.items()]


def cell(values: Iterable[str]) -> str:
    """Return the largest of numbers, or all words; nothing of no value."""
    values = list(values)
    if values and all(map(_is_number, values)):
        return max(values, key=float)
    return ", ".join(sorted({word for value in values for word in value.split(", ")}))


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def table(rows: Iterable[Shown]) -> str:
    """Return the table: a line for each family in the order of its first row."""
    rows = list(rows)
    columns = [column for column in COLUMNS if any(row.column == column for row in rows)]
    lines = [f"| family | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for family in dict.fromkeys(row.family for row in rows):
        cells = []
        for column in columns:
            value = cell(row.value for row in rows if (row.family, row.column) == (family, column))
            cells.append(f"{float(value):.0e}" if _is_number(value) else value)
        lines.append(f"| {family} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page(rows: Iterable[Shown]) -> str:
    """Return the page with this table."""
    return with_part(PAGE, table(rows), by="make_models.py")


def main() -> None:
    """Write the page and the data, or check them."""
    parser = new_parser(__doc__)
    parser.add_argument("results", type=Path, nargs="*", help="JUnit files of pytest")
    arguments = parser.parse_args()
    with DATA.open(newline="", encoding="utf-8") as file:
        rows = [Shown(**row) for row in csv.DictReader(file)]
    if arguments.check:
        require_current(PAGE, page(rows), by="make_models.py")
        return
    for results in arguments.results:
        new = shown_by(results)
        tests = {row.test for row in new}
        rows = [row for row in rows if row.test not in tests] + new
    with DATA.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Shown._fields)
        writer.writerows(sorted(rows))
    PAGE.write_text(page(sorted(rows)), encoding="utf-8")


if __name__ == "__main__":
    main()
