"""The watchdog on a real Ray cluster: a killed actor, a lost engine process and a hang end the run with the cause."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from omegaconf import OmegaConf
from ray._private.ray_constants import DEFAULT_DASHBOARD_AGENT_LISTEN_PORT
from ray.util.state import list_actors
from typing_extensions import override
from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
from worker_cases import InProcessWorker, prompt_of

from rollout_hooks.loops.base import Branch, BranchingAgentLoop
from verl_tree.config import WatchdogConfig
from verl_tree.launch.actors import log_tail
from verl_tree.launch.termination import EXIT_STATUS, ending_on_term
from verl_tree.launch.watchdog import RunFailedError, _ask, watch_run

pytestmark = pytest.mark.e2e


@ray.remote
class Server:
    """An actor that writes to its log, may have an engine process, and can wait for ever."""

    def __init__(self, *, title: str | None = None) -> None:
        print("the server wrote this to stdout", flush=True)
        print("the server wrote this to stderr", file=sys.stderr, flush=True)
        self.engine = subprocess.Popen(["bash", "-c", f"exec -a {title} sleep 300"]) if title else None

    def pid(self) -> int:
        return os.getpid()

    def engine_pid(self) -> int:
        return self.engine.pid

    def wait(self) -> None:
        time.sleep(300)

    def stop(self) -> None:
        if self.engine is not None:
            self.engine.kill()


@pytest.fixture(autouse=True)
def cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start a cluster for each test: the watchdog reports every death of its job, also an earlier one.

    It has no agent of the dashboard, like every second cluster of a machine, unless a test asks for "agent".
    """
    wants_agent = getattr(request, "param", None) == "agent"
    with socket.socket() as port:
        try:
            port.bind(("", DEFAULT_DASHBOARD_AGENT_LISTEN_PORT))
            port.listen()
        except OSError:
            if wants_agent:
                pytest.skip("another cluster of this machine has the agent's port")
        if wants_agent:
            port.close()
        ray.init(address="local", num_cpus=4, logging_level="ERROR", log_to_driver=False)
        yield
        ray.shutdown()


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[ray.actor.ActorHandle]:
    handle = Server.remote(title=getattr(request, "param", None))
    ray.get(handle.pid.remote())
    yield handle
    ray.kill(handle)


def kill_later(pid: int, *, after_s: float) -> None:
    threading.Timer(after_s, os.kill, (pid, signal.SIGKILL)).start()


def failure(options: WatchdogConfig, body: Callable[[], object]) -> str:
    """Return why the watchdog ended the body."""

    def watched() -> None:
        with watch_run(options):
            body()

    with pytest.raises(RunFailedError) as error:
        watched()
    return str(error.value)


def test_killed_actor_is_the_cause(server: ray.actor.ActorHandle) -> None:
    pid = ray.get(server.pid.remote())
    kill_later(pid, after_s=1.0)
    message = failure(WatchdogConfig(poll_s=0.5), lambda: ray.get(server.wait.remote()))
    assert f"the process of Server (pid {pid}" in message
    assert "the server wrote this to stdout" in message
    assert "the server wrote this to stderr" in message


def test_killed_actor_that_nobody_asks_ends_the_run() -> None:
    """The main thread waits for something else, as verl's trainer waits for rows that never come."""
    server = Server.remote()
    pid = ray.get(server.pid.remote())
    started = time.monotonic()
    kill_later(pid, after_s=0.5)
    assert f"pid {pid}" in failure(WatchdogConfig(poll_s=0.5), lambda: time.sleep(120))
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("server", ["VLLM::EngineCore"], indirect=True)
def test_lost_engine_process_ends_the_run(server: ray.actor.ActorHandle) -> None:
    pid = ray.get(server.engine_pid.remote())
    kill_later(pid, after_s=4.0)
    message = failure(WatchdogConfig(poll_s=0.5), lambda: ray.get(server.wait.remote()))
    assert f"the vLLM process VLLM::EngineCore 300 (pid {pid}) is gone" in message
    assert "the server wrote this to stdout" in message


def test_hang_ends_the_run_and_names_the_task(server: ray.actor.ActorHandle) -> None:
    started = time.monotonic()
    message = failure(WatchdogConfig(poll_s=0.5, timeout_s=6.0), lambda: ray.get(server.wait.remote()))
    assert 6.0 < time.monotonic() - started < 60
    assert re.search(
        r"no Ray task has started or ended for 6 s.*Server\.wait of pid \d+ on node \S+ for \d+ s", message
    )
    assert "the server wrote this to stdout" in message


