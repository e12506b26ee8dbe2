"""A folder for what a process keeps on disk. What a process left that died is removed by the next one that starts.

Each process has a folder and, beside it, a file that it holds locked: the kernel opens the lock when the process ends,
whatever ended it. A process number could by then be another's; a lock cannot.
"""

import atexit
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_folders: dict[tuple[Path, int], Path] = {}
"""The folders of this process, by the folder that they are in; with its number, as a forked one has none yet."""


def process_folder(root: Path | None = None) -> Path:
    """Return the folder of this process inside `root`, which the processes of one machine share.

    The first call removes what dead processes left there. By default `root` is in the folder for temporary files.
    """
    root = Path(tempfile.gettempdir(), f"rollout_environments_{os.getuid()}") if root is None else root.resolve()
    key = root, os.getpid()
    if key not in _folders:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(root / "lock"):  # nobody may find a folder before it is locked
            _remove_leftovers(root)
            folder = Path(tempfile.mkdtemp(dir=root))
            _hold(folder.with_suffix(".lock"))
        _folders[key] = folder
        atexit.register(_remove_at_exit, folder, os.getpid())
    return _folders[key]


def remove(folder: Path) -> None:
    """Remove a folder, with folders in it that are read-only, as package managers make them."""
    for inside, _, _ in os.walk(folder):
        Path(inside).chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers(root: Path) -> None:
    for lock in root.glob("*.lock"):
        descriptor = os.open(lock, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            remove(lock.with_suffix(""))
            lock.unlink()
        finally:
            os.close(descriptor)


def _hold(lock: Path) -> None:
    # Never closed: the kernel does it when the process ends. Programs that it starts do not inherit it.
    fcntl.flock(os.open(lock, os.O_RDWR | os.O_CREAT, 0o600), fcntl.LOCK_EX)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_at_exit(folder: Path, pid: int) -> None:
    if os.getpid() == pid:
        with _locked(folder.parent / "lock"):
            remove(folder)
            folder.with_suffix(".lock").unlink(missing_ok=True)
