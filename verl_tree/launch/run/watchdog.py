"""A watchdog that ends a training run whose process died or hangs, and names the cause; verl would wait for ever.

A thread of the driver asks Ray which actors of the job died and which tasks run. A vLLM engine is not an actor, so its
processes (children of a server actor, titled `VLLM::...`) are looked up on this machine. Three findings end the
training run: an actor's process died (agent loop workers are started anew: `rollout_hooks.capture.retries`), an engine
process is gone, or the set of running tasks did not change for `tree.watchdog.timeout_s`. The report of a hang asks the
agent loop workers, too, which sessions are open: no task runs while they wait. It has the tails of the actors' logs.
The death of an engine process on another machine is not seen; the timeout ends the training run then. A generation that
takes long is told every minute, with its open sessions.
"""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from textwrap import indent
from types import FrameType
from typing import Any

import psutil
import ray
import requests
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.state import list_actors, list_tasks
from ray.util.state.exception import RayStateApiException
from typing_extensions import override

from verl_tree.config import WatchdogConfig
from verl_tree.launch.run.actors import (
    Actor,
    Task,
    ask_sessions,
    cluster_address,
    describe_generation,
    log_tail,
    place_of,
    running_for,
    unwanted_deaths,
    waiting_workers,
)

logger = logging.getLogger(__name__)

ENGINE_TITLE = "VLLM::"
STATE_LIMIT = 10_000
MAX_LOGS = 3
MAX_WORKERS = 2
"""Agent loop workers of a report; fewer than logs, so that the task behind them has one, too."""
SESSIONS = "generate_sequences"
"""The method of agent loop workers that starts sessions; it returns at once, and no Ray task runs while they do."""
ASKED = (".open_sessions", ".__ray_ready__")
"""How the tasks end by which this thread and the manager ask a worker; they are no progress."""
TELL_S = 60.0
"""So often a generation says how far it is, if it takes longer."""
INTERRUPT = signal.SIGUSR1
# The training run has this long to end by itself: the error of a task usually says more than the death of its process.
GRACE_S = 5.0
LOST_S = 60.0
"""So long after an actor became unavailable, Ray should know whether its node has died; it takes about half of this."""
INTERRUPT_S = 0.5
"""An interrupted training run waits this long for the thread."""


class RunFailedError(RuntimeError):
    """A training run that the watchdog ended, or whose failure it can explain.

    Attributes:
        cause: What is wrong.
        logs: The ends of the logs of the actors that it has to do with; the message has them, too.
    """

    def __init__(self, cause: str, *, logs: str) -> None:
        super().__init__(f"{cause}\n{logs}")
        self.cause = cause
        self.logs = logs


def _ask(list_states: Callable[..., Any], **columns: str) -> Any:
    """Return what Ray's state API lists for this driver's job, filtered by the values of columns."""
    columns["job_id"] = ray.get_runtime_context().get_job_id()
    filters = [(column, "=", value) for column, value in columns.items()]
    return list_states(
        address=cluster_address(), filters=filters, detail=True, limit=STATE_LIMIT, raise_on_missing_output=False
    )


