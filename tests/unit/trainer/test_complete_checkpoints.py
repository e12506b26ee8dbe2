"""Which checkpoint a start goes on from: whole, truncated, half-written, of plain verl, with a broken tracker."""

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from verl_tree.trainer.starts.checkpoints import (
    MARKER,
    TRACKER,
    choose_start,
    list_checkpoints,
    mark_complete,
    resume_from_complete,
    saving,
)

MODEL = "actor/model_world_size_1_rank_0.pt"
DISABLE = "trainer.resume_mode=disable"


def save(root: Path, step: int, *, is_marked: bool = True, tracked: bool = True) -> Path:
    """Write a checkpoint as verl does: the model, the data, the tracker; then the marker."""
    folder = root / f"global_step_{step}"
    (folder / "actor").mkdir(parents=True)
    torch.save({"weight": torch.arange(64)}, folder / MODEL)
    torch.save({"position": step}, folder / "data.pt")
    if tracked:
        (root / TRACKER).write_text(str(step))
    if is_marked:
        mark_complete(folder, step=step)
    return folder


def chosen(root: Path) -> tuple[int | None, tuple[str, ...]]:
    """Return the step that a start goes on from, and what it says of others."""
    start = choose_start(root)
    return None if start.checkpoint is None else start.checkpoint.step, start.skipped


def test_nothing_is_a_beginning(tmp_path: Path) -> None:
    assert chosen(tmp_path) == (None, ())
    assert chosen(tmp_path / "none") == (None, ())


def test_whole_checkpoints_are_what_the_tracker_says(tmp_path: Path) -> None:
    for step in (2, 4, 10):
        save(tmp_path, step)
    assert chosen(tmp_path) == (10, ())
    # A run that went on from 2 has saved 3: what is behind it is of another attempt.
    save(tmp_path, 3)
    assert chosen(tmp_path) == (3, ())


def test_a_truncated_checkpoint_is_named_and_the_one_before_is_taken(tmp_path: Path) -> None:
    save(tmp_path, 2)
    newest = save(tmp_path, 4)
    size = (newest / MODEL).stat().st_size
    os.truncate(newest / MODEL, size // 2)
    assert chosen(tmp_path) == (2, (f"{newest} is skipped: {MODEL} has {size // 2} bytes instead of {size}",))
    (newest / MODEL).unlink()
    assert chosen(tmp_path) == (2, (f"{newest} is skipped: {MODEL} is missing",))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"step": 4, "fil', "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("[4, {}]", "cannot be read"),
        ('{"files": {"data.pt": 1}}', "cannot be read"),
        ('{"step": 4}', "cannot be read"),
        ('{"step": 4, "files": [[1, 2]]}', "cannot be read"),
        (f'{{"step": 4, "files": {{"{"x" * 5_000}": 1}}}}', "cannot be read"),
        ('{"step": 4, "files": {}}', "names no files"),
        (b"\xff\xfe", "cannot be read"),
    ],
    ids=range(9),
)
def test_a_checkpoint_whose_marker_is_damaged_is_not_complete(tmp_path: Path, text: str | bytes, problem: str) -> None:
    save(tmp_path, 2)
    newest = save(tmp_path, 4)
    (newest / MARKER).write_bytes(text.encode() if isinstance(text, str) else text)
    assert chosen(tmp_path) == (2, (f"{newest} is skipped: its {MARKER} {problem}",))


def test_a_checkpoint_that_was_renamed_is_not_one_of_another_step(tmp_path: Path) -> None:
    save(tmp_path, 2)
    save(tmp_path, 4).rename(tmp_path / "global_step_6")
    (tmp_path / TRACKER).write_text("6")
    skipped = f"{tmp_path}/global_step_6 is skipped: its {MARKER} is that of step 4"
    assert chosen(tmp_path) == (2, (skipped,))


@pytest.mark.parametrize("tracked", [False, True], ids=["before the tracker", "after it"])
def test_a_checkpoint_that_was_not_finished_is_named_and_skipped(tmp_path: Path, tracked: bool) -> None:
    save(tmp_path, 2)
    half = save(tmp_path, 4, is_marked=False, tracked=tracked)
    assert chosen(tmp_path) == (2, (f"{half} is skipped: it has no {MARKER}, so it was not finished",))


