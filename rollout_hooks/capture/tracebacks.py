"""Where in the user's own code an error came from: its traceback without the frames of libraries. And where it waits.

Unlike Python's, it begins with the error that was raised last, and goes on with those that caused it.
"""

import asyncio
import inspect
import re
import sysconfig
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType

from ray.exceptions import RayTaskError

from rollout_hooks.capture.errors import describe_error, errors_inside
from rollout_hooks.capture.outputs import SessionFailed

MAX_LEN = 4000
"""Most characters of a traceback, whose end is cut off."""

_MAX_FRAMES = 8  # of one error: those nearest to where it was raised
_MAX_CAUSES = 4  # errors behind one another
_MAX_IN_GROUP = 3  # errors of an exception group
_MAX_LINE = 200  # characters of source text, or of a cause
_LIBRARIES = (Path(__file__).parents[1], Path(sysconfig.get_path("stdlib")))
_INSTALLED = {"site-packages", "dist-packages"}
_REMOTE_FRAME = re.compile(r'^ *File "(.+?)", line (\d+), in (.+)$', re.MULTILINE)


def user_traceback(error: BaseException) -> str:
    """Return the user's frames of an error and of those that caused it, at most `MAX_LEN` characters.

    The frame that raised is there, too, whoever wrote it. A session that failed without an error has none.
    """
    text = "\n".join(_lines(_behind(error), num_causes=_MAX_CAUSES))
    return text if len(text) <= MAX_LEN else f"{text[: MAX_LEN - 4]}\n..."


def raised_at(error: BaseException) -> str:
    """Return the user's last frame of an error as `file:line`, else the one that raised; empty if it has none."""
    error = _behind(error)
    frames = _frames(error)
    mine = [frame for frame in frames if _is_users(frame)]
    if not mine and isinstance(error, BaseExceptionGroup):
        # Which of them came first is chance.
        return min(raised_at(each) for each in errors_inside(error))
    mine = mine or frames
    return f"{mine[-1].filename}:{mine[-1].lineno}" if mine else ""


def waiting_places(tasks: Iterable[asyncio.Task[object]]) -> Counter[str]:
    """Count the tasks that wait at a line of the user's, the last one of each, by `file:line`."""
    lines = [[frame for frame in _awaiting(task) if _is_users(frame)] for task in tasks]
    return Counter(f"{frames[-1].filename}:{frames[-1].lineno}" for frames in lines if frames)


def running_place(frame: FrameType) -> str:
    """Return the user's line at which a thread is, as `file:line`; empty if it runs code of libraries only."""
    mine = [each for each in traceback.extract_stack(frame) if _is_users(each)]
    return f"{mine[-1].filename}:{mine[-1].lineno}" if mine else ""


def _awaiting(task: asyncio.Task[object]) -> Iterator[traceback.FrameSummary]:
    """Yield the frames of a task that waits, the outermost first; asyncio itself knows the outermost only."""
    awaited: object = task.get_coro()
    while inspect.iscoroutine(awaited) and awaited.cr_frame is not None:
        code = awaited.cr_code
        yield traceback.FrameSummary(code.co_filename, awaited.cr_frame.f_lineno, code.co_name, lookup_line=False)
        awaited = awaited.cr_await


def _behind(error: BaseException) -> BaseException:
    # Our loops raise a SessionFailed that says the same as the agent's error behind it.
    return error.__cause__ if isinstance(error, SessionFailed) and error.__cause__ is not None else error


def _lines(error: BaseException, *, num_causes: int) -> list[str]:
    lines = []
    for frame in _kept(error):
        lines.append(f'File "{frame.filename}", line {frame.lineno}, in {frame.name}')
        if frame.line:
            lines.append(f"  {frame.line[:_MAX_LINE]}")
    for relation, other in _others(error) if num_causes else ():
        lines.append(f"{relation} {' '.join(describe_error(other).split())[:_MAX_LINE]}")
        lines += _lines(other, num_causes=num_causes - 1)
    return lines


def _others(error: BaseException) -> Iterator[tuple[str, BaseException]]:
    """Yield the errors inside a group, and the one that caused this one or was being handled."""
    if isinstance(error, BaseExceptionGroup):
        # Several that were raised at one place, and say the same, tell no more than one.
        distinct = {(describe_error(inner), raised_at(inner)): inner for inner in reversed(error.exceptions)}
        yield from (("in the group:", distinct[key]) for key in sorted(distinct)[:_MAX_IN_GROUP])
    if error.__cause__ is not None:
        yield "caused by", error.__cause__
    elif error.__context__ is not None and not error.__suppress_context__:
        yield "while handling", error.__context__


def _kept(error: BaseException) -> list[traceback.FrameSummary]:
    frames = _frames(error)
    kept = [frame for frame in frames if _is_users(frame)][-_MAX_FRAMES:]
    # Nothing is to be found where our loops raise a SessionFailed, or asyncio a group.
    if frames and frames[-1] not in kept and not isinstance(error, SessionFailed | BaseExceptionGroup):
        kept.append(frames[-1])
    return kept


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    if isinstance(error, RayTaskError):
        # An actor's frames are known as text only, such as those of a reward function.
        matches = _REMOTE_FRAME.findall(str(error))
        return [traceback.FrameSummary(file, int(line), name) for file, line, name in matches]
    return list(traceback.extract_tb(error.__traceback__))


def _is_users(frame: traceback.FrameSummary) -> bool:
    path = Path(frame.filename)
    is_installed = _INSTALLED & set(path.parts) or any(path.is_relative_to(folder) for folder in _LIBRARIES)
    return not is_installed and not frame.filename.startswith("<")
