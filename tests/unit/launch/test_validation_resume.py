"""Checks of what earlier starts left."""

import logging
import os
import subprocess
import time
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest
from input_cases import refusal, resolved

pytest.importorskip("verl")

from verl_tree.launch.checks import resume
from verl_tree.launch.checks.refusals import settle
from verl_tree.launch.checks.resume import CHECKS, find_leftovers
from verl_tree.trainer.starts.checkpoints import TRACKER, mark_complete
from verl_tree.trainer.starts.tree_folder import take_over


def save(root: Path, step: int, *, is_marked: bool = True) -> Path:
    folder = root / f"global_step_{step}"
    folder.mkdir(parents=True)
    (folder / "data.pt").write_text("0123456789")
    (root / TRACKER).write_text(str(step))
    if is_marked:
        mark_complete(folder, step=step)
    return folder


def warnings_of(caplog: pytest.LogCaptureFixture, *overrides: str) -> list[str]:
    """Return what the checks warn of."""
    with caplog.at_level(logging.WARNING):
        config = resolved(*overrides)
        settle(finding for check in CHECKS for finding in check(config))
    return [record.getMessage() for record in caplog.records]


def test_whole_checkpoints_are_nothing_to_speak_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = f"trainer.default_local_dir={tmp_path}"
    assert warnings_of(caplog, key) == []
    newest = save(tmp_path, 4)
    assert warnings_of(caplog, key) == []
    path = f"trainer.resume_from_path={newest}"
    assert warnings_of(caplog, key, "trainer.resume_mode=resume_path", path) == []


def test_a_damaged_checkpoint_is_said_with_what_is_taken_instead(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, newest = save(tmp_path, 2), save(tmp_path, 4)
    os.truncate(newest / "data.pt", 3)
    assert warnings_of(caplog, f"trainer.default_local_dir={tmp_path}") == [
        f"{newest} is skipped: data.pt has 3 bytes instead of 10",
        f"the run goes on from {first}",
    ]
    assert f"trainer.resume_from_path={newest}: data.pt has 3 bytes instead of 10; give" in refusal(
        "trainer.resume_mode=resume_path", f"trainer.resume_from_path={newest}"
    )


def test_a_checkpoint_of_plain_verl_is_said_to_be_unchecked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save(tmp_path, 2, is_marked=False)
    (warning,) = warnings_of(caplog, f"trainer.default_local_dir={tmp_path}")
    assert warning.startswith(f"the run goes on from {folder}: it has no complete.json")


def test_a_tracker_that_names_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("7")
    message = refusal(f"trainer.default_local_dir={tmp_path}")
    assert message.startswith(f"trainer.default_local_dir={tmp_path}: {tmp_path}/{TRACKER} names global_step_7, which")
    assert "trainer.resume_mode=disable" in message


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("null", "needs the folder of a checkpoint"),
        ("{root}/global_step_3", "no such folder; checkpoints in {root}: global_step_2"),
        ("{root}/global_step_2/", "without a / at its end"),
        ("{root}", "give a folder global_step_N"),
    ],
)
def test_a_path_that_is_no_checkpoint_is_refused(tmp_path: Path, path: str, problem: str) -> None:
    save(tmp_path, 2)
    key = f"trainer.resume_from_path={path.format(root=tmp_path)}"
    assert problem.format(root=tmp_path) in refusal("trainer.resume_mode=resume_path", key)


def test_a_folder_of_another_runs_trees_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = [f"tree.dump_dir={tmp_path}/trees", f"trainer.default_local_dir={tmp_path}/first"]
    take_over(tmp_path / "trees", config=resolved(*first), last_step=0)
    assert warnings_of(caplog, *first) == []
    second = [first[0], f"trainer.default_local_dir={tmp_path}/second"]
    message = refusal(*second)
    assert message.startswith(f"tree.dump_dir={tmp_path}/trees: another run writes there (project ")
    assert f"checkpoints {tmp_path}/first" in message


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[tuple[subprocess.Popen, subprocess.Popen]]:
    """Start a process with the title of one of Ray's, and one whose parent is called raylet."""
    (tmp_path / "raylet").symlink_to("/bin/bash")
    orphan = subprocess.Popen(["bash", "-c", "exec -a ray::DashboardAgent sleep 60"])
    raylet = subprocess.Popen([tmp_path / "raylet", "-c", "bash -c 'exec -a ray::IDLE sleep 60' & wait"])
    yield orphan, raylet
    for each in [orphan, raylet, *psutil.Process(raylet.pid).children(recursive=True)]:
        each.kill()
    orphan.wait()
    raylet.wait()


def test_processes_of_a_dead_cluster_are_named(
    processes: tuple[subprocess.Popen, subprocess.Popen], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "ENDING_S", 0.3)
    orphan, raylet = processes
    for number in range(200):
        children = psutil.Process(raylet.pid).children(recursive=True)
        # A process that is being replaced has no command line.
        titles = [each.cmdline()[:1] for each in (psutil.Process(orphan.pid), *children)]
        if titles == [["ray::DashboardAgent"], ["ray::IDLE"]]:
            break
        assert number < 199, titles
        psutil.Process().cpu_percent(interval=0.05)
    (finding,) = [finding for finding in find_leftovers() if "processes" in finding.message]
    assert finding.is_warning
    assert f"ray::DashboardAgent (pid {orphan.pid})" in finding.message
    assert str(orphan.pid) in finding.message.split("kill ")[1].split()
    assert f"(pid {children[0].pid})" not in finding.message


def test_processes_that_end_by_themselves_are_not_named() -> None:
    ending = subprocess.Popen(["bash", "-c", "exec -a ray::Ending sleep 1"])
    while psutil.Process(ending.pid).cmdline()[:1] != ["ray::Ending"]:
        time.sleep(0.01)
    assert all("ray::Ending" not in finding.message for finding in find_leftovers())
    assert ending.wait() == 0


def test_shared_memory_of_a_killed_run_is_named_and_that_of_a_living_one_is_not() -> None:
    name = f"verl_weights_test_{os.getpid()}"
    segment = SharedMemory(name=name, create=True, size=2**20)
    try:
        segment.buf[:] = b"1" * 2**20
        assert all(name not in finding.message for finding in find_leftovers())
        segment.close()  # this process maps it no more
        (finding,) = [finding for finding in find_leftovers() if name in finding.message]
        assert finding.is_warning
        assert f"/dev/shm/{name}" in finding.message.split(" MiB: rm ")[1].split()
    finally:
        segment.unlink()
