"""A dead or hanging process ends the run with its cause, where verl would wait for an answer for ever.

A thread of the driver looks at facts, not at messages. Ray knows which actors of the job died and which tasks run; a
vLLM engine is no actor, so its processes (children of a server actor, titled `VLLM::...`) are looked up on this
machine. Three findings end the run: an actor whose process died, an engine process that is gone, and the same set
of running tasks for `tree.watchdog.timeout_s`. The report has the tail of the logs that Ray keeps per actor.

What is left out: engine processes on other machines are not seen; a run there ends by the timeout.
"""

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

import psutil
import ray
import requests
from ray.exceptions import RayError
from ray.util.state import get_log, list_actors, list_tasks
from ray.util.state.common import ActorState, TaskState
from ray.util.state.exception import RayStateApiException

from verl_tree.config import WatchdogConfig

logger = logging.getLogger(__name__)

DEATHS = ("WORKER_DIED", "NODE_DIED", "OWNER_DIED")
"""Reasons of Ray (`ActorDiedErrorContext.Reason`, 2.60) for a death that nobody asked for."""

ENGINE_TITLE = "VLLM::"
STATE_LIMIT = 10_000
MAX_LOGS = 3
INTERRUPT = signal.SIGUSR1
# A failing task usually reports more than its process' death does, so the run may end by itself first.
GRACE_S = 5.0


class RunFailedError(RuntimeError):
    """The run was ended by the watchdog, or failed and the watchdog knows why; the message is its report."""


def _cluster() -> str:
    """The address of this driver's own cluster: Ray's state API would ask any other that this machine remembers."""
    return ray.get_runtime_context().gcs_address


