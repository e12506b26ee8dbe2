"""A folder that is slow, or hangs, holds nothing up; what is not written is named."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from verl_tree.trainer.told.late_files import MAX_WAITING, LateFile, LateFiles


def late(path: Path, write: Callable[[], object]) -> LateFile:
    return LateFile(path, write, remedy="set another folder")


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """Return a file that nobody can write while nobody reads it, as on a disk that hangs."""
    path = tmp_path / "step_1"
    os.mkfifo(path)
    return path


def test_what_waits_for_a_disk_that_hangs_is_written_when_it_goes_on(
    tmp_path: Path, pipe: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files, written = LateFiles(), []
    files.add(late(pipe, lambda: pipe.write_text("first")))
    for number in range(2, MAX_WAITING + 3):
        files.add(late(tmp_path / f"step_{number}", lambda number=number: written.append(number)))
    assert written == []
    (missed,) = caplog.messages
    assert missed.startswith(f"{tmp_path}/step_{MAX_WAITING + 2}: not written ({pipe} is being written for ")
    assert missed.endswith("; training goes on without it. To stop this, set another folder")

    assert pipe.read_text() == "first"
    files.wait()
    assert written == list(range(2, MAX_WAITING + 2))
    assert len(caplog.messages) == 1


def test_nobody_waits_twice_for_a_disk_that_hangs(tmp_path: Path, pipe: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = LateFiles()
    files.add(late(pipe, lambda: pipe.write_text("first")))
    files.add(late(tmp_path / "step_2", lambda: None))
    files.wait(0.05)
    files.wait(1000.0)
    (message,) = caplog.messages
    assert message == (
        f"{pipe}, {tmp_path}/step_2: not written yet after 0 s; training goes on and does not wait for it. To stop "
        "this, set another folder"
    )
    pipe.read_text()


def test_a_fault_of_the_program_ends_neither_training_nor_the_next_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files, written = LateFiles(), []
    for number in range(3):
        files.add(late(tmp_path / f"step_{number}", lambda number=number: written.append(1 / number)))
    files.wait()
    assert written == [1.0, 0.5]
    assert "ZeroDivisionError" in caplog.text
    assert f"{tmp_path}/step_0: not written, by a fault of the program" in caplog.text
