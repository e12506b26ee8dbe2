"""The first run on a GPU loses nothing: jobs that die, fail or hang are recorded, and the next ones run."""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gpu_stages
import jobs
import pytest
from contenders import CONTENDERS
from gpu_stages import BUDGET_S, STAGES, Machine
from harness import append_record, read_records, run_cases
from jobs import Job, run_jobs

WRITE = "import json, sys; out = open({out!r}, 'a'); out.write(json.dumps({{'case': 1}}) + '\\n'); out.flush(); "


@pytest.fixture(autouse=True)
def quick_to_die(monkeypatch):
    monkeypatch.setattr(jobs, "SECONDS_TO_DIE", 0.3)
    monkeypatch.setattr(jobs, "LEAST_SECONDS", 0.3)


LATE = "import pathlib, time; time.sleep(60); pathlib.Path({late!r}).touch()"
"""A process that nobody ends does this."""


def python(name: str, code: str, *, folder: Path, limit_s: float = 20.0) -> Job:
    """Make a job that writes one record and goes on with `code`."""
    return Job(name, [sys.executable, "-c", WRITE.format(out=str(folder / f"{name}.jsonl")) + code], limit_s)


def statuses(folder: Path) -> dict[str, str]:
    return {record["job"]: record["status"] for record in read_records(folder / "jobs.jsonl")}


