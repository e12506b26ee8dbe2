"""The watchdog's own decisions; what it sees of a real cluster is in tests/e2e/test_watchdog.py."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from ray.core.generated.common_pb2 import ActorDeathCause
from ray.exceptions import RpcError
from ray.util.state.common import ActorState, protobuf_message_to_dict

from rollout_hooks.capture.running import OpenSessions
from verl_tree.config import WatchdogConfig
from verl_tree.launch.run.actors import AGENT_LOOP_WORKER, describe_generation
from verl_tree.launch.run.watchdog import INTERRUPT, Watchdog, _engine_processes, _is_running, _Watch, watch_run


def actor(
    actor_id: str, *, state: str = "DEAD", reason: str | None = None, pid: int = 1, **death: dict[str, Any]
) -> ActorState:
    """Return the state of an actor as Ray lists it; `death` is the content of Ray's message about its death."""
    if reason is not None:
        context = {"reason": reason, "error_message": f"message of {actor_id}", "node_ip_address": "node"}
        death = {"actor_died_error_context": context}
    return ActorState(
        actor_id=actor_id,
        class_name=f"Class{actor_id}",
        state=state,
        job_id="01",
        name="",
        node_id="n",
        pid=pid,
        ray_namespace="",
        serialized_runtime_env=None,
        required_resources=None,
        death_cause=protobuf_message_to_dict(ActorDeathCause(**death), []) if death else None,
        is_detached=False,
        placement_group_id=None,
        repr_name="",
        num_restarts=0,
        num_restarts_due_to_lineage_reconstruction=0,
        num_restarts_due_to_node_preemption=0,
        call_site=None,
        label_selector=None,
    )


FORKS = f'{sys.executable} -c "import os, time; os.fork(); time.sleep(60)"'


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen]:
    """Start a real process that calls itself as vLLM's do, by a shell: a grandchild of this process."""
    program = getattr(request, "param", "sleep 60")
    shell = subprocess.Popen(["bash", "-c", f"bash -c 'exec -a VLLM::EngineCore {program}' & wait"])
    yield shell
    for child in psutil.Process(shell.pid).children(recursive=True):
        child.kill()
    shell.kill()
    shell.wait()


def test_wanted_deaths_are_no_findings() -> None:
    wanted = [actor(reason, reason=reason) for reason in ("RAY_KILL", "OUT_OF_SCOPE", "REF_DELETED")]
    actors = [*wanted, actor("c", state="ALIVE"), actor("d")]
    assert Watchdog(WatchdogConfig())._dead_actor(actors) is None


def test_the_cause_comes_before_its_consequences() -> None:
    actors = [actor("a", reason="OWNER_DIED"), actor("b", reason="WORKER_DIED", pid=77), actor("c", state="ALIVE")]
    finding = Watchdog(WatchdogConfig())._dead_actor(actors)
    assert finding is not None
    assert finding.cause.startswith("the process of Classb (pid 77 on node node) died: message of b")
    assert [each.actor_id for each in finding.actors] == ["b", "a"]


def test_a_dead_agent_loop_worker_is_left_to_its_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not one that cannot start, or that Ray killed for memory: it would happen again."""
    monkeypatch.setattr(ray, "nodes", list)
    dead = actor("w", reason="WORKER_DIED")
    dead.name = f"{AGENT_LOOP_WORKER}0_1a2b"
    broken = actor("x", creation_task_failure_context={"formatted_exception_string": "KeyError: 'mine'"})
    broken.name = f"{AGENT_LOOP_WORKER}1_1a2b"
    retrying = Watchdog(WatchdogConfig(), retries_agents=True)
    assert retrying._dead_actor([dead]) is None
    assert Watchdog(WatchdogConfig())._dead_actor([dead]) is not None
    finding = retrying._dead_actor([dead, broken])
    assert finding is not None
    assert finding.actors == (broken,)
    hungry = actor("y", oom_context={"error_message": "the node is low on memory"})
    hungry.name = dead.name
    assert retrying._dead_actor([hungry]) is not None


@pytest.mark.parametrize(
    ("death", "cause"),
    [
        (
            {"oom_context": {"error_message": "Task was killed due to the node running low on memory."}},
            r"the process of Classa \(pid 7 on node there\) died: Task was killed due to .* low on memory\.\n"
            r"To need less .*agent\.num_workers, .*optimizer_offload of the actor's engine\)$",
        ),
        (
            {"runtime_env_failed_context": {"error_message": "no such package"}},
            "the actor Classa could not start: no such package$",
        ),
        (
            {"actor_unschedulable_context": {"error_message": "its bundle is gone"}},
            "the actor Classa could not start: its bundle is gone$",
        ),
        (
            {"creation_task_failure_context": {"formatted_exception_string": "KeyError: 'mine'\n"}},
            "the actor Classa could not start: KeyError: 'mine'$",
        ),
        (
            {"actor_died_error_context": {"reason": "UNSPECIFIED", "error_message": "gone", "node_ip_address": "far"}},
            r"the process of Classa \(pid 7 on node far\) died: gone$",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_every_death_that_nobody_asked_for_is_told(
    death: dict[str, Any], cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray says one of several things about a death, each in a field of its own."""
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": "n", "NodeManagerAddress": "there"}])
    finding = Watchdog(WatchdogConfig())._dead_actor([actor("a", pid=7, **death)])
    assert finding is not None
    assert re.match(cause, finding.cause), finding.cause


