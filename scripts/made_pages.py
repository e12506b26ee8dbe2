"""What the scripts share that make a page of the docs from code: they write it, or check that it is up to date."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]


def with_part(page: Path, made: str, *, by: str) -> str:
    """Return a page with what script `by` makes of it between its two marks."""
    start, end = (f"<!-- made by scripts/{by}: {mark} -->" for mark in ("start", "end"))
    before, _, rest = page.read_text(encoding="utf-8").partition(f"{start}\n")
    return f"{before}{start}\n\n{made}\n{end}{rest.partition(end)[2]}"


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that knows `--check`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the page is out of date")
    return parser


def require_current(path: Path, page: str, *, by: str) -> None:
    """End the process if the page is another one."""
    if not path.is_file() or path.read_text(encoding="utf-8") != page:
        sys.exit(f"{path.relative_to(ROOT)} is out of date: run python scripts/{by}")


def write_or_check(path: Path, make: Callable[[], str], *, by: str, description: str | None) -> None:
    """Write the page that script `by` makes, or check it with `--check`."""
    if new_parser(description).parse_args().check:
        require_current(path, make(), by=by)
    else:
        path.write_text(make(), encoding="utf-8")
