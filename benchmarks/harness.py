"""What the benchmarks share: their command line, the machine they ran on, interleaved times, and the file they write.

The paths that a benchmark compares take turns, repetition by repetition, so that a machine that slows down slows all of
them. Medians are compared. On a shared machine the processor's seconds are steadier than the clock's, so both are kept.
Raw data of published numbers lies in docs/benchmarks/data.
"""

import argparse
import ctypes
import datetime
import importlib
import json
import os
import platform
import resource
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

PACKAGES = ("numpy", "scipy", "torch", "triton", "transformers", "verl", "vllm")
"""Packages whose version belongs to a measurement, where the benchmark has imported them."""

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h

BYTES_PER_MAXRSS = 1 if platform.system() == "Darwin" else 1024


def new_parser(description: str | None, *, needed_out: str | None = None) -> argparse.ArgumentParser:
    """Return a parser that prints the module's docstring as it is written and knows `--out`, which may be needed."""
    parser = _parser(description)
    help_text = needed_out or "write the results to this JSON file"
    parser.add_argument("--out", type=Path, required=needed_out is not None, help=help_text)
    return parser


def report_options(description: str | None) -> argparse.Namespace:
    """Parse the command line of a report: the data, and where its figure goes."""
    parser = _parser(description)
    parser.add_argument("data", type=Path, help="what the benchmark wrote")
    parser.add_argument("--plot", type=Path, help="draw the figure into this file")
    return parser.parse_args()


def _parser(description: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_device_options(parser: argparse.ArgumentParser, *, seconds: float) -> None:
    """Add what `gpu_stages.py` gives to every program: where it runs, for how long, and whether with tiny sizes."""
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--seconds", type=float, default=seconds, help="begin nothing later")
    parser.add_argument("--small", action="store_true", help="few and tiny cases, to see that the program runs")


def environment(options: argparse.Namespace | None = None) -> dict[str, Any]:
    """Return what a reader needs to judge or to repeat a measurement: date, command, machine and versions.

    Args:
        options: The parsed command line; its values are recorded too, `--out` left out.
    """
    values = {} if options is None else {key: value for key, value in vars(options).items() if key != "out"}
    found = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "options": {key: str(value) if isinstance(value, Path) else value for key, value in values.items()},
        "machine": platform.machine(),
        "processor": _processor_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    found |= {name: importlib.import_module(name).__version__ for name in PACKAGES if name in sys.modules}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return found


def _processor_name() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0].split(":", 1)[1].strip() if names else platform.processor()


def write_json(record: Any, out: Path | None) -> None:
    """Write a record to a file; do nothing where no file was asked for."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1) + "\n")


def append_record(record: Mapping[str, Any], out: Path | None) -> None:
    """Append a record to a file as a line of JSON, at once, so that a process that is killed keeps it."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as file:
            file.write(json.dumps(record) + "\n")


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of `append_record`. A last line that a killed process has not ended is left out."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def attempt(call: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return what a call returns and no error; or None, and what it raised in one line, after printing the traceback.

    Compilers of kernels raise exceptions of many kinds, and one case that fails must not lose the others.
    """
    # The exception of a future may be of any kind.
    with ThreadPoolExecutor(max_workers=1) as executor:
        future = executor.submit(call)
        error = future.exception()
    if error is None:
        return future.result(), None
    traceback.print_exception(error)
    return None, f"{type(error).__name__}: {error}".splitlines()[0][:300]


def run_cases(
    cases: Iterable[tuple[Mapping[str, Any], Callable[[], dict[str, Any]]]], options: argparse.Namespace
) -> NoReturn:
    """Run cases until `--seconds` are over, write a record of each at once, and exit: with 1 if one failed.

    Args:
        cases: What a record is found by, and the call that returns the rest of it. A case failed if it raises, or if
            its record has `passed` and this is false.
        options: The command line of `add_device_options`.
    """
    append_record({"kind": "environment", **environment(options)}, options.out)
    started, num_failed, num_not_run = time.monotonic(), 0, 0
    for named, run in cases:
        case_started = time.monotonic()
        if case_started - started > options.seconds:
            num_not_run += 1
            continue
        # Before the case: a process that hangs or dies has said where.
        print(f"{case_started - started:6.1f} s {', '.join(map(str, named.values()))}", flush=True)
        result, error = attempt(run)
        record = {"error": error, "passed": False} if result is None else result
        num_failed += not record.get("passed", True)
        append_record({**named, **record, "seconds": round(time.monotonic() - case_started, 3)}, options.out)
        if error is not None and options.device == "cuda":
            sys.modules["torch"].cuda.synchronize()  # raises if the context is broken: nothing more can run here
    append_record({"kind": "end", "num_failed": num_failed, "num_not_run": num_not_run}, options.out)
    print(f"{num_failed} failures; {num_not_run} cases did not fit into the time", flush=True)
    sys.exit(1 if num_failed else 0)


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows under their names, columns aligned; a row may lack some."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, *([str(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the rows under their names, as a table of a page."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def keep_freed_memory() -> None:
    """Keep freed memory in the process, so that large buffers are not faulted in anew page by page (Linux)."""
    if sys.platform == "linux":
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def peak_bytes() -> int:
    """Return the peak resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * BYTES_PER_MAXRSS


@dataclass
class Times:
    """Seconds of the repetitions of one path.

    Attributes:
        wall_s: Seconds by the clock, or by the device's events on a GPU.
        cpu_s: Seconds of this process's processor time.
    """

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        """The median by the clock."""
        return statistics.median(self.wall_s)

    @property
    def median_cpu_s(self) -> float:
        """The median of the processor's seconds."""
        return statistics.median(self.cpu_s)

    @contextmanager
    def measure(self, *, is_cuda: bool = False) -> Iterator[None]:
        """Append the seconds of the block; on a GPU those between two events, so that launching does not count."""
        events = []
        if is_cuda:
            import torch

            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        yield
        if events:
            events[1].record()
            events[1].synchronize()
            self.wall_s.append(events[0].elapsed_time(events[1]) / 1000)
        else:
            self.wall_s.append(time.perf_counter() - started_s)
        self.cpu_s.append(time.process_time() - started_cpu_s)


def interleave(
    paths: Mapping[str, Callable[[], Any]],
    *,
    repetitions: int,
    num_warmups: int = 0,
    is_cuda: bool = False,
    title: str = "",
) -> dict[str, Times]:
    """Run every path once per repetition, in turn, and time it.

    Args:
        paths: What is compared, by name.
        repetitions: Counted runs of each path.
        num_warmups: Runs of each path before the first counted one.
        is_cuda: Whether the work runs on a GPU.
        title: Printed before each run, on standard error.

    Returns:
        The times of the counted runs, by name.
    """
    times = {name: Times() for name in paths}
    for number in range(num_warmups + repetitions):
        for name, call in paths.items():
            print(f"{title}repetition {number + 1 - num_warmups} of {repetitions}: {name}", file=sys.stderr, flush=True)
            with (times[name] if number >= num_warmups else Times()).measure(is_cuda=is_cuda):
                call()
    return times