def test_jobs_that_die_fail_or_hang_do_not_stop_the_next(tmp_path):
    late = tmp_path / "late"
    steps = [
        [python("dies", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", folder=tmp_path)],
        [python("fails", "print('the cause'); sys.exit(3)", folder=tmp_path)],
        # It ignores that it is asked for its traceback, as a process inside a driver does.
        [
            python(
                "hangs",
                "import signal; signal.signal(signal.SIGABRT, signal.SIG_IGN); " + LATE.format(late=str(late)),
                folder=tmp_path,
                limit_s=1.5,
            )
        ],
        [python("works", "", folder=tmp_path)],
    ]
    assert not run_jobs(steps, folder=tmp_path, budget_s=60)
    assert not late.exists(), "it was waited for"
    assert statuses(tmp_path) == {"dies": "died", "fails": "failed", "hangs": "out of time", "works": "passed"}
    for name in ("dies", "fails", "hangs", "works"):
        assert read_records(tmp_path / f"{name}.jsonl") == [{"case": 1}]
    fails = read_records(tmp_path / "jobs.jsonl")[1]
    assert fails["exit_status"] == 3
    assert fails["log_end"][-1] == "the cause"
    assert all(record["num_records"] == 1 for record in read_records(tmp_path / "jobs.jsonl"))


def test_a_job_that_hangs_says_where(tmp_path):
    hangs = python("hangs", "import time\ndef stuck(): time.sleep(60)\nstuck()", folder=tmp_path, limit_s=1.5)
    assert not run_jobs([[hangs]], folder=tmp_path, budget_s=60)
    assert "in stuck" in "\n".join(read_records(tmp_path / "jobs.jsonl")[0]["log_end"])


def wait_for_end(pid: int) -> None:
    """Wait until a process is gone, or a zombie that nobody has asked for its status."""
    stat = Path(f"/proc/{pid}/stat")
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.05)


def test_what_a_job_started_ends_with_it(tmp_path):
    pid_file, late = tmp_path / "pid", tmp_path / "late"
    code = (
        f"import subprocess; child = subprocess.Popen([sys.executable, '-c', {LATE.format(late=str(late))!r}]); "
        f"open({str(pid_file)!r}, 'w').write(str(child.pid)); child.wait()"
    )
    run_jobs([[python("parent", code, folder=tmp_path, limit_s=2.0)]], folder=tmp_path, budget_s=60)
    wait_for_end(int(pid_file.read_text()))
    assert not late.exists(), "it ended by itself"


def test_jobs_that_the_budget_does_not_reach_are_named(tmp_path):
    late = tmp_path / "late"
    steps = [[python(name, LATE.format(late=str(late)), folder=tmp_path)] for name in ("first", "second")]
    assert not run_jobs(steps, folder=tmp_path, budget_s=1.5)
    assert not late.exists(), "it was waited for"
    assert statuses(tmp_path) == {"first": "out of time", "second": "not run"}


def test_jobs_of_a_step_run_side_by_side_and_know_their_seconds(tmp_path):
    code = "import pathlib, sys, time\npathlib.Path(sys.argv[1], sys.argv[2]).touch()\n"
    wait = "while not pathlib.Path(sys.argv[1], sys.argv[3]).exists(): time.sleep(.02)\nprint(sys.argv[4])"
    pair = [
        Job(mine, [sys.executable, "-c", code + wait, str(tmp_path), mine, other, "{seconds}"], 20)
        for mine, other in (("a", "b"), ("b", "a"))
    ]
    assert run_jobs([pair], folder=tmp_path, budget_s=60)
    assert (tmp_path / "a.log").read_text().splitlines()[-1] == "10"  # of 20 s, half is left to end


def test_a_line_that_was_not_ended_is_left_out(tmp_path):
    path = tmp_path / "records.jsonl"
    append_record({"case": 1}, path)
    with path.open("a") as file:
        file.write('{"case": 2, "err')
    assert read_records(path) == [{"case": 1}]
    assert read_records(tmp_path / "absent.jsonl") == []


def raises() -> dict[str, Any]:
    raise ValueError("no kernel")


def test_cases_that_fail_or_raise_are_recorded_and_the_next_ones_run(tmp_path):
    options = argparse.Namespace(seconds=60.0, device="cpu", out=tmp_path / "cases.jsonl")
    cases = {"fails": lambda: {"passed": False}, "raises": raises, "works": lambda: {"passed": True}, "timed": dict}
    with pytest.raises(SystemExit) as ended:
        run_cases([({"case": name}, run) for name, run in cases.items()], options)
    assert ended.value.code == 1
    _, *records, end = read_records(options.out)
    assert [(each["case"], each.get("passed")) for each in records] == [
        ("fails", False),
        ("raises", False),
        ("works", True),
        ("timed", None),
    ]
    assert records[1]["error"] == "ValueError: no kernel"
    assert end == {"kind": "end", "num_failed": 2, "num_not_run": 0}
    with pytest.raises(SystemExit) as ended:
        run_cases([({"case": "late"}, raises)], argparse.Namespace(seconds=-1.0, device="cpu", out=options.out))
    assert ended.value.code == 0
    assert read_records(options.out)[-1] == {"kind": "end", "num_failed": 0, "num_not_run": 1}


def test_a_runner_that_is_ended_leaves_the_records_and_no_job(tmp_path):
    """What an outer limit does (`timeout`): the runner is ended while a job works."""
    program = (
        "import sys; from pathlib import Path; from jobs import Job, run_jobs\n"
        "folder = Path(sys.argv[1])\n"
        "quick = Job('quick', [sys.executable, '-c', 'print(1)'], 20)\n"
        "code = 'import os; print(os.getpid(), flush=True); ' + sys.argv[2]\n"
        "slow = Job('slow', [sys.executable, '-c', code], 60)\n"
        "run_jobs([[quick], [slow]], folder=folder, budget_s=60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(jobs.__file__).parent)}
    log, late = tmp_path / "slow.log", tmp_path / "late"
    command = [sys.executable, "-c", program, str(tmp_path), LATE.format(late=str(late))]
    with subprocess.Popen(command, env=environment) as runner:
        while not (log.exists() and len(log.read_text().splitlines()) == 2):
            assert runner.poll() is None
            time.sleep(0.05)
        runner.send_signal(signal.SIGTERM)
    assert runner.returncode == 128 + signal.SIGTERM
    assert statuses(tmp_path) == {"quick": "passed"}
    wait_for_end(int(log.read_text().splitlines()[-1]))
    assert not late.exists(), "it ended by itself"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("stage", STAGES)
def test_the_jobs_of_a_stage_fit_into_its_budget(stage, device, tmp_path):
    steps = STAGES[stage](Machine(device, 16, tmp_path))
    names = [job.name for step in steps for job in step]
    assert len(names) == len(set(names))
    assert sum(max(job.limit_s for job in step) for step in steps) <= BUDGET_S
    assert max(map(len, steps)) <= 18  # two more than there are cores
    for job in (job for step in steps for job in step):
        assert Path(job.command[1]).exists()
        assert "{out}" in job.command
        assert job.command[job.command.index("--device") + 1] == device


def test_every_backend_and_contender_is_checked_and_timed(tmp_path):
    machine = Machine("cuda", 16, tmp_path)
    checked = {job.name for step in gpu_stages.correctness(machine) for job in step}
    assert {"check-fa4", "check-triton", "check-varlen", "check-oracle"} <= checked
    timed = [
        job.command[job.command.index("--contender") + 1] for step in gpu_stages.layers(machine)[1:] for job in step
    ]
    assert timed == list(CONTENDERS)
    assert timed[-1] == "flex"
