"""What can be learnt of Ray actors from outside: where they run, why they died, their logs, and for whom they wait."""

import math
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ray
import requests
from ray.exceptions import GetTimeoutError, RayError
from ray.util.state import get_log
from ray.util.state.exception import RayStateApiException

from rollout_hooks.capture.running import OpenSessions
from verl_tree.launch.run.lines import GENERATING

AGENT_LOOP_WORKER = "agent_loop_worker_"
"""With what verl begins the names of its agent loop workers."""
ANSWER_S = 5.0
"""An agent loop worker has this long to say which sessions are open."""
MAX_PLACES = 3
WANTED = frozenset({"RAY_KILL", "OUT_OF_SCOPE", "REF_DELETED"})
"""Ray's reasons for a death that somebody asked for (`ActorDiedErrorContext.Reason`, 2.60)."""
NEVER_STARTED = frozenset(
    {"creation_task_failure_context", "runtime_env_failed_context", "actor_unschedulable_context"}
)
"""Fields of Ray's `ActorDeathCause` (2.60) for actors that never came to life; the others are for those that did."""
OUT_OF_MEMORY = "oom_context"
"""The field for a process that Ray killed, because its node had too little memory left."""
LESS_MEMORY = (
    "To need less of the node's memory: fewer processes (actor_rollout_ref.rollout.agent.num_workers, "
    "reward.num_workers, data.dataloader_num_workers), fewer rows at a time (data.train_batch_size, "
    "actor_rollout_ref.rollout.n), or less on the host (param_offload and optimizer_offload of the actor's engine)"
)


class Actor(Protocol):
    """The fields that are read of `ray.util.state.common.ActorState`; Ray hides them from type checkers."""

    actor_id: str
    class_name: str
    name: str | None
    ray_namespace: str | None
    state: str
    node_id: str | None
    pid: int | None
    death_cause: dict[str, Any] | None


class Task(Protocol):
    """The fields that are read of `ray.util.state.common.TaskState`."""

    task_id: str
    name: str
    actor_id: str | None
    node_id: str | None
    worker_pid: int | None
    creation_time_ms: int | None
    start_time_ms: int | None


@dataclass(frozen=True, slots=True)
class Death:
    """The death of an actor that nobody asked for.

    Attributes:
        actor: The actor.
        cause: What died, where, and Ray's words.
        is_consequence: Whether it died with its owner, whose death tells more.
    """

    actor: Actor
    cause: str
    is_consequence: bool


def unwanted_deaths(actors: list[Actor], *, retries_agents: bool = False) -> list[Death]:
    """Return the deaths that nobody asked for, causes before their consequences.

    With `retries_agents` those of agent loop workers are left to their manager, but for two kinds: who never came to
    life would not the next time either, and where Ray has killed for memory it would kill again.
    """
    deaths = []
    for actor in actors:
        if actor.state != "DEAD":
            continue
        # The cause is a oneof. One that is not known here is unwanted, too: the run would wait for the actor for ever.
        for field, context in (actor.death_cause or {}).items():
            is_agent = (actor.name or "").startswith(AGENT_LOOP_WORKER) and field not in {OUT_OF_MEMORY, *NEVER_STARTED}
            if context.get("reason") not in WANTED and not (is_agent and retries_agents):
                is_consequence = context.get("reason") == "OWNER_DIED"
                deaths.append(Death(actor, _cause_of_death(actor, field, context), is_consequence))
    deaths.sort(key=lambda each: each.is_consequence)
    return deaths


def _cause_of_death(actor: Actor, field: str, context: dict[str, Any]) -> str:
    title = f"{actor.class_name} {actor.name or ''}".strip()
    # An exception of a constructor has a text of its own.
    message = str(context.get("error_message") or context.get("formatted_exception_string") or context).strip()
    if field in NEVER_STARTED:
        return f"the actor {title} could not start: {message}"
    where = f"pid {actor.pid} on node {context.get('node_ip_address') or node_ip(actor.node_id)}"
    remedy = f"\n{LESS_MEMORY}" if field == OUT_OF_MEMORY else ""
    return f"the process of {title} ({where}) died: {message}{remedy}"


def cluster_address() -> str:
    """Return the address of this process's cluster; Ray's state API may ask another one without it."""
    return ray.get_runtime_context().gcs_address


def node_ip(node_id: str | None) -> str:
    """Return the address of a node, or its id if the cluster does not know it."""
    return next((node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id), str(node_id))


