"""Modules with a bug in one line, and the check that shows it.

A function returns x - y, and its docstring says: Return the sum of x and y.
"""

import random
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MODULE, CHECK = "solve.py", "check.py"
TASK = f"A line of {MODULE} does not do what its docstring says. Repair it, so that `python {CHECK}` prints ok."
EXPRESSIONS = {
    "total": ("the sum of {a} and {b}", "{a} + {b}"),
    "difference": ("{a} minus {b}", "{a} - {b}"),
    "product": ("the product of {a} and {b}", "{a} * {b}"),
    "ratio": ("{a} divided by {b}", "{a} / {b}"),
    "rest": ("what is left of {a} divided by {b}", "{a} % {b}"),
    "power": ("{a} to the power of {b}", "{a} ** {b}"),
    "larger": ("the larger of {a} and {b}", "max({a}, {b})"),
    "smaller": ("the smaller of {a} and {b}", "min({a}, {b})"),
}
"""By the name of a function, what it returns, in words and in Python."""
NAMES = ("x", "y"), ("a", "b"), ("left", "right"), ("first", "second"), ("m", "n"), ("p", "q")
_ARGUMENTS = (7, 3), (2, 5)  # no two expressions agree on the first pair
_CHECK_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Bug:
    """A module with a bug.

    Attributes:
        module: Its text.
        check: A program that prints ok if the module has no bug, and else what is wrong.
        line: Number of the wrong line, from 1.
        answer: What should stand there, without the indent.
        written: What stands there.
        seed: Of `make_bug`.
    """

    module: str
    check: str
    line: int
    answer: str
    written: str
    seed: int

    def write(self, folder: Path) -> None:
        """Write the module and its check into a folder."""
        (folder / MODULE).write_text(self.module)
        (folder / CHECK).write_text(self.check)


def make_bug(*, seed: int) -> Bug:
    """Return a module of one function, by the seed."""
    rng = random.Random(f"one_function {seed}")
    name = rng.choice(sorted(EXPRESSIONS))
    wrong = rng.choice([each for each in sorted(EXPRESSIONS) if each != name])
    a, b = rng.choice(NAMES)
    told, right = (text.format(a=a, b=b) for text in EXPRESSIONS[name])
    written = f"return {EXPRESSIONS[wrong][1].format(a=a, b=b)}"
    lines = [f"def {name}({a}, {b}):", f'    """Return {told}."""', f"    {written}", ""]
    checks = [f"import {Path(MODULE).stem}"]
    for values in _ARGUMENTS:
        call, wanted = f"{Path(MODULE).stem}.{name}{values}", eval(right, {a: values[0], b: values[1]})
        checks.append(f'assert {call} == {wanted}, f"{call} is {{{call}}}, not {wanted}"')
    check = "\n".join([*checks, 'print("ok")', ""])
    return Bug("\n".join(lines), check, len(lines) - 1, f"return {right}", written, seed)


def make_bugs(num_bugs: int, *, seed: int) -> list[Bug]:
    """Return modules of so many seeds, from the first on."""
    return [make_bug(seed=seed + number) for number in range(num_bugs)]


def is_repaired(folder: Path, check: str, *, environment: Mapping[str, str]) -> bool:
    """Whether the module in a folder passes the check, which is not the file there: an agent may have changed that."""
    command = ["python", "-c", check]
    try:
        done = subprocess.run(
            command, cwd=folder, env=dict(environment), capture_output=True, text=True, timeout=_CHECK_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0 and done.stdout == "ok\n"
