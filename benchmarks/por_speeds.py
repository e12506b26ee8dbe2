"""Reads what por.py measured, from its JSON lines: paths by the rows that they ran on, and how fast they are.

Seconds are medians: by the device's clock on CUDA, of the processor on a CPU, which other work on the machine changes
less.
"""

import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

DRAWN = "drawn"
MIB = 2**20
MEMORY_GOAL = 1.1


class Key(NamedTuple):
    """What was measured together: a model on a drawn tree of some POR, or on a file of stored trees."""

    model: str
    trees: str
    por: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What the runs of one path took, or why there are none."""

    path: str
    seconds: float
    last: dict[str, Any]  # the last record of a run
    peak_bytes: int | None
    not_run: str | None = None

    @property
    def kind(self) -> str:
        """The path's name without its option."""
        return self.path.partition("/")[0]

    @property
    def capacity(self) -> float | None:
        """The longest paths that a call may hold, of packs and sections."""
        return None if self.path == "tree" or self.kind == "flat" else float(self.path.partition("/")[2])

    @classmethod
    def of_runs(cls, path: str, runs: list[dict[str, Any]], *, seconds_key: str) -> "Measured":
        """Take the median of the timed runs, and the largest peak of all."""
        timed = [run for run in runs if run.get("repetition", 0) > 0]
        reasons = [run["not_run"] for run in runs if "not_run" in run]
        peaks = [run["held_bytes"] + run["peak_bytes"] for run in runs if run.get("peak_bytes") is not None]
        peaks += [run["max_allocated_bytes"] for run in runs if run.get("max_allocated_bytes") is not None]
        return cls(
            path=path,
            seconds=statistics.median(run[seconds_key] for run in timed) if timed else float("nan"),
            last=timed[-1] if timed else {},
            peak_bytes=max(peaks, default=None),
            not_run=None if timed else (reasons or ["the time was over"])[0][:80],
        )


Points = dict[Key, dict[str, Measured]]
"""The paths by name."""


@dataclass(frozen=True, slots=True)
class Speed:
    """A path against flat rows: how much faster it is, and how much faster it could be by FLOPs."""

    ratio: float
    bound: float

    @property
    def quotient(self) -> float:
        """The share of the bound that is reached."""
        return self.ratio / self.bound

    @classmethod
    def of(cls, measured: Measured, flat: Measured) -> "Speed":
        """Compare two paths."""
        return cls(ratio=flat.seconds / measured.seconds, bound=flat.last["flops"] / measured.last["flops"])


def measured_points(records: list[dict[str, Any]]) -> Points:
    """Gather the runs of every point."""
    device = next(record["options"]["device"] for record in records if record["kind"] == "environment")
    runs: dict[Key, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if record["kind"] == "run":
            key = Key(record["model"], record["trees"], record["por"])
            runs[key][record["path"]].append(record)
    seconds_key = "wall_s" if device == "cuda" else "cpu_s"
    return {
        key: {path: Measured.of_runs(path, each, seconds_key=seconds_key) for path, each in paths.items()}
        for key, paths in sorted(runs.items())
    }


def fastest_flat(points: Points, key: Key) -> tuple[Measured | None, float]:
    """Return the fastest flat path of a model at the nearest POR that has one, and that POR."""
    found = [
        (abs(other.por - key.por), measured.seconds, other.por, measured)
        for other, paths in points.items()
        for measured in paths.values()
        if other[:2] == key[:2] and measured.kind == "flat" and measured.not_run is None
    ]
    if not found:
        return None, key.por
    *_, other, measured = min(found, key=lambda each: each[:2])
    return measured, other


Peaks = dict[tuple[Key, str], dict[str, dict[str, Any]]]
"""The records of peaks by point and kind, then by path."""


def measured_peaks(records: list[dict[str, Any]]) -> Peaks:
    """Gather the peaks of every point; a path that did not run has none."""
    peaks: Peaks = defaultdict(dict)
    for record in records:
        if record["kind"].endswith("memory") and "not_run" not in record:
            key = Key(record["model"], record["trees"], record["por"])
            peaks[key, record["kind"]][record["path"]] = record
    return dict(peaks)


def flat_of(paths: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the record of flat rows."""
    return next(record for path, record in paths.items() if path.startswith("flat"))


def memory_share(record: dict[str, Any], flat: dict[str, Any]) -> float:
    """Return a peak, scores and store taken off, over what `flat` takes for the tokens of a call."""
    own = record["peak_bytes"] - record["expansion_bytes"] - record["store_bytes"]
    return own / _call_tokens(record) * _call_tokens(flat) / flat["peak_bytes"]


def _call_tokens(record: dict[str, Any]) -> int:
    return min(record["num_tokens"], record["capacity"] or record["num_tokens"])
