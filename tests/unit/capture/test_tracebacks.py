"""A traceback shows the user's own frames, whoever called them and whatever wraps the error."""

import asyncio
import importlib.util
import json
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from rollout_hooks.capture.errors import describe_error
from rollout_hooks.capture.outputs import SessionFailed
from rollout_hooks.capture.tracebacks import MAX_LEN, raised_at, user_traceback, waiting_places

AGENTS = """\
import asyncio
import json


def look_up(table):
    return table["plan"]


async def solve(table):
    try:
        look_up(table)
    except KeyError as error:
        raise RuntimeError("cannot plan") from error


async def parse(text):
    return json.loads(text)


async def several(tables):
    async with asyncio.TaskGroup() as tasks:
        for table in tables:
            tasks.create_task(solve(table))


async def deep(level):
    if level:
        return await deep(level - 1), "LONG"
    return look_up({})


async def again(times):
    try:
        if times:
            await again(times - 1)
        await deep(9)
    except KeyError:
        await deep(9)


async def ask(tool):
    return await asyncio.wait_for(tool.wait(), 60)


async def ask_all(tools):
    async with asyncio.TaskGroup() as tasks:
        for tool in tools:
            tasks.create_task(ask(tool))
"""


@pytest.fixture
def agents(tmp_path: Path) -> ModuleType:
    """Return a module of the user's."""
    path = tmp_path / "agents.py"
    path.write_text(AGENTS.replace("LONG", "long " * 60))
    spec = importlib.util.spec_from_file_location("agents", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def error_of(session: Coroutine[Any, Any, Any]) -> BaseException:
    """Run a session as the worker does, and return its error."""

    async def run() -> BaseException:
        (error,) = await asyncio.gather(session, return_exceptions=True)
        return error

    return asyncio.run(run())


def solve_lines(path: str) -> list[str]:
    """Return the traceback of `solve` without a plan, by hand."""
    return [
        f'File "{path}", line 13, in solve',
        '  raise RuntimeError("cannot plan") from error',
        "caused by KeyError: 'plan'",
        f'File "{path}", line 11, in solve',
        "  look_up(table)",
        f'File "{path}", line 6, in look_up',
        '  return table["plan"]',
    ]


def test_an_error_is_told_with_its_cause_the_last_raised_first(agents: ModuleType) -> None:
    error = error_of(agents.solve({}))
    assert user_traceback(error).splitlines() == solve_lines(agents.__file__ or "")
    assert raised_at(error) == f"{agents.__file__}:13"


def test_frames_of_libraries_are_left_out_but_for_the_one_that_raised(agents: ModuleType) -> None:
    error = error_of(agents.parse("{"))
    lines = user_traceback(error).splitlines()
    assert lines[:2] == [f'File "{agents.__file__}", line 17, in parse', "  return json.loads(text)"]
    assert lines[2].startswith(f'File "{json.decoder.__file__}"')
    assert len(lines) == 4
    assert raised_at(error) == f"{agents.__file__}:17"


def test_errors_of_a_task_group_are_told_each_once(agents: ModuleType) -> None:
    error = error_of(agents.several([{}, {"plan": 1}, {}]))
    assert isinstance(error, ExceptionGroup)
    assert len(error.exceptions) == 2
    outer = [f'File "{agents.__file__}", line 21, in several', "  async with asyncio.TaskGroup() as tasks:"]
    inner = ["in the group: RuntimeError: cannot plan", *solve_lines(agents.__file__ or "")]
    assert user_traceback(error).splitlines() == outer + inner
    assert raised_at(error) == f"{agents.__file__}:21"
    # Where a library has made the group, an error inside says where.
    without = error.with_traceback(None)
    assert user_traceback(without).splitlines() == inner
    assert raised_at(without) == f"{agents.__file__}:13"


def test_which_error_of_a_group_came_first_changes_nothing(agents: ModuleType) -> None:
    """Sessions of one cause and place are told together."""
    errors = [error_of(agents.solve({})), error_of(agents.parse("{"))]
    first, second = (ExceptionGroup("of a library", each) for each in (errors, errors[::-1]))
    assert describe_error(first) == describe_error(second)
    assert raised_at(first) == raised_at(second) == f"{agents.__file__}:13"
    assert user_traceback(first) == user_traceback(second)


def test_the_wrapper_of_our_loops_is_taken_off(agents: ModuleType) -> None:
    inner = error_of(agents.solve({}))
    wrapper = SessionFailed(describe_error(inner))
    wrapper.__cause__ = inner
    assert user_traceback(wrapper) == user_traceback(inner)
    assert raised_at(wrapper) == raised_at(inner)


def test_a_session_that_failed_without_an_error_has_no_traceback() -> None:
    async def run() -> None:
        raise SessionFailed("no branch was finished")

    error = error_of(run())
    # As though a module of rollout_hooks had raised it.
    assert user_traceback(error.with_traceback(None)) == ""
    assert raised_at(error) == ""


def test_an_error_of_an_actor_has_its_own_cause_and_frames() -> None:
    """Such as one of a reward function; pid and address, which differ from worker to worker, are not in the cause."""
    text = (
        "Traceback (most recent call last):\n"
        '  File "/venv/lib/python3.11/site-packages/verl/reward_loop.py", line 3, in compute_score\n'
        "    return await self.score(row)\n"
        '  File "/home/me/rewards.py", line 7, in score\n'
        "    return 1 / row\n"
        "ZeroDivisionError: division by zero\n"
    )
    cause = ZeroDivisionError("division by zero")
    error = RayTaskError("compute_score", text, cause, proctitle="p", pid=1, ip="10.0.0.1").as_instanceof_cause()
    assert "10.0.0.1" in str(error)
    assert describe_error(error) == "ZeroDivisionError: division by zero"
    assert user_traceback(error) == 'File "/home/me/rewards.py", line 7, in score'
    assert raised_at(error) == "/home/me/rewards.py:7"


def test_an_error_that_quotes_the_model_is_one_line_without_control_characters() -> None:
    error = ValueError("cannot read \x1b[2J\nstep 1/3: reward 1.00\r\x07 \u202e é\u2028漢")
    line = r"cannot read \x1b[2J\nstep 1/3: reward 1.00\r\x07 \u202e é\u2028漢"
    assert describe_error(error) == f"ValueError: {line}"
    assert describe_error(SessionFailed(str(error))) == line


def test_a_traceback_is_bounded(agents: ModuleType) -> None:
    text = user_traceback(error_of(agents.again(3)))
    assert len(text) == MAX_LEN
    assert text.endswith("\n...")


def test_tasks_wait_at_the_users_last_line(agents: ModuleType) -> None:
    """`ask_all` waits for its two tasks where its body ends; a task that waits in a library alone has no place."""

    async def run() -> tuple[Counter[str], Counter[str]]:
        tools = [asyncio.Event(), asyncio.Event()]
        session = asyncio.create_task(agents.ask_all(tools))
        library = asyncio.create_task(tools[0].wait())
        await asyncio.sleep(0.01)
        here = asyncio.current_task()
        waiting = waiting_places(asyncio.all_tasks() - {here})
        for tool in tools:
            tool.set()
        await asyncio.gather(session, library)
        return waiting, waiting_places([session, library])

    waiting, ended = asyncio.run(run())
    assert waiting == {f"{agents.__file__}:42": 2, f"{agents.__file__}:46": 1}
    assert not ended