def log_tail(actor: Actor, *, suffix: str, num_lines: int) -> str:
    """Return the last lines of an actor's log, of stdout (`suffix` is "out") or of stderr ("err").

    Ray is asked for what is not on this machine. It answers only if an agent of its dashboard runs there, and where two
    clusters share a machine the second one has none.
    """
    here = node_ip(ray.get_runtime_context().get_node_id())
    path = _local_log(actor.pid, suffix=suffix) if node_ip(actor.node_id) == here else None
    # Another user may have started Ray.
    with suppress(PermissionError):
        if path is not None:
            with path.open(errors="replace") as lines:
                return "".join(deque(lines, maxlen=num_lines)).strip()
    try:
        chunks = get_log(address=cluster_address(), actor_id=actor.actor_id, suffix=suffix, tail=num_lines)
        return "".join(chunks).strip()
    except (RayStateApiException, requests.RequestException) as error:
        return f"(not readable: {error})"


def _local_log(pid: int | None, *, suffix: str) -> Path | None:
    """Return the log of a worker process of this machine, also of one that has died."""
    context = ray.get_runtime_context()
    logs = Path(context.get_temp_dir(), context.get_session_name(), "logs")
    # `worker-WORKER-JOB-PID.out`; the job is not known yet where Ray started a worker beforehand.
    found = logs.glob(f"worker-*-{pid}.{suffix}")
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def ask_sessions(actors: list[Actor]) -> list[tuple[Actor, OpenSessions | str]]:
    """Return for each agent loop worker the sessions that it waits for, or why it does not say.

    Of workers that are not `TreeAgentLoopWorker`s nothing is known.
    """
    asked: list[tuple[Actor, Any]] = []
    for actor in actors:
        name = actor.name or ""
        if actor.state == "ALIVE" and name.startswith(AGENT_LOOP_WORKER):
            # One of another class has no such method, and one that died meanwhile has no name any more.
            with suppress(AttributeError, ValueError):
                worker = ray.get_actor(name, namespace=actor.ray_namespace)
                asked.append((actor, worker.open_sessions.remote()))
    deadline = time.monotonic() + ANSWER_S
    answers: list[tuple[Actor, OpenSessions | str]] = []
    for actor, answer in asked:
        try:
            answers.append((actor, ray.get(answer, timeout=max(0.1, deadline - time.monotonic()))))
        except GetTimeoutError:
            answers.append((actor, "does not answer: a call of its agents blocks the event loop"))
        except RayError as error:
            answers.append((actor, f"cannot answer: {error}"))
    return answers


def waiting_workers(actors: list[Actor]) -> list[tuple[Actor, str]]:
    """Return the agent loop workers that wait or do not answer, with a line each; the longest wait comes first."""
    waits = []
    for actor, sessions in ask_sessions(actors):
        if isinstance(sessions, str):
            waits.append((math.inf, actor, sessions))
        elif sessions.num:
            waits.append((sessions.oldest_s, actor, _told(sessions)))
    waits.sort(key=lambda each: each[0], reverse=True)
    return [(actor, line) for _, actor, line in waits]


def describe_generation(answers: Sequence[OpenSessions | str], *, since_s: float) -> str | None:
    """Return one line about the open sessions of all workers; None if each has begun less than `since_s` ago."""
    known = [each for each in answers if not isinstance(each, str)]
    num_silent = len(answers) - len(known)
    oldest = max(known, key=lambda each: each.oldest_s, default=OpenSessions(0))
    if oldest.oldest_s < since_s and not num_silent:
        return None
    parts = [f"{sum(each.num for each in known)} open sessions"]
    if oldest.num:
        parts.append(f"the oldest for {oldest.oldest_s:.0f} s ({oldest.oldest})")
    if num_silent:
        parts.append(f"{num_silent} agent loop workers do not answer")
    return GENERATING + ", ".join(parts)


def _told(sessions: OpenSessions) -> str:
    places = ", ".join(f"{place} ({num})" for place, num in sessions.places.most_common(MAX_PLACES))
    where = f"; tasks wait in your code at {places}" if places else ""
    return f"{sessions.num} open sessions, the oldest, {sessions.oldest}, for {sessions.oldest_s:.0f} s{where}"


def running_for(task: Task) -> str:
    """Return what a task is, where it runs and for how long."""
    started_s = (task.start_time_ms or task.creation_time_ms or time.time() * 1000) / 1000
    return f"{task.name} of {place_of(task.worker_pid, task.node_id)} for {time.time() - started_s:.0f} s"


def place_of(pid: int | None, node_id: str | None) -> str:
    """Return where a process is."""
    return f"pid {pid} on node {node_ip(node_id)}"
