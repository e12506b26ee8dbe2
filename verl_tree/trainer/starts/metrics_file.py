"""The file of verl's file logger over several starts of one training run.

verl (0.9.1, `FileLogger`) empties its file when it starts. So the file is moved aside before, and the lines up to the
step that the run goes on from are written back behind it. Lines of later steps, and the whole file where a run starts
from the beginning, stay under another name.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

from omegaconf import DictConfig


def path_of(config: DictConfig) -> Path | None:
    """Return the file that verl's logger will write in this process; None if `file` is no logger."""
    loggers = config.trainer.logger
    if "file" not in ([loggers] if isinstance(loggers, str) else loggers or []):
        return None
    if path := os.environ.get("VERL_FILE_LOGGER_PATH"):
        return Path(path)
    root = Path(os.environ.get("VERL_FILE_LOGGER_ROOT", ".")).expanduser()
    return root / config.trainer.project_name / f"{config.trainer.experiment_name}.jsonl"


@dataclass(frozen=True, slots=True)
class EarlierMetrics:
    """The metrics of earlier starts, aside until verl's logger has opened its file.

    Attributes:
        aside: Where they are. A start that dies before they are back leaves them there for the next one.
        last_step: The step that the run goes on from.
    """

    aside: Path
    last_step: int

    @classmethod
    def take(cls, path: Path, *, last_step: int) -> Self | None:
        """Move the file aside; None if there is nothing to write back, as with `last_step` 0, a new beginning."""
        aside = path.with_name(f"{path.name}.resuming")
        if last_step > 0:
            if not aside.exists() and path.exists():
                path.rename(aside)
            return cls(aside, last_step) if aside.exists() else None
        for old in (aside, path):
            keep_under_another_name(old, like=path)
        return None

    def write_back(self, file: BinaryIO) -> None:
        """Write the lines up to the last step to verl's file, which is open and empty; the others stay beside it."""
        later = []
        with self.aside.open("rb") as lines:
            for line in lines:
                step = _step_of(line)
                if step is not None and step <= self.last_step:
                    file.write(line.rstrip(b"\n") + b"\n")
                elif step is not None:
                    later.append(line)
        file.flush()
        if later:
            _free_name(self.aside.with_suffix("")).write_bytes(b"".join(later))
        # Last: a start that dies before does it all again.
        self.aside.unlink()


def keep_under_another_name(old: Path, *, like: Path) -> None:
    """Rename a file that has something in it to `NAME.earlier_1.jsonl`, or the next number that is free."""
    if old.exists() and old.stat().st_size > 0:
        old.rename(_free_name(like))


def _free_name(path: Path) -> Path:
    """Return the name for what this start does not go on from, and say so."""
    number = 1
    while (kept := path.with_name(f"{path.stem}.earlier_{number}{path.suffix}")).exists():
        number += 1
    print(f"metrics: those of an earlier start that this one does not go on from are now in {kept}", flush=True)
    return kept


def _step_of(line: bytes) -> int | None:
    """Return the step of a line; None of one that was not written to its end."""
    try:
        record: dict[str, Any] = json.loads(line)
        return int(record["step"])
    except (ValueError, KeyError, TypeError):
        return None
