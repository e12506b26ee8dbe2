"""The watchdog on a real Ray cluster: a killed actor, a lost engine process and a hang end the run with the cause."""

import inspect
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import psutil
import pytest
import ray
from omegaconf import OmegaConf
from process_groups import free_port
from ray.cluster_utils import Cluster
from ray.exceptions import ActorDiedError
from ray.util.state import list_actors
from waiting_worker import AskingLoop, BackgroundWorker

from verl_tree.config import WatchdogConfig
from verl_tree.launch.run import actors, watchdog
from verl_tree.launch.run.actors import log_tail
from verl_tree.launch.run.ending import TERMINATED, ended_in_brief
from verl_tree.launch.run.watchdog import RunFailedError, _ask, watch_run

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

    def wait(self, seconds: float = 300.0) -> None:
        time.sleep(seconds)

    def stop(self) -> None:
        if self.engine is not None:
            self.engine.kill()


@pytest.fixture(scope="module")
def start_cluster() -> Iterator[Callable[[bool], Cluster]]:
    """Return a function that gives the cluster whose dashboard has an agent, or the one whose dashboard has none.

    Each is started once: the watchdog reports the deaths of its own job only, and each test is a job. An agent does not
    start where its port is taken, as for every second cluster on a machine.
    """
    with ExitStack() as held, pytest.MonkeyPatch.context() as patch:
        # Ray's processes import `waiting_worker` from there.
        patch.setenv("PYTHONPATH", str(Path(inspect.getfile(AskingLoop)).parent), prepend=os.pathsep)
        patch.setattr(watchdog, "GRACE_S", 1.0)  # No run of these tests ends by itself.

        @cache
        def start(has_agent: bool) -> Cluster:
            taken = held.enter_context(socket.socket())
            taken.bind(("", 0))
            taken.listen()
            agent_port = free_port() if has_agent else taken.getsockname()[1]
            ports = {"dashboard_port": free_port(), "dashboard_agent_listen_port": agent_port}
            cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, **ports})
            held.callback(cluster.shutdown)
            return cluster

        yield start


@pytest.fixture(autouse=True)
def cluster(request: pytest.FixtureRequest, start_cluster: Callable[[bool], Cluster]) -> Iterator[Cluster]:
    """Connect to a cluster; a test that asks for an "agent" gets the one that has it."""
    cluster = start_cluster(getattr(request, "param", None) == "agent")
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    yield cluster
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


@pytest.mark.parametrize("cluster", ["agent"], indirect=True)
def test_a_lost_node_is_the_cause(cluster: Cluster) -> None:
    """The error comes before Ray knows of the node, and says "temporarily unavailable"."""
    second = cluster.add_node(num_cpus=1, resources={"second": 1})
    server = Server.options(resources={"second": 1}).remote()
    pid = ray.get(server.pid.remote())
    threading.Timer(1.0, cluster.remove_node, (second,), {"allow_graceful": False}).start()
    message = failure(WatchdogConfig(poll_s=0.5), lambda: ray.get(server.wait.remote()))
    assert re.search(rf"the process of Server \(pid {pid} on node \S+\) died: .*its node has died", message)
    assert "the server wrote this to stdout" in message


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


def test_a_hang_of_sessions_is_told_again_and_again_and_then_names_their_workers(
    server: ray.actor.ActorHandle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No task of a worker runs, only that of the trainer, which waits for rows. The third worker waits for nothing.

    The question which sessions are open is a task, too, and that of a worker that does not answer goes on.
    """
    monkeypatch.setattr(watchdog, "TELL_S", 1.0)
    monkeypatch.setattr(actors, "ANSWER_S", 1.0)
    workers = [BackgroundWorker.options(name=f"agent_loop_worker_{each}_0").remote() for each in range(3)]
    given = [(2, False), (1, True), (0, False)]
    begun = [
        worker.generate_sequences.remote(num_sessions=num, blocks=blocks)
        for worker, (num, blocks) in zip(workers, given, strict=True)
    ]
    waiting, blocked, idle = ray.get(begun)
    message = failure(WatchdogConfig(poll_s=0.5, timeout_s=6.0), lambda: ray.get(server.wait.remote()))
    cause = message.splitlines()[0]
    place = f"{inspect.getfile(AskingLoop)}:{AskingLoop.run_branches.__code__.co_firstlineno + 5}"
    worker = r"AgentLoopWorkerTQ\.generate_sequences of pid"
    assert re.search(
        rf"; waiting: {worker} {blocked} on node \S+: does not answer: a call of its agents blocks the event loop; "
        rf"{worker} {waiting} on node \S+: 2 open sessions, the oldest, u_0 of loop asking, for \d+ s; "
        rf"tasks wait in your code at [^;]*{place} \(2\)[^;]*; Server\.wait of pid",
        cause,
    ), cause
    assert f"pid {idle} " not in cause
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("generating: ")]
    assert len(told) >= 2
    pattern = r"generating: 2 open sessions, the oldest for \d+ s \(u_0 of loop asking\), 1 agent loop workers do not"
    assert all(re.match(pattern, line) for line in told), told
    for text in ("the worker wrote this", "the server wrote this to stdout"):
        assert text in message


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


def test_sigterm_ends_the_wait_for_ray(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under the handler that `ray.init` sets, the process would abort."""
    trainer = {"default_local_dir": str(tmp_path), "resume_mode": "auto", "save_freq": 1}
    config = OmegaConf.create({"trainer": trainer, "tree": {"save_on_term": False, "watchdog": {"poll_s": 0.5}}})
    server = Server.remote()
    ray.get(server.pid.remote())

    def run() -> None:
        with ended_in_brief(config):
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
            ray.get(server.wait.remote())

    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == TERMINATED
    assert not ray.is_initialized()
    assert "To resume: " in capsys.readouterr().err


def test_progress_is_no_hang(server: ray.actor.ActorHandle) -> None:
    """For twice the timeout tasks keep coming, and an actor is ended on purpose, in the middle of one."""
    extra = Server.remote()
    ray.get(extra.pid.remote())
    timeout_s = 9.0
    started = time.monotonic()
    with watch_run(WatchdogConfig(poll_s=0.5, timeout_s=timeout_s)):
        waiting = extra.wait.remote()
        # Ray knows of a task a second after its start.
        ray.get(server.wait.remote(3.0))
        ray.kill(extra)
        while time.monotonic() - started < 2 * timeout_s:
            ray.get(server.wait.remote(3.0))
    with pytest.raises(ActorDiedError):
        ray.get(waiting)
    assert psutil.Process(ray.get(server.pid.remote())).is_running()
