"""Runs programs one after another or side by side, each with a limit in seconds, and keeps what they wrote.

A job is a process of its own. One that fails, dies or hangs is recorded, and the next one starts. `{out}` in a command
becomes the job's file of records, `{seconds}` what the job may plan with: its limit less what it needs to end.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import append_record, read_records

SECONDS_TO_END = 15.0
"""Between what a job may plan with and its limit: imports before, the case at hand, and writing after."""

SECONDS_TO_DIE = 5.0
"""Between the signal that asks a job for its traceback and the one that ends it."""

LEAST_SECONDS = 2.0
"""A job is not started with less."""

POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Job:
    """One program: its name, which is also that of its files, its command, and its limit in seconds."""

    name: str
    command: Sequence[str]
    limit_s: float


@dataclass(slots=True)
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    log: Path
    out: Path
    started: float
    limit_s: float
    asked_at: float | None = None  # when it was asked for its traceback

    def poll(self) -> int | None:
        """Return the exit status, or None; end the job if its time is up."""
        status = self.process.poll()
        now = time.monotonic()
        if status is None and self.asked_at is None and now - self.started > self.limit_s:
            self.asked_at = now
            self.end(signal.SIGABRT)  # Python prints where it was (PYTHONFAULTHANDLER)
        elif status is None and self.asked_at is not None and now - self.asked_at > SECONDS_TO_DIE:
            self.end(signal.SIGKILL)
        return status

    def end(self, number: signal.Signals) -> None:
        """Send a signal to the job and all its processes."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)


def run_jobs(steps: Sequence[Sequence[Job]], *, folder: Path, budget_s: float) -> bool:
    """Run steps one after another, the jobs of a step side by side, and return whether all jobs passed.

    `folder/NAME.jsonl` and `folder/NAME.log` are what a job wrote, `folder/jobs.jsonl` how each ended: `passed`,
    `failed` (exit status), `died` (a signal), `out of time`, `not run` (the budget was spent).
    """
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + budget_s
    passed = True
    for jobs in steps:
        running = []
        for job in jobs:
            limit_s = min(job.limit_s, deadline - time.monotonic())
            if limit_s < LEAST_SECONDS:
                append_record({"job": job.name, "status": "not run"}, folder / "jobs.jsonl")
                print(f"{job.name}: not run, the time is spent", flush=True)
                passed = False
                continue
            running.append(_start(job, folder=folder, limit_s=limit_s))
        with _exits_on_sigterm():
            try:
                while running:
                    ended = [each for each in running if each.poll() is not None]
                    for each in ended:
                        passed &= _record(each, folder=folder)
                    running = [each for each in running if each not in ended]
                    time.sleep(POLL_S)
            finally:
                for each in running:
                    each.end(signal.SIGKILL)
    return passed


@contextmanager
def _exits_on_sigterm() -> Iterator[None]:
    """Exit on the signal of an outer limit (`timeout`), which would otherwise leave the jobs running."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _start(job: Job, *, folder: Path, limit_s: float) -> _Running:
    out, log = folder / f"{job.name}.jsonl", folder / f"{job.name}.log"
    seconds = f"{max(limit_s - SECONDS_TO_END, limit_s / 2):.0f}"
    command = [part.replace("{out}", str(out)).replace("{seconds}", seconds) for part in job.command]
    print(f"{job.name}: started, at most {limit_s:.0f} s", flush=True)
    with log.open("ab") as file:
        file.write(f"$ {shlex.join(command)}\n".encode())
        file.flush()
        # A session of its own, so that what the job starts ends with it.
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return _Running(job, process, log, out, time.monotonic(), limit_s)


def _record(ended: _Running, *, folder: Path) -> bool:
    """Record how a job ended and print it; return whether it passed."""
    exit_status = ended.process.returncode
    if ended.asked_at is not None:
        status = "out of time"
    elif exit_status == 0:
        status = "passed"
    else:
        status = "failed" if exit_status > 0 else "died"
    log_lines = ended.log.read_text(errors="replace").splitlines()
    record: dict[str, Any] = {
        "job": ended.job.name,
        "status": status,
        "exit_status": exit_status,
        "seconds": round(time.monotonic() - ended.started, 1),
        "num_records": len(read_records(ended.out)),
    }
    print(f"{record['job']}: {status}, {record['seconds']} s, {record['num_records']} records", flush=True)
    if status != "passed":
        record["log_end"] = [line[:300] for line in log_lines[-12:]]
        print("\n".join(f"    {line[:160]}" for line in log_lines[-4:]), flush=True)
    append_record(record, folder / "jobs.jsonl")
    return status == "passed"