@dataclass(frozen=True, slots=True)
class Finding:
    """Why a run cannot go on.

    Attributes:
        cause: One sentence.
        actor_ids: Actors whose logs tell more, most telling first.
    """

    cause: str
    actor_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A process of a vLLM engine.

    Attributes:
        process: The process; psutil compares its start time, so a reused pid is not taken for it.
        title: How it calls itself, e.g. `VLLM::EngineCore`.
        actor_id: Ray actor that started it.
    """

    process: psutil.Process
    title: str
    actor_id: str


class Watchdog:
    """Looks at the processes of this driver's Ray job.

    Not thread-safe: `look` belongs to one thread at a time.
    """

    def __init__(self, options: WatchdogConfig) -> None:
        self.options = options
        self._engines: dict[int, EngineProcess] = {}
        self._running: frozenset[str] = frozenset()
        self._changed_at = time.monotonic()

    def look(self) -> Finding | None:
        """Looks once; returns what is wrong, or None.

        Raises:
            RayStateApiException: Ray's dashboard does not answer.
            requests.RequestException: Likewise.
        """
        job = [("job_id", "=", ray.get_runtime_context().get_job_id())]
        actors = list_actors(
            address=_cluster(), filters=job, detail=True, limit=STATE_LIMIT, raise_on_missing_output=False
        )
        return self._dead_actor(actors) or self._gone_engine(actors) or self._hang(job)

    def _dead_actor(self, actors: list[ActorState]) -> Finding | None:
        dead = [(each, _death(each)) for each in actors if each.state == "DEAD"]
        dead = [(each, death) for each, death in dead if death.get("reason") in DEATHS]
        if not dead:
            return None
        # Actors that died with their owner are a consequence.
        dead.sort(key=lambda pair: pair[1]["reason"] == "OWNER_DIED")
        actor, death = dead[0]
        where = f"pid {actor.pid} on node {death.get('node_ip_address')}"
        cause = f"the process of {_title(actor)} ({where}) died: {death.get('error_message')}"
        return Finding(cause, tuple(each.actor_id for each, _ in dead))

    def _gone_engine(self, actors: list[ActorState]) -> Finding | None:
        here = ray.get_runtime_context().get_node_id()
        for actor in actors:
            if actor.state == "ALIVE" and actor.node_id == here and actor.pid:
                self._engines.update(_engine_processes(actor))
        alive = {each.actor_id for each in actors if each.state == "ALIVE"}
        self._engines = {pid: each for pid, each in self._engines.items() if each.actor_id in alive}
        for pid, engine in self._engines.items():
            if not _is_running(engine.process):
                cause = f"the vLLM process {engine.title} (pid {pid}) is gone; its server cannot generate any more"
                return Finding(cause, (engine.actor_id,))
        return None

    def _hang(self, job: list[tuple[str, str, str]]) -> Finding | None:
        now = time.monotonic()
        tasks = list_tasks(
            address=_cluster(),
            filters=[*job, ("state", "=", "RUNNING")],
            detail=True,
            limit=STATE_LIMIT,
            raise_on_missing_output=False,
        )
        running = frozenset(each.task_id for each in tasks)
        if running != self._running:
            self._running, self._changed_at = running, now
        if now - self._changed_at < self.options.timeout_s:
            return None
        tasks.sort(key=lambda each: each.start_time_ms or 0, reverse=True)
        names = ", ".join(_running_for(each) for each in tasks) or "none"
        cause = (
            f"no Ray task has started or ended for {self.options.timeout_s:g} s (tree.watchdog.timeout_s); "
            f"running: {names}"
        )
        return Finding(cause, tuple(dict.fromkeys(each.actor_id for each in tasks if each.actor_id)))

    def report(self, finding: Finding) -> str:
        """Returns the cause and the tails of the logs of up to `MAX_LOGS` actors of a finding."""
        num_lines = self.options.log_tail_lines
        parts = [finding.cause]
        for actor_id in finding.actor_ids[:MAX_LOGS]:
            for suffix in ("out", "err"):
                tail = _log_tail(actor_id, suffix=suffix, num_lines=num_lines)
                parts.append(f"--- last {num_lines} lines of std{suffix} of actor {actor_id}\n{tail}")
        return "\n".join(parts)


def _death(actor: ActorState) -> dict[str, str]:
    return (actor.death_cause or {}).get("actor_died_error_context", {})


def _title(actor: ActorState) -> str:
    return f"{actor.class_name} {actor.name}".strip()


def _engine_processes(actor: ActorState) -> dict[int, EngineProcess]:
    """Returns the vLLM processes below an actor by pid.

    A process that an engine forks to start a program (a compiler, `lscpu`) has the engine's title until it becomes that
    program, and ends soon: whatever has the title of its parent is no engine.
    """
    try:
        children = psutil.Process(actor.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return {}
    titles, found = {}, {}
    # Parents come first in the list. Asked last, a parent that takes its title meanwhile has it like its child.
    for child in reversed(children):
        with suppress(psutil.NoSuchProcess):
            titles[child.pid] = " ".join(child.cmdline()).strip()
    for child in children:
        title = titles.get(child.pid, "")
        if title.startswith(ENGINE_TITLE):
            with suppress(psutil.NoSuchProcess):
                if titles.get(child.ppid()) != title:
                    found[child.pid] = EngineProcess(child, title, actor.actor_id)
    return found


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _running_for(task: TaskState) -> str:
    started_s = (task.start_time_ms or task.creation_time_ms or time.time() * 1000) / 1000
    return f"{task.name} of pid {task.worker_pid} for {time.time() - started_s:.0f} s"


def _log_tail(actor_id: str, *, suffix: str, num_lines: int) -> str:
    try:
        return "".join(get_log(address=_cluster(), actor_id=actor_id, suffix=suffix, tail=num_lines)).strip()
    except (RayStateApiException, requests.RequestException) as error:
        return f"(not readable: {error})"


class _Watch(threading.Thread):
    """Looks at regular intervals and interrupts the main thread once, with a report."""

    def __init__(self, options: WatchdogConfig) -> None:
        super().__init__(name="verl_tree watchdog", daemon=True)
        self.options = options
        self.report: str | None = None
        self._stopped = threading.Event()
        self._watchdog = Watchdog(options)

    def run(self) -> None:
        while not self._stopped.wait(self.options.poll_s):
            if ray.is_initialized() and self.look():
                break
        if self.report is not None and not self._stopped.wait(GRACE_S):
            signal.pthread_kill(threading.main_thread().ident, INTERRUPT)

    def look(self) -> bool:
        """Looks once and keeps the report; returns whether something is wrong."""
        try:
            finding = self._watchdog.look()
        except (RayStateApiException, requests.RequestException) as error:
            logger.warning("the watchdog cannot ask Ray about its processes: %s", error)
            return False
        if finding is not None:
            self.report = self._watchdog.report(finding)
        return finding is not None

    def stop(self) -> None:
        """Ends the thread; returns when it does not look any more."""
        self._stopped.set()
        self.join()


def _interrupt(signum: int, frame: FrameType | None) -> None:
    # The one exception that `ray.get` lets a signal handler raise through its wait.
    raise KeyboardInterrupt


@contextmanager
def watch_run(options: WatchdogConfig) -> Iterator[None]:
    """Watches the Ray job that the body runs from the main thread.

    Args:
        options: `tree.watchdog`.

    Raises:
        RunFailedError: A process died or nothing moved; the message is the cause with the logs' tails.
    """
    if not options.enabled:
        yield
        return
    previous = signal.signal(INTERRUPT, _interrupt)
    watch = _Watch(options)
    watch.start()
    try:
        yield
    except (RayError, KeyboardInterrupt) as error:
        watch.stop()
        if watch.report is None and isinstance(error, RayError):
            watch.look()
        if watch.report is None:
            raise
        raise RunFailedError(watch.report) from (error if isinstance(error, RayError) else None)
    finally:
        watch.stop()
        signal.signal(INTERRUPT, previous)