def test_a_question_of_the_watchdog_is_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that does not answer has a new running task after each question."""
    questions = iter("abc")

    def ask(*_: object, **__: object) -> list[SimpleNamespace]:
        names = {"t": "TaskRunnerV1.run", next(questions): "AgentLoopWorkerTQ.open_sessions"}
        place = {"actor_id": "t", "node_id": "n", "worker_pid": 1, "creation_time_ms": 1, "start_time_ms": 1}
        return [SimpleNamespace(task_id=each, name=name, **place) for each, name in names.items()]

    monkeypatch.setattr("verl_tree.launch.run.watchdog._ask", ask)
    monkeypatch.setattr(ray, "nodes", list)
    watchdog = Watchdog(WatchdogConfig(timeout_s=60.0))
    assert watchdog._hang([]) is None
    watchdog._changed_at -= 61.0
    hang = watchdog._hang([])
    assert hang is not None
    assert "waiting: TaskRunnerV1.run of pid 1 on node n for" in hang.cause


def test_a_generation_is_told_once_a_session_is_open_for_long() -> None:
    first, second = OpenSessions(8, "u_0 of loop mine", 64.4), OpenSessions(4, "v_1 of loop mine", 59.0)
    told = "generating: 12 open sessions, the oldest for 64 s (u_0 of loop mine)"
    assert describe_generation([second, first, OpenSessions(0)], since_s=60.0) == told
    assert describe_generation([second, OpenSessions(0)], since_s=60.0) is None
    assert describe_generation([], since_s=60.0) is None
    silent = "generating: 4 open sessions, the oldest for 59 s (v_1 of loop mine), 1 agent loop workers do not answer"
    assert describe_generation(["does not answer", second], since_s=60.0) == silent
    nothing = "generating: 0 open sessions, 1 agent loop workers do not answer"
    assert describe_generation(["does not answer"], since_s=60.0) == nothing


@pytest.mark.parametrize("engine", [FORKS], indirect=True, ids=["forks"])
def test_what_an_engine_forks_is_no_engine(engine: subprocess.Popen) -> None:
    """Else the run would end when a program does that vLLM was starting while the watchdog looked."""
    shell = psutil.Process(engine.pid)

    def titled() -> list[int]:
        return [each.pid for each in shell.children(recursive=True) if each.cmdline()[:1] == ["VLLM::EngineCore"]]

    while len(titled()) < 2:
        assert engine.poll() is None
        time.sleep(0.05)
    core, helper = titled()
    assert psutil.Process(helper).ppid() == core
    assert list(_engine_processes(actor("s", state="ALIVE", pid=shell.pid))) == [core]


def test_engine_processes_are_found_and_missed(engine: subprocess.Popen) -> None:
    server = actor("s", state="ALIVE", pid=engine.pid)
    while not (found := _engine_processes(server)):
        assert engine.poll() is None
        time.sleep(0.05)
    (process,) = found.values()
    assert process.title.startswith("VLLM::EngineCore")
    assert process.actor_id == "s"
    assert _is_running(process.process)
    os.kill(process.process.pid, signal.SIGKILL)
    process.process.wait()
    assert not _is_running(process.process)
    assert _engine_processes(actor("s", state="ALIVE", pid=2**22 + 1)) == {}


@pytest.mark.parametrize(
    ("later", "cause"),
    [
        ([actor("s", reason="OWNER_DIED"), actor("t", reason="WORKER_DIED")], "the process of Classt (pid 1 on"),
        ([actor("s", state="ALIVE"), actor("t", state="ALIVE")], "the vLLM process VLLM::EngineCore"),
    ],
    ids=["ended with the trainer", "ended by itself"],
)
def test_an_engine_that_is_gone_is_the_cause_only_if_no_actor_died(
    engine: subprocess.Popen, later: list[ActorState], cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray said that all actors live; then trainer and engine ended, and only then the engine was looked at."""
    server = actor("s", state="ALIVE", pid=engine.pid)
    while not (found := _engine_processes(server)):
        assert engine.poll() is None
        time.sleep(0.05)
    (core,) = found.values()
    answers = iter([[server, actor("t", state="ALIVE")], later])

    def ask(*_: object) -> list[ActorState]:
        if _is_running(core.process):
            core.process.kill()
            core.process.wait()
        return next(answers)

    watchdog = Watchdog(WatchdogConfig())
    watchdog._engines = found
    monkeypatch.setattr("verl_tree.launch.run.watchdog._ask", ask)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "n"))
    finding = watchdog.look()
    assert finding is not None
    assert finding.cause.startswith(cause)


def test_a_head_that_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that fails for a moment must not end the watchdog, which tells of nodes that are lost."""

    def ask(*_: object) -> list[ActorState]:
        raise RpcError("Deadline Exceeded")

    monkeypatch.setattr("verl_tree.launch.run.watchdog._ask", ask)
    assert not _Watch(WatchdogConfig()).look()


def test_disabled_watchdog_starts_nothing() -> None:
    before = threading.active_count()
    with watch_run(WatchdogConfig(enabled=False)):
        assert threading.active_count() == before


def test_watching_leaves_no_trace_and_hides_no_error() -> None:
    handler = signal.getsignal(INTERRUPT)
    before = threading.active_count()

    def watched(error: BaseException) -> None:
        with watch_run(WatchdogConfig(poll_s=0.01)):
            assert threading.active_count() == before + 1
            raise error

    with pytest.raises(KeyError, match="mine"):
        watched(KeyError("mine"))
    with pytest.raises(KeyboardInterrupt):
        watched(KeyboardInterrupt())
    assert threading.active_count() == before
    assert signal.getsignal(INTERRUPT) == handler