def test_checkpoints_of_plain_verl_are_taken_as_its_tracker_says(tmp_path: Path) -> None:
    save(tmp_path, 2, is_marked=False)
    later = save(tmp_path, 4, is_marked=False, tracked=False)
    assert chosen(tmp_path) == (2, (f"{later} is skipped: {TRACKER} does not name it",))
    assert [each.is_marked for each in list_checkpoints(tmp_path)] == [False, False]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty"),
        ("abc", "holds 'abc', which is no step"),
        ("-2", "holds '-2', which is no step"),
        ("7", "names global_step_7, which is missing"),
    ],
)
def test_a_broken_tracker_stops_the_run_unless_a_complete_checkpoint_is_there(
    tmp_path: Path, text: str, problem: str
) -> None:
    """There verl fails without the file's name, or starts from the beginning, over the old run."""
    save(tmp_path, 2, is_marked=False)
    tracker = tmp_path / TRACKER
    tracker.write_text(text)
    with pytest.raises(ValueError, match=DISABLE) as error:
        choose_start(tmp_path)
    assert str(error.value).startswith(f"{tracker} {problem}; ")
    save(tmp_path, 4, tracked=False)
    assert chosen(tmp_path) == (4, (f"{tracker} {problem}",))


def test_where_no_checkpoint_is_complete_the_run_stops(tmp_path: Path) -> None:
    only = save(tmp_path, 2)
    (only / MODEL).unlink()
    with pytest.raises(ValueError, match=f"{MODEL} is missing; no complete checkpoint is left; .*{DISABLE}"):
        choose_start(tmp_path)


def test_verl_is_told_only_what_it_would_not_take_itself(tmp_path: Path) -> None:
    def told(mode: str = "auto") -> tuple[str, str | None]:
        trainer = {"default_local_dir": str(tmp_path), "resume_mode": mode, "resume_from_path": None}
        config = OmegaConf.create({"trainer": trainer})
        resume_from_complete(config)
        return config.trainer.resume_mode, config.trainer.resume_from_path

    assert told() == ("auto", None)
    first = save(tmp_path, 2)
    assert told() == ("auto", None)
    save(tmp_path, 4, is_marked=False)
    assert told() == ("resume_path", str(first))
    assert told("disable") == ("disable", None)
    (tmp_path / TRACKER).write_text("")
    assert told() == ("resume_path", str(first))
    (tmp_path / TRACKER).unlink()
    assert told() == ("resume_path", str(first))


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Make the system refuse larger files, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_save_that_fails_says_where_and_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path, 2)
    folder = tmp_path / "global_step_4"

    def save_too_much() -> None:
        with files_of_at_most(4096), saving(folder, step=4):
            folder.mkdir()
            torch.save({"weight": torch.zeros(100_000)}, folder / "model.pt")

    with pytest.raises(RuntimeError, match=r"step 4 was not saved: .*trainer\.default_local_dir") as error:
        save_too_much()
    assert f"The disk of {folder} had " in str(error.value)
    assert not folder.exists()
    assert chosen(tmp_path) == (2, ())


def test_a_saved_checkpoint_stays_when_something_later_fails(tmp_path: Path) -> None:
    """A callback of the user's comes after verl's tracker."""

    def save_and_upload() -> None:
        with saving(tmp_path / "global_step_4", step=4):
            save(tmp_path, 4)
            raise RuntimeError("upload failed")

    with pytest.raises(RuntimeError, match=r"^upload failed$"):
        save_and_upload()
    assert chosen(tmp_path) == (4, ())


def test_a_checkpoint_that_is_saved_again_and_fails_is_not_the_old_one(tmp_path: Path) -> None:
    """The tracker names it all the while."""
    save(tmp_path, 2)
    again = save(tmp_path, 4)
    with pytest.raises(RuntimeError, match="step 4 was not saved: disk full"), saving(again, step=4):
        raise RuntimeError("disk full")
    assert not again.exists()
    assert chosen(tmp_path) == (2, (f"{tmp_path}/{TRACKER} names global_step_4, which is missing",))


def test_what_a_crash_left_of_a_marker_is_no_file_of_the_checkpoint(tmp_path: Path) -> None:
    folder = save(tmp_path, 2)
    (folder / f".{MARKER}.unfinished").write_text("{")
    mark_complete(folder, step=2)
    assert sorted(json.loads((folder / MARKER).read_text())["files"]) == [MODEL, "data.pt"]
    assert chosen(tmp_path) == (2, ())


def test_a_checkpoint_that_is_saved_again_is_incomplete_meanwhile(tmp_path: Path) -> None:
    save(tmp_path, 2)
    again = save(tmp_path, 4)
    with saving(again, step=4):
        assert chosen(tmp_path)[0] == 2
        mark_complete(again, step=4)
    assert chosen(tmp_path) == (4, ())
