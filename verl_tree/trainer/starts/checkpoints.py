"""The checkpoints of a training run: which are complete, and which one a start goes on from.

verl writes a checkpoint's files one after another and its number into a tracker file last. That number says nothing of
a file that was cut short, and verl starts from the beginning where the tracker names a folder that is gone. So we add a
file to each checkpoint once all others are written: `complete.json`, with their sizes. A folder without it, beside
folders that have it, was never finished. Nothing is known of checkpoints that plain verl wrote: its tracker decides.

Only files of this machine are looked at: by `launch` before Ray starts, and again by the trainer where it runs.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

MARKER = "complete.json"
END_REQUEST = "end_after_this_step"
"""A file of this name in a run's folder ends the run after the step it is in, with a checkpoint."""
TRACKER = "latest_checkpointed_iteration.txt"
"""verl's name of its tracker file."""

_FOLDER = re.compile(r"global_step_(\d+)")
_REMEDY = "give a complete checkpoint (trainer.resume_mode=resume_path and trainer.resume_from_path), or set \
trainer.resume_mode=disable to start anew"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder `global_step_N`.

    Attributes:
        folder: Its absolute path.
        step: N.
        is_marked: Whether it has a marker.
        fault: Why no run can go on from it; None if nothing is known against it.
    """

    folder: Path
    step: int
    is_marked: bool
    fault: str | None


@dataclass(frozen=True, slots=True)
class Start:
    """What a start with `trainer.resume_mode=auto` goes on from.

    Attributes:
        checkpoint: The checkpoint; None starts from the beginning.
        skipped: Why newer ones are not taken, a line each.
    """

    checkpoint: Checkpoint | None
    skipped: tuple[str, ...] = ()


def mark_complete(folder: Path, *, step: int) -> None:
    """Write the marker of a checkpoint whose other files are all written; a crash leaves no half of it."""
    unfinished = folder / f".{MARKER}.unfinished"
    paths = [each for each in sorted(folder.rglob("*")) if each.is_file() and each not in (folder / MARKER, unfinished)]
    files = {str(each.relative_to(folder)): each.stat().st_size for each in paths}
    with unfinished.open("w") as file:
        json.dump({"step": step, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(folder / MARKER)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def list_checkpoints(root: Path) -> list[Checkpoint]:
    """Return the checkpoints in a run's folder by step; none where there is no such folder."""
    folders = {int(match[1]): path for path in root.glob("global_step_*") if (match := _FOLDER.fullmatch(path.name))}
    has_markers = any((folder / MARKER).is_file() for folder in folders.values())
    return [look_at(folders[step], among_marked=has_markers) for step in sorted(folders)]


def look_at(folder: Path, *, among_marked: bool) -> Checkpoint:
    """Compare a checkpoint with its marker; without one it has a fault if it is `among_marked` ones."""
    match = _FOLDER.fullmatch(folder.name)
    assert match is not None, folder
    step, is_marked = int(match[1]), (folder / MARKER).is_file()
    unmarked = f"it has no {MARKER}, so it was not finished" if among_marked else None
    return Checkpoint(folder.absolute(), step, is_marked, _damage(folder, step=step) if is_marked else unmarked)


def _damage(folder: Path, *, step: int) -> str | None:
    """Return what is wrong with a marked checkpoint: with its files, or with its marker."""
    try:
        marker = json.loads((folder / MARKER).read_text())
        if marker["step"] != step:
            return f"its {MARKER} is that of step {str(marker['step'])[:40]}"
        if not marker["files"]:
            return f"its {MARKER} names no files"
        for name, num_bytes in marker["files"].items():
            file = folder / name
            if not file.is_file():
                return f"{name} is missing"
            if (size := file.stat().st_size) != num_bytes:
                return f"{name} has {size} bytes instead of {num_bytes}"
    # A damaged marker may have anything: no object, names of no possible file, brackets without end.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"its {MARKER} cannot be read"
    return None


def read_tracker(root: Path) -> int | None:
    """Return the step that verl's tracker file names, None if there is no such file.

    Raises:
        ValueError: The file names no step.
    """
    tracker = root / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text(errors="replace").strip()
    if not re.fullmatch(r"[0-9]+", text):
        raise ValueError(f"{tracker} {f'holds {text[:40]!r}, which is no step' if text else 'is empty'}")
    return int(text)