@dataclass(frozen=True, slots=True)
class Failure:
    """A reason why a training run cannot go on, and the actors whose logs tell more, the most telling first."""

    cause: str
    actors: tuple[Actor, ...]


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A process of a vLLM engine, with its title (`VLLM::EngineCore`) and the Ray actor that started it."""

    # psutil compares start times, too, so it notices when another process has got the pid.
    process: psutil.Process
    title: str
    actor_id: str


class Watchdog:
    """Checks of the processes of this driver's Ray job. Not thread-safe: one thread at a time may call `look`."""

    def __init__(self, options: WatchdogConfig, *, retries_agents: bool = False) -> None:
        self.options, self.retries_agents = options, retries_agents
        self._engines: dict[int, EngineProcess] = {}
        self._running: frozenset[str] = frozenset()
        self._changed_at = self._told_at = time.monotonic()

    def look(self) -> Failure | None:
        """Look once, and return what is wrong, or None.

        Raises:
            RayStateApiException: Ray's dashboard does not answer.
            RayError: Ray's head does not answer.
            requests.RequestException: Ray's dashboard does not answer.
        """
        actors = _ask(list_actors)
        if dead := self._dead_actor(actors):
            return dead
        if gone := self._gone_engine(actors):
            # An engine ends with the actor that owns its server, too. The first answer may be older than these deaths.
            return self._dead_actor(_ask(list_actors)) or gone
        if time.monotonic() - self._told_at >= TELL_S:
            self._told_at = time.monotonic()
            if told := describe_generation([each for _, each in ask_sessions(actors)], since_s=TELL_S):
                print(told, flush=True)
        return self._hang(actors)

    def _dead_actor(self, actors: list[Actor]) -> Failure | None:
        deaths = unwanted_deaths(actors, retries_agents=self.retries_agents)
        return Failure(deaths[0].cause, tuple(each.actor for each in deaths)) if deaths else None

    def _gone_engine(self, actors: list[Actor]) -> Failure | None:
        here = ray.get_runtime_context().get_node_id()
        for actor in actors:
            if actor.state == "ALIVE" and actor.node_id == here and actor.pid:
                self._engines.update(_engine_processes(actor))
        alive = {each.actor_id for each in actors if each.state == "ALIVE"}
        self._engines = {pid: each for pid, each in self._engines.items() if each.actor_id in alive}
        for pid, engine in self._engines.items():
            if not _is_running(engine.process):
                cause = f"the vLLM process {engine.title} (pid {pid}) is gone; its server cannot generate any more"
                return Failure(cause, tuple(each for each in actors if each.actor_id == engine.actor_id))
        return None

    def _hang(self, actors: list[Actor]) -> Failure | None:
        now = time.monotonic()
        tasks: list[Task] = [each for each in _ask(list_tasks, state="RUNNING") if not each.name.endswith(ASKED)]
        running = frozenset(each.task_id for each in tasks)
        if running != self._running:
            self._running, self._changed_at = running, now
        if now - self._changed_at < self.options.timeout_s:
            return None
        tasks.sort(key=lambda each: each.start_time_ms or 0, reverse=True)
        waiting = waiting_workers(actors)
        told = [f"{each.class_name}.{SESSIONS} of {place_of(each.pid, each.node_id)}: {line}" for each, line in waiting]
        if len(told) > MAX_WORKERS:
            told[MAX_WORKERS:] = [f"{len(told) - MAX_WORKERS} more of these workers"]
        told += [running_for(each) for each in tasks]
        cause = (
            f"no Ray task has started or ended for {self.options.timeout_s:g} s (tree.watchdog.timeout_s); "
            f"waiting: {'; '.join(told) or 'none'}"
        )
        by_id = {each.actor_id: each for each in actors}
        ids = [each.actor_id for each, _ in waiting[:MAX_WORKERS]] + [each.actor_id for each in tasks]
        return Failure(cause, tuple(by_id[each] for each in dict.fromkeys(ids) if each in by_id))

    def report(self, failure: Failure) -> RunFailedError:
        """Return a failure as an error with the tails of the logs of up to `MAX_LOGS` of its actors."""
        num_lines = self.options.log_tail_lines
        parts = []
        for actor in failure.actors[:MAX_LOGS]:
            for suffix in ("out", "err"):
                tail = log_tail(actor, suffix=suffix, num_lines=num_lines)
                title = f"{actor.class_name} ({place_of(actor.pid, actor.node_id)})"
                # Indented, no line of it is taken for one that this process prints (`lines`).
                parts.append(f"--- last {num_lines} lines of std{suffix} of {title}\n{indent(tail, '  ')}")
        return RunFailedError(failure.cause, logs="\n".join(parts))


