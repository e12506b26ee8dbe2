"""Runs that get a fault in a chosen phase, and what they leave behind."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from marked_phases import MARKS_VARIABLE
from tiny_run import command, environment, read_metrics, title_of

HERE = Path(__file__).parent
SHARED_MEMORY = Path("/dev/shm")
START_LIMIT_S = 600.0
"""A run must reach its fault in this time, on a slow machine too."""


@dataclass(slots=True)
class FaultyRun:
    """A training run in `folder` whose files begin with `name`; enter it to start it, leave it to end what is left."""

    folder: Path
    name: str
    overrides: tuple[str, ...]
    process: subprocess.Popen[bytes] = field(init=False)

    @property
    def marks(self) -> Path:
        """The file with the phases that were entered."""
        return self.folder / f"{self.name}.marks"

    @property
    def command(self) -> list[str]:
        """What starts the run."""
        return [each.replace("verl_tree.main_ppo", "marked_run") for each in command(self.folder, *self.overrides)]

    def variables(self) -> dict[str, str]:
        """Return the environment of the run's processes."""
        variables = environment(self.folder / f"{self.name}.jsonl")
        variables["PYTHONPATH"] = os.pathsep.join([str(HERE), variables["PYTHONPATH"]])
        return variables | {MARKS_VARIABLE: str(self.marks)}

    def __enter__(self) -> "FaultyRun":
        with (self.folder / f"{self.name}.log").open("w") as log:
            self.process = subprocess.Popen(
                self.command, env=self.variables(), cwd=self.folder, stdout=log, stderr=subprocess.STDOUT
            )
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.processes():
            with suppress(psutil.NoSuchProcess):
                each.kill()
        self.process.wait()

    @property
    def log(self) -> str:
        """What the run printed so far."""
        return (self.folder / f"{self.name}.log").read_text(errors="replace")

    @property
    def metrics(self) -> dict[int, dict[str, Any]]:
        """The logged metrics of each step."""
        return read_metrics(self.folder / f"{self.name}.jsonl")

    def wait_for(self, phase: str, *, step: int) -> None:
        """Wait until the run enters a phase of a step."""
        mark = f"{phase} {step}"
        self.wait_until(lambda: self.marks.exists() and mark in self.marks.read_text().splitlines(), what=f"`{mark}`")

    def wait_until(self, holds: Callable[[], bool], *, what: str) -> None:
        """Wait until something holds while the run goes on."""
        deadline = time.monotonic() + START_LIMIT_S
        while not holds():
            assert self.process.poll() is None, f"ended before {what}:\n{self.log[-6000:]}"
            assert time.monotonic() < deadline, f"no {what} after {START_LIMIT_S:g} s:\n{self.log[-6000:]}"
            time.sleep(0.01)

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the run, also those that lost their parent: all have the variable of the marks."""
        found = []
        for each in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                is_dead = each.status() == psutil.STATUS_ZOMBIE
                if not is_dead and each.environ().get(MARKS_VARIABLE) == str(self.marks):
                    found.append(each)
        return found

    def kill(self, title: str) -> psutil.Process:
        """Kill (-9) the first process of the run whose title matches a pattern, and return it."""
        if title == "driver":
            victim = psutil.Process(self.process.pid)
        else:
            titled = [each for each in self.processes() if re.match(title, title_of(each))]
            assert titled, f"no process {title} among {sorted(map(title_of, self.processes()))}"
            victim = titled[0]
        victim.send_signal(signal.SIGKILL)
        return victim

    def left_after(self, limit_s: float) -> list[str]:
        """Return the titles of the run's processes that still live after `limit_s` seconds, or nothing before."""
        deadline = time.monotonic() + limit_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return [title_of(each) for each in left]


def weights_left() -> set[str]:
    """Return the paths of the segments for new weights that no process has mapped: left by killed updates."""
    maps = []
    for process in psutil.process_iter():
        with suppress(OSError):
            maps.append(Path(f"/proc/{process.pid}/maps").read_text())
    mapped = "".join(maps)
    return {str(path) for path in SHARED_MEMORY.glob("verl_weights_*") if str(path) not in mapped}


def last_saved(folder: Path) -> int:
    """Return the step that the tracker of the checkpoints names, or 0."""
    tracker = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.exists() else 0
