"""Follow a tutorial as a reader does: write its files, run its commands, and compare what is printed with the page.

A block whose first line is a comment with a name (`# my_agent.py`) is that file. A block `bash` is run. A block `text`
is what the commands before it print, and `...` in it stands for any lines. Blocks `sh` prepare a reader's shell, which
`environment` does here. Other blocks are pictures.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"# ([\w.]+)\n")
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?(e[+-]?\d+)?")

Run = Callable[[str, Path], str]
"""It runs the commands of a block in a folder and returns what they print."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str

    @property
    def file_name(self) -> str | None:
        """The name of the file that the block is, or None."""
        named = _NAME.match(self.text)
        return named[1] if named and self.language in ("python", "yaml") else None


def read_blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page in their order."""
    return [Block(*found) for found in _BLOCK.findall(page.read_text())]


def environment(folder: Path) -> Mapping[str, str]:
    """Return the variables of a shell with this environment, in which `folder` and the checkout can be imported."""
    paths = [str(ROOT), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    programs = [str(Path(sys.executable).parent), os.environ["PATH"]]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PATH": os.pathsep.join(programs)}


def run_in_bash(commands: str, folder: Path) -> str:
    """Run commands in a shell of their own; the first that fails ends it."""
    done = subprocess.run(
        ["bash", "-e", "-c", commands],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout[-6000:]}"
    return done.stdout


def follow(page: Path, folder: Path, *, run: Run = run_in_bash) -> list[str]:
    """Follow a page in a folder and return what each block of commands printed."""
    printed: list[str] = []
    for block in read_blocks(page):
        if block.file_name is not None:
            (folder / block.file_name).write_text(block.text)
        elif block.language == "bash":
            printed.append(run(block.text, folder))
        elif block.language == "text":
            missing = lines_missing(block.text, printed[-1])
            assert not missing, f"{page.name} shows lines that were not printed: {missing}\n{printed[-1][-6000:]}"
    return printed


def lines_missing(shown: str, printed: str) -> list[str]:
    """Return the lines that a page shows and that were not printed in this order, all numbers taken for equal.

    A line that ends in `...` is compared up to there.
    """
    left = iter([_without_numbers(line) for line in printed.splitlines()])
    wanted = [_without_numbers(line) for line in shown.splitlines()]
    return [line for line in wanted if line and line != "..." and not any(_agree(line, each) for each in left)]


def _agree(shown: str, printed: str) -> bool:
    return printed.startswith(shown.removesuffix("...")) if shown.endswith("...") else printed == shown


def _without_numbers(line: str) -> str:
    """Return a line with `#` for each number, and with single spaces, as columns are as wide as their numbers."""
    return " ".join(_NUMBER.sub("#", line).split())
