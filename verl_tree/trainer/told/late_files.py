"""Writes files in a thread beside training, so that a slow folder holds nothing up.

Files are for people. One that cannot be written is missed, with a warning, and training goes on.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

MAX_WAITING = 4
"""Files that wait for one that is being written: they are kept in memory."""
WAIT_S = 30.0
"""Longest time for which anybody waits for files."""


@dataclass(frozen=True, slots=True)
class LateFile:
    """A file, or several in one folder, to be written by `write`."""

    path: Path
    write: Callable[[], object]
    remedy: str
    """What the user does if it cannot be written."""


class LateFiles:
    """Files of one training run, which are written one after another.

    A `ThreadPoolExecutor`, as verl has for its own files, would let the end of the process wait for a disk that hangs.
    """

    def __init__(self) -> None:
        self._files: deque[LateFile] = deque()  # the first one is being written
        self._changed = threading.Condition()
        self._started_s = 0.0
        self._hanging: LateFile | None = None

    def add(self, file: LateFile) -> None:
        """Write a file soon. It is missed if `MAX_WAITING` others wait already."""
        with self._changed:
            if len(self._files) > MAX_WAITING:
                first = self._files[0].path
                _miss(file, f"{first} is being written for {time.monotonic() - self._started_s:.0f} s")
                return
            self._files.append(file)
            if len(self._files) == 1:
                self._started_s = time.monotonic()
                threading.Thread(target=self._write_all, name="late files", daemon=True).start()

    def wait(self, timeout_s: float = WAIT_S) -> None:
        """Wait until all files are written. Say which ones are not after `timeout_s`; do not wait for those again."""
        with self._changed:
            if self._files and self._files[0] is self._hanging:
                return
            if self._changed.wait_for(lambda: not self._files, timeout_s):
                return
            self._hanging = self._files[0]
            names = ", ".join(str(file.path) for file in self._files)
            logger.warning(
                "%s: not written yet after %.0f s; training goes on and does not wait for it. To stop this, %s",
                names,
                timeout_s,
                self._hanging.remedy,
            )

    def _write_all(self) -> None:
        while True:
            file = self._files[0]
            try:
                file.write()
            except OSError as error:
                _miss(file, str(error))
            except Exception:
                logger.exception("%s: not written, by a fault of the program; training goes on without it", file.path)
            with self._changed:
                self._files.popleft()
                self._changed.notify_all()
                if not self._files:
                    return
                self._started_s = time.monotonic()


def _miss(file: LateFile, reason: str) -> None:
    logger.warning(
        "%s: not written (%s); training goes on without it. To stop this, %s", file.path, reason, file.remedy
    )