def choose_start(root: Path) -> Start:
    """Return what a start with `trainer.resume_mode=auto` goes on from, given the folder of a run.

    That is what verl's tracker names, unless it is not complete: then the newest complete one before it.

    Raises:
        ValueError: verl would start from the beginning, over a run that is there, or fail; the message has the remedy.
    """
    checkpoints = list_checkpoints(root)
    try:
        latest, problem = read_tracker(root), None
    except ValueError as error:
        latest, problem = None, str(error)
    if latest is not None and not any(each.step == latest for each in checkpoints):
        problem = f"{root / TRACKER} names global_step_{latest}, which is missing"
    if not any(each.is_marked for each in checkpoints):
        if problem is not None:
            raise ValueError(f"{problem}; {_REMEDY}")
        named = next((each for each in checkpoints if each.step == latest), None)
        return Start(named, _skipped(checkpoints, after=named))

    usable = [each for each in checkpoints if each.fault is None and (latest is None or each.step <= latest)]
    chosen = usable[-1] if usable else None
    skipped = (*([problem] if problem else []), *_skipped(checkpoints, after=chosen))
    if chosen is None:
        raise ValueError("; ".join([*skipped, "no complete checkpoint is left", _REMEDY]))
    return Start(chosen, skipped)


def _skipped(checkpoints: list[Checkpoint], *, after: Checkpoint | None) -> tuple[str, ...]:
    """Return why the checkpoints after the chosen one are not taken; a complete one there is of another attempt."""
    later = [each for each in checkpoints if after is None or each.step > after.step]
    reasons = [(each, each.fault or ("" if each.is_marked else f"{TRACKER} does not name it")) for each in later]
    return tuple(f"{each.folder} is skipped: {reason}" for each, reason in reasons if reason)


def folder_of(config: DictConfig) -> Path:
    """Return the absolute folder of a run's checkpoints."""
    return Path(config.trainer.default_local_dir).absolute()


def resume_from_complete(config: DictConfig) -> None:
    """Name the checkpoint to resume from in the configuration, if it is not the one that verl would take.

    Raises:
        ValueError: There are checkpoints, but none to go on from.
    """
    trainer = config.trainer
    if trainer.resume_mode != "auto":
        return
    root = folder_of(config)
    chosen = choose_start(root).checkpoint
    if chosen is not None and (not (root / TRACKER).is_file() or chosen.step != _tracked(root)):
        trainer.resume_mode, trainer.resume_from_path = "resume_path", str(chosen.folder)


def _tracked(root: Path) -> int | None:
    """Return the step that the tracker names, None if it names none."""
    try:
        return read_tracker(root)
    except ValueError:
        return None


def _time_of(file: Path) -> int | None:
    """Return when a file was last written, in nanoseconds; None if there is none."""
    return file.stat().st_mtime_ns if file.is_file() else None


@contextmanager
def saving(folder: Path, *, step: int) -> Iterator[None]:
    """Say where a checkpoint could not be saved, which the body does, and remove what there is of it.

    What is left of a checkpoint would keep a full disk full. Until the body ends, the folder has no marker.

    Raises:
        RuntimeError: The checkpoint was not saved; the message has the folder, its free bytes and the remedy.
    """
    (folder / MARKER).unlink(missing_ok=True)
    before = _time_of(folder.parent / TRACKER)
    try:
        yield
    except (OSError, RuntimeError) as error:
        if _tracked(folder.parent) == step and _time_of(folder.parent / TRACKER) != before:
            raise  # verl had saved it; what failed came later.
        existing = next(each for each in (folder, *folder.parents) if each.exists())
        num_free = shutil.disk_usage(existing).free
        shutil.rmtree(folder, ignore_errors=True)
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise RuntimeError(
            f"the checkpoint of step {step} was not saved: {reason}. The disk of {folder} had {num_free} bytes free; "
            "what there was of it is removed. Make room there, or give another trainer.default_local_dir"
        ) from error