class AskingLoop(BranchingAgentLoop):
    """A loop whose tool never answers; with `blocks`, it never gives the event loop back either."""

    def __init__(self, *args: Any, blocks: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.blocks = blocks

    @override
    async def run_branches(self, root: Branch, **row: Any) -> None:
        await root.generate()
        if self.blocks:
            time.sleep(300)
        await asyncio.Event().wait()


class BackgroundWorker(InProcessWorker):
    """A worker that starts sessions and returns, as verl's does with those of its batch."""

    def __init__(self) -> None:
        super().__init__(lambda _: "a")
        print("the worker wrote this", flush=True)

    async def generate_sequences(self, *, num_sessions: int, blocks: bool) -> int:
        """Return the process's id; the sessions go on."""
        _agent_loop_registry["asking"] = {"_target_": f"{__name__}.AskingLoop", "blocks": blocks}
        self.task = asyncio.create_task(prompt_of(self, num_sessions=num_sessions, agent_name="asking"))
        return os.getpid()


@pytest.mark.parametrize("blocks", [False, True])
def test_a_hang_of_sessions_names_their_worker(server: ray.actor.ActorHandle, blocks: bool) -> None:
    """No task of the worker runs; only that of the trainer does, which waits for rows."""
    workers = [ray.remote(BackgroundWorker).options(name=f"agent_loop_worker_{each}_0").remote() for each in range(2)]
    ray.get(workers[1].generate_sequences.remote(num_sessions=0, blocks=False))
    pid = ray.get(workers[0].generate_sequences.remote(num_sessions=2, blocks=blocks))
    message = failure(WatchdogConfig(poll_s=0.5, timeout_s=6.0), lambda: ray.get(server.wait.remote()))
    cause = message.splitlines()[0]
    known = "does not answer: a call of its agents blocks the event loop"
    if not blocks:
        place = f"{__file__}:{AskingLoop.run_branches.__code__.co_firstlineno + 5}"
        known = rf"2 open sessions, the oldest, u_0 of loop asking, for \d+ s; in code of yours at {place} \(2 tasks\)"
    named = rf"BackgroundWorker\.generate_sequences of pid {pid} on node \S+: {known}"
    assert re.search(rf"; waiting: {named}; Server\.wait of pid", cause), cause
    assert "the worker wrote this" in message
    assert "the server wrote this to stdout" in message
    assert cause.count("BackgroundWorker") == 1, "the other one waits for nothing"


@pytest.mark.parametrize("cluster", ["agent"], indirect=True)
def test_a_log_that_is_not_on_this_machine_is_asked_for(server: ray.actor.ActorHandle) -> None:
    """Ray is asked, and its agent needs some seconds after the start of the cluster."""
    (actor,) = [each for each in _ask(list_actors) if each.actor_id == server._actor_id.hex()]
    text = "the server wrote this to stderr"
    assert text in log_tail(actor, suffix="err", num_lines=9)
    actor.pid = 0
    deadline = time.monotonic() + 60
    while text not in (tail := log_tail(actor, suffix="err", num_lines=9)):
        assert tail.startswith("(not readable: "), tail
        assert time.monotonic() < deadline, tail
        time.sleep(1.0)


def test_sigterm_ends_the_wait_for_ray(server: ray.actor.ActorHandle, tmp_path: Path) -> None:
    """Under the handler that `ray.init` sets, the process would abort."""
    options = {"trainer": {"default_local_dir": str(tmp_path)}, "tree": {"save_on_term": False}}

    def run() -> None:
        with ending_on_term(OmegaConf.create(options)), watch_run(WatchdogConfig(poll_s=0.5)):
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
            ray.get(server.wait.remote())

    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == EXIT_STATUS


def test_progress_is_no_hang(server: ray.actor.ActorHandle) -> None:
    """For three times the timeout tasks keep coming, and an actor is ended on purpose."""
    extra = Server.remote()
    ray.get(extra.pid.remote())
    with watch_run(WatchdogConfig(poll_s=0.5, timeout_s=4.0)):
        ray.kill(extra)
        waiting = []
        for _ in range(12):
            waiting.append(Server.remote())
            ray.get(waiting[-1].pid.remote(), timeout=60)
            ray.wait([waiting[-1].wait.remote()], timeout=1.0)
            ray.kill(waiting.pop())
    assert psutil.Process(ray.get(server.pid.remote())).is_running()
