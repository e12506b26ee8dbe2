"""A folder as an environment: every snapshot and every fork is a folder of its own.

`cp --reflink=auto` makes them. Where the file system shares blocks until they are written (Btrfs, XFS), a copy takes as
long as its files are many; elsewhere it takes their bytes, too. Hard links would be as fast everywhere, but a file that
is edited in place would then change in every branch, and root may edit what is read-only.
"""

import os
import subprocess
from pathlib import Path
from uuid import uuid4

from typing_extensions import override

from rollout_hooks.environments.base import AdaptedEnvironment
from rollout_hooks.environments.leftovers import process_folder, remove


class FolderEnvironment(AdaptedEnvironment[Path]):
    """A copy of a folder, at `state`: tools read and write there, and nowhere else.

    Args:
        source: The folder to begin with, which is not touched.
        max_bytes: Most bytes of this folder with all its snapshots and forks, as each was when it was copied. Blocks
            that the file system shares count each time.
        root: Where the copies lie. By default in the folder for temporary files.

    Raises:
        ValueError: There is no such folder, or it is larger than `max_bytes`; in `snapshot` and `fork`, the copies
            would be, or cannot be made (a full disk).
    """

    def __init__(self, source: Path, *, max_bytes: int = 2**30, root: Path | None = None) -> None:
        self.max_bytes = max_bytes
        self._folder = process_folder(root)
        self._sizes: dict[Path, int] = {}  # Bytes of all copies
        super().__init__(self.copy_state(source))

    @override
    def copy_state(self, state: Path) -> Path:
        if not state.is_dir():
            raise ValueError(f"{state}: no such folder")
        size = sum(os.lstat(Path(folder, name)).st_size for folder, _, names in os.walk(state) for name in names)
        num_bytes = sum(list(self._sizes.values()))  # a list: other threads copy, too
        if num_bytes + size > self.max_bytes:
            raise ValueError(
                f"max_bytes={self.max_bytes}: copies of {num_bytes} bytes are there, and one of {size} would exceed "
                "it; raise max_bytes, or keep what is large and never written outside the folder"
            )
        copy = self._folder / uuid4().hex
        self._sizes[copy] = size
        done = subprocess.run(["cp", "-a", "--reflink=auto", "--", state, copy], capture_output=True, text=True)
        if done.returncode:
            self.free_state(copy)
            raise ValueError(f"{state}: it cannot be copied: {done.stderr.strip()}")
        return copy

    @override
    def free_state(self, state: Path) -> None:
        remove(state)
        del self._sizes[state]