def _engine_processes(actor: Actor) -> dict[int, EngineProcess]:
    """Return the vLLM processes below an actor by pid."""
    try:
        children = psutil.Process(actor.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return {}
    titles, found = {}, {}
    # Read the titles of children before their parents': a parent that sets its title meanwhile then has it, too.
    for child in reversed(children):
        with suppress(psutil.NoSuchProcess):
            titles[child.pid] = " ".join(child.cmdline()).strip()
    for child in children:
        title = titles.get(child.pid, "")
        if title.startswith(ENGINE_TITLE):
            with suppress(psutil.NoSuchProcess):
                # Skip children that still carry their parent's title: they were forked to start a program (a compiler,
                # `lscpu`), have not become it yet, and end soon.
                if titles.get(child.ppid()) != title:
                    found[child.pid] = EngineProcess(child, title, actor.actor_id)
    return found


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class _Watch(threading.Thread):
    """A thread that looks at regular intervals; on a failure it keeps a report and interrupts the main thread."""

    def __init__(self, options: WatchdogConfig, *, retries_agents: bool = False) -> None:
        super().__init__(name="verl_tree watchdog", daemon=True)
        self.options = options
        self.report: RunFailedError | None = None
        self._stopped = threading.Event()
        self._watchdog = Watchdog(options, retries_agents=retries_agents)

    @override
    def run(self) -> None:
        while not self._stopped.wait(self.options.poll_s):
            if ray.is_initialized() and self.look():
                break
        if self.report is not None and not self._stopped.wait(GRACE_S):
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, INTERRUPT)

    def look(self) -> bool:
        """Look once, keep the report, and return whether something is wrong."""
        try:
            failure = self._watchdog.look()
        except (RayStateApiException, RayError, requests.RequestException) as error:
            if self._stopped.is_set():
                return False
            logger.warning("the watchdog cannot ask Ray about its processes: %s", error)
            return False
        if failure is not None:
            self.report = self._watchdog.report(failure)
        return failure is not None

    def explain(self, error: RayError) -> None:
        """Look for what is behind an error, and again until Ray knows it if all it says is "unavailable"."""
        deadline = time.monotonic() + (LOST_S if isinstance(error, ActorUnavailableError) else 0.0)
        while not self.look() and time.monotonic() < deadline:
            time.sleep(self.options.poll_s)

    def stop(self, *, timeout_s: float | None = None) -> None:
        """Stop the thread and wait for its end, at most so long."""
        self._stopped.set()
        self.join(timeout_s)


def _interrupt(_signum: int, _frame: FrameType | None) -> None:
    # This is the only exception by which a signal handler can end the wait of `ray.get`.
    raise KeyboardInterrupt


@contextmanager
def watch_run(options: WatchdogConfig, *, retries_agents: bool = False) -> Iterator[None]:
    """Watch the Ray job that the body runs; the body must run in the main thread.

    With `retries_agents` the death of an agent loop worker is left to its manager.

    Raises:
        RunFailedError: A process died or hung; the message has the cause and the tails of the logs.
    """
    if not options.enabled:
        yield
        return
    previous = signal.signal(INTERRUPT, _interrupt)
    watch = _Watch(options, retries_agents=retries_agents)
    watch.start()
    # Ctrl-C ends Ray's dashboard as well, and a question to it would be waited for half a minute.
    patience_s = None
    try:
        yield
    except (RayError, KeyboardInterrupt) as error:
        patience_s = None if isinstance(error, RayError) else INTERRUPT_S
        watch.stop(timeout_s=patience_s)
        if watch.report is None and isinstance(error, RayError):
            watch.explain(error)
        if watch.report is None:
            raise
        raise watch.report from (error if isinstance(error, RayError) else None)
    finally:
        watch.stop(timeout_s=patience_s)
        signal.signal(INTERRUPT, previous)
