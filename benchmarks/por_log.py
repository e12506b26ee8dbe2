"""What keeps por.py's results and time: a file of JSON lines that a killed run leaves behind, and a clock."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from harness import append_record, environment, read_records


class RunLog:
    """The file of records: one JSON object a line, written before the next run begins.

    Raises:
        ValueError: The file was measured with other options, of those named in `same`.
    """

    def __init__(self, out: Path, options: argparse.Namespace, *, same: tuple[str, ...]) -> None:
        self._out, self.records = out, read_records(out)
        if out.exists():  # without half a line, which a benchmark that was killed may have left
            out.write_text("".join(json.dumps(record) + "\n" for record in self.records))
        found = environment(options)
        for record in self.records:
            if record["kind"] == "environment":
                _check_same(record["options"], found["options"], same=same, out=out)
        self.write(kind="environment", **found)

    def write(self, **record: Any) -> None:
        """Append a record."""
        self.records.append(record)
        append_record(record, self._out)

    def find(self, **wanted: Any) -> list[dict[str, Any]]:
        """Return the records with these values."""
        return [record for record in self.records if wanted.items() <= record.items()]


def _check_same(before: dict[str, Any], now: dict[str, Any], *, same: tuple[str, ...], out: Path) -> None:
    for name in same:
        if name in before and before[name] != now[name]:
            option = name.replace("_", "-")
            raise ValueError(f"{out} was measured with --{option} {before[name]}, not {now[name]}: give another --out")


class Clock:
    """The seconds that are left, and the speed so far."""

    def __init__(self, seconds: float) -> None:
        self._start_s, self._seconds = time.monotonic(), seconds
        self._flops_per_s: float | None = None

    @property
    def used_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start_s

    def allows(self, flops: float) -> bool:
        """Return whether work ends in time, at the speed of the run before it."""
        expected_s = 0.0 if self._flops_per_s is None else flops / self._flops_per_s
        return self.used_s + expected_s < self._seconds

    def ran(self, flops: float, *, seconds: float) -> None:
        """Learn the speed from a run."""
        self._flops_per_s = flops / seconds
