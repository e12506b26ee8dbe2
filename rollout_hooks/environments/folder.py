"""A folder as an environment: every snapshot and every fork is a folder of its own.

`cp --reflink=auto` makes them: where the file system shares blocks until they are written (Btrfs, XFS), without reading
the files. Hard links would be as fast everywhere, but a file that is edited in place would change in every branch.
"""

import fcntl
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from uuid import uuid4

from rollout_hooks.environments.base import CopiedEnvironment


class FolderEnvironment(CopiedEnvironment[Path]):
    """A copy of a folder, at `state`: tools read and write there, and nowhere else.

    Args:
        source: The folder to begin with, which is not touched.
        max_bytes: Most bytes of this folder with all its snapshots and forks, as each was when it was copied.
        root: Where the copies lie. By default in the folder for temporary files.

    Raises (`snapshot` and `fork`, too):
        ValueError: There is no such folder, `max_bytes` would be exceeded, or the copy cannot be made (a full disk).
    """

    def __init__(self, source: Path, *, max_bytes: int = 2**30, root: Path | None = None) -> None:
        self._max_bytes, self._folder = max_bytes, process_folder(root)
        self._sizes: dict[Path, int] = {}  # Bytes of all copies
        super().__init__(self._copy_folder(source), copy=self._copy_folder, free=self._remove)

    def _copy_folder(self, source: Path) -> Path:
        size = sum(os.lstat(Path(folder, name)).st_size for folder, _, names in os.walk(source) for name in names)
        kept = sum(list(self._sizes.values()))  # a list: other threads copy, too
        if kept + size > self._max_bytes:
            raise ValueError(
                f"max_bytes={self._max_bytes}: copies of {kept} bytes are there, and one of {size} would exceed it; "
                "raise max_bytes, or keep what is large and never written outside the folder"
            )
        copy = self._folder / uuid4().hex
        self._sizes[copy] = size
        done = subprocess.run(["cp", "-a", "--reflink=auto", "--", f"{source}/.", copy], capture_output=True, text=True)
        if done.returncode:
            self._remove(copy)
            raise ValueError(f"{source}: it cannot be copied: {done.stderr.strip()}")
        return copy

    def _remove(self, copy: Path) -> None:
        _remove(copy)
        del self._sizes[copy]


@cache
def process_folder(root: Path | None) -> Path:
    """Return the folder of this process, in one that the processes of a machine share.

    It first removes the folders of dead processes. A process holds its folder locked, and whatever ends it, the kernel
    opens the lock; its number could by then be another's.
    """
    root = root or Path(tempfile.gettempdir(), f"rollout_environments_{os.getuid()}")
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = _lock(root)  # nobody may find a folder before it is locked
    for folder in root.iterdir():
        with suppress(BlockingIOError):
            os.close(_lock(folder, fcntl.LOCK_NB))
            _remove(folder)
    mine = Path(tempfile.mkdtemp(dir=root))
    _lock(mine)  # never closed, and not inherited by programs that this process starts
    os.close(descriptor)
    return mine


def _lock(folder: Path, flags: int = 0) -> int:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
    except BlockingIOError:
        os.close(descriptor)
        raise
    return descriptor


def _remove(folder: Path) -> None:
    for inside, _, _ in os.walk(folder):
        Path(inside).chmod(0o700)  # package managers make folders read-only
    shutil.rmtree(folder, ignore_errors=True)
