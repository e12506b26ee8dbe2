"""The watchdog on a real Ray cluster: a killed actor, a lost engine process and a hang end the run with the cause."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import ray
from omegaconf import OmegaConf

from verl_tree.config import WatchdogConfig
from verl_tree.launch.termination import EXIT_STATUS, ending_on_term
from verl_tree.launch.watchdog import RunFailedError, watch_run

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
def cluster() -> Iterator[None]:
    """Start a cluster for each test: the watchdog reports every death of its job, also an earlier one."""
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
    assert re.search(r"no Ray task has started or ended for 6 s.*Server\.wait of pid \d+ for \d+ s", message)


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
