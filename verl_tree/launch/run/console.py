"""The driver's standard streams during a training run: everything goes to a log, what is for people to the terminal.

Ray's thread prints what the other processes write to the driver's `sys.stdout` and `sys.stderr`, so streams in their
place see every line of the training run. `lines` says which of them are for people (`tree.console=steps`). Nothing is
imported here that takes time: the first line is on the terminal before anything that does.
"""

import io
import shutil
import sys
import threading
import time
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, TextIO, cast

from typing_extensions import override

from verl_tree import __version__
from verl_tree.launch.run.lines import GENERATING, TRAINING, LineFilter, find_milestone, for_people, without_colours

STILL_S = 30.0
"""So often a start says what it is still doing: an engine takes minutes to start, and silence looks like a hang."""


def announce(doing: str) -> None:
    """Say the version and what begins, before the imports that take seconds."""
    # What a command prints on request (`--cfg job`) goes to the standard output alone.
    print(f"verl_tree {__version__}: {doing}", file=sys.stderr, flush=True)


class Console:
    """A context in which the process's standard streams are watched; it ends with the path of the log.

    What the process says behind that, because of a SystemExit of the body, is in the log, too.

    Everything passes until `is_brief` is set. What comes before `record` is kept for the log. A log that cannot be
    written is missed, and everything passes instead.
    """

    def __init__(self) -> None:
        self.is_brief = False
        self.log_path: Path | None = None
        self._log: TextIO | None = None
        self._kept: list[str] | None = []
        self._lock = threading.RLock()
        self._stack = ExitStack()
        self._terminal = sys.stdout
        self._started_at = self._reached_at = time.monotonic()
        self._doing = ""
        self._ended = threading.Event()
        self._is_in_place = False

    def __enter__(self) -> Self:
        """Take the place of the standard streams."""
        self._terminal = sys.stdout
        for redirect, terminal in ((redirect_stdout, sys.stdout), (redirect_stderr, sys.stderr)):
            stream = _Stream(self, terminal)
            self._stack.enter_context(redirect(cast(TextIO, stream)))
            self._stack.callback(stream.finish)
        threading.Thread(target=self._say_still, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Give the streams back, close the log and say where it is."""
        self._ended.set()
        self._stack.close()
        self._clear(self._terminal)
        if isinstance(error, SystemExit) and isinstance(error.code, str):
            for line in error.code.splitlines():
                self.keep(line)
        with self._lock:
            self.is_brief, self._kept = False, None
            if self._log is not None:
                self._log.close()
                self._log = None
        if self.log_path is not None:
            print(f"log: {self.log_path}", flush=True)

    def record(self, path: Path) -> None:
        """Write what was printed and will be printed to a file; its folder is made."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            log = path.open("w", encoding="utf-8", errors="backslashreplace", buffering=1)
        except OSError as error:
            self._miss(path, error)
            return
        with self._lock:
            self._log, self.log_path = log, path
            kept, self._kept = self._kept or [], None
        for line in kept:
            self.keep(line)
        hidden = "; the lines below are for people (tree.console=all shows all)" if self.is_brief else ""
        print(f"log: {path}{hidden}", flush=True)

    def reached(self, done: str, *, doing: str) -> None:
        """Print what has been done since the last call, in how many seconds, and what begins."""
        print(self.milestone(done, doing=doing), flush=True)

    def milestone(self, done: str, *, doing: str) -> str:
        """Return the line of `reached`."""
        now = time.monotonic()
        took_s, self._reached_at, self._doing = now - self._reached_at, now, doing
        if doing == TRAINING:
            self._ended.set()
        return f"start {now - self._started_at:5.1f} s: {done} ({took_s:.1f} s); {doing}"

    def _say_still(self) -> None:
        """Say what the start is doing whenever nothing was reached for a while, until it trains."""
        while not self._ended.wait(STILL_S):
            now = time.monotonic()
            if self.is_brief and now - self._reached_at >= STILL_S:
                waited = f"still {self._doing} ({now - self._reached_at:.0f} s)"
                self._terminal.write(f"start {now - self._started_at:5.1f} s: {waited}\n")
                self._terminal.flush()

    def show(self, line: str, *, terminal: TextIO) -> None:
        """Write a line to a terminal; one that is told again and again is replaced by the next."""
        with self._lock:
            self._clear(terminal)
            self._is_in_place = line.startswith(GENERATING) and terminal.isatty()
            # A line that wraps could not be replaced.
            width = shutil.get_terminal_size().columns - 1
            terminal.write(line[:width] if self._is_in_place else f"{line}\n")
            terminal.flush()

    def _clear(self, terminal: TextIO) -> None:
        if self._is_in_place:
            terminal.write("\r\x1b[K")
        self._is_in_place = False

    def keep(self, line: str) -> None:
        """Write one line to the log, or keep it until there is one."""
        with self._lock:
            if self._kept is not None:
                self._kept.append(line)
            elif self._log is not None:
                try:
                    self._log.write(f"{line}\n")
                except OSError as error:
                    path, self._log, self.log_path = self.log_path, None, None
                    self._miss(path, error)

    def _miss(self, path: Path | None, error: OSError) -> None:
        self.is_brief, self._kept = False, None
        self._terminal.write(
            f"{path}: not written ({error}); training goes on without a log, and everything is shown here. To have it "
            "elsewhere, set trainer.default_local_dir\n"
        )
        self._terminal.flush()


class _Begun(threading.local):
    """What a thread has written of a line; `print` writes its end in a call of its own, and Ray has a thread."""

    text = ""


class _Stream(io.TextIOBase):
    """A standard stream of the console: whole lines to the log, what is for people to the terminal's stream."""

    def __init__(self, console: Console, terminal: TextIO) -> None:
        self._console = console
        self._terminal = terminal
        self._filter = LineFilter()
        self._begun = _Begun()

    @override
    def write(self, text: str, /) -> int:
        if not self._console.is_brief:
            self._terminal.write(text)
        *lines, self._begun.text = (self._begun.text + text).split("\n")
        for line in lines:
            self._take(line)
        return len(text)

    def _take(self, line: str) -> None:
        plain = without_colours(line)
        is_shown, was_brief = self._filter.shows(plain), self._console.is_brief
        self._console.keep(plain)
        if not was_brief:
            return
        if milestone := find_milestone(plain):
            plain, is_shown = self._console.milestone(milestone[0], doing=milestone[1]), True
        if is_shown or not self._console.is_brief:  # the log may just have failed
            self._console.show(for_people(plain), terminal=self._terminal)

    def finish(self) -> None:
        """Take what this thread has not ended with a new line."""
        if self._begun.text:
            self.write("\n")

    @override
    def flush(self) -> None:
        self._terminal.flush()

    @override
    def writable(self) -> bool:
        return True

    @override
    def isatty(self) -> bool:
        return self._terminal.isatty()

    @override
    def fileno(self) -> int:
        return self._terminal.fileno()

    @property
    @override
    def encoding(self) -> str:  # type: ignore[override]
        """The terminal's encoding."""
        return self._terminal.encoding

    @property
    def buffer(self) -> BinaryIO:
        """The terminal's bytes, for those who print such; the log does not have them."""
        return self._terminal.buffer
