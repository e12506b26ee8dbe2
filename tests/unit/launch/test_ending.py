"""How the process of a training run ends; tests/e2e/test_runs.py ends whole runs."""

import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
from omegaconf import DictConfig, OmegaConf
from ray.exceptions import RayTaskError

from verl_tree.launch.run.ending import (
    INTERRUPTED,
    TERMINATED,
    AfterRay,
    _retries_agents,
    ended_in_brief,
    refused_in_brief,
    resume_hint,
)
from verl_tree.launch.run.watchdog import RunFailedError
from verl_tree.trainer.rows.no_trajectory import NoTrajectoryError
from verl_tree.trainer.starts.checkpoints import END_REQUEST, TRACKER, mark_complete

CAUSES = "step 3 (train): 2 sessions failed\n  2 x KeyError: 'plan' (first: u_0)"


@pytest.fixture(autouse=True)
def in_brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)


def config_of(root: Path, *, save_on_term: bool = False, mode: str = "auto", save_freq: int = 2) -> DictConfig:
    trainer = {"default_local_dir": str(root), "resume_mode": mode, "save_freq": save_freq}
    tree = {"save_on_term": save_on_term, "watchdog": {"enabled": False}}
    return OmegaConf.create({"trainer": trainer, "tree": tree})


def raising(error: BaseException) -> Callable[[], None]:
    def body() -> None:
        raise error

    return body


def terminate() -> None:
    """Send SIGTERM to this process, whose handler then runs."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)


def never() -> None:
    pytest.fail("the body goes on")


def code_after(config: DictConfig, *body: Callable[[], object]) -> str | int | None:
    """Run the calls of a body and return with what the process would exit."""

    def run() -> None:
        with ended_in_brief(config):
            for call in body:
                call()

    with pytest.raises(SystemExit) as ended:
        run()
    assert not ray.is_initialized()
    return ended.value.code


def remote(error: Exception) -> BaseException:
    """Return an error of the task runner as `ray.get` raises it in the driver."""
    cause = pickle.loads(pickle.dumps(error))
    told = f"Traceback (most recent call last):\n  verl\n{error!r}"
    return RayTaskError("run", told, cause, proctitle="p", pid=1, ip="x").as_instanceof_cause()


def test_the_last_lines_are_the_causes_behind_the_hint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(tmp_path)
    assert code_after(config, raising(remote(NoTrajectoryError(CAUSES)))) == f"The training run has ended: {CAUSES}"
    assert capsys.readouterr().err == f"{resume_hint(config)}\n"


def test_the_traceback_of_a_worker_comes_before_its_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error of a worker passes through the task runner."""
    missing = "Error no file named model.safetensors found in directory /models/mine."
    of_worker = remote(OSError(missing))
    assert isinstance(of_worker, RayTaskError)
    of_runner = RayTaskError("run", f"Traceback\n{of_worker}", of_worker, proctitle="p", pid=2, ip="x")
    code = code_after(config_of(tmp_path), raising(of_runner))
    assert code == f"The training run has ended: OSError: {missing}"
    assert capsys.readouterr().err.startswith("Traceback\n")


def test_the_logs_of_a_hang_come_before_its_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = RunFailedError("no Ray task has started", logs="--- last lines")
    failed.__cause__ = remote(KeyError("mine"))
    config = config_of(tmp_path)
    assert code_after(config, raising(failed)) == "The training run has ended: no Ray task has started"
    lines = capsys.readouterr().err.splitlines()
    assert "KeyError('mine')" in lines
    assert lines[-2:] == ["--- last lines", resume_hint(config)]


def test_tracebacks_come_back_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(NoTrajectoryError), ended_in_brief(config_of(tmp_path)):
        raise remote(NoTrajectoryError(CAUSES))


def test_another_error_passes_and_ends_with_the_hint(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with pytest.raises(RuntimeError, match="another") as raised, ended_in_brief(config):
        raise RuntimeError("another")
    assert traceback.format_exception(raised.value)[-1] == f"{resume_hint(config)}\n"


def test_an_interrupt_is_one_line_and_130(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(tmp_path)
    assert code_after(config, raising(KeyboardInterrupt())) == INTERRUPTED == 130
    assert capsys.readouterr().err == f"Interrupted; its processes are stopped.\n{resume_hint(config)}\n"
    with pytest.raises(SystemExit) as ended, refused_in_brief(or_interrupted=True):
        raise KeyboardInterrupt
    assert ended.value.code == INTERRUPTED
    assert capsys.readouterr().err == "Interrupted; nothing was started.\n"
    with pytest.raises(KeyboardInterrupt), refused_in_brief():
        raise KeyboardInterrupt


def test_sigterm_ends_the_body_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, config = signal.getsignal(signal.SIGTERM), config_of(tmp_path)
    assert code_after(config, terminate, never) == TERMINATED == 143
    assert signal.getsignal(signal.SIGTERM) == before
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == f"{resume_hint(config)}\n"


def test_with_the_option_it_asks_the_trainer_and_waits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    request = tmp_path / "checkpoints" / END_REQUEST
    is_asked: list[bool] = []
    config = config_of(tmp_path / "checkpoints", save_on_term=True)
    assert code_after(config, terminate, lambda: is_asked.append(request.exists())) == TERMINATED
    assert is_asked == [True]
    assert not request.exists()
    assert "ends after the step it is in" in capfd.readouterr().err


def test_a_second_one_ends_it_at_once(tmp_path: Path) -> None:
    assert code_after(config_of(tmp_path, save_on_term=True), terminate, terminate, never) == TERMINATED


def test_a_run_that_ends_well_says_nothing_and_an_old_request_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / END_REQUEST).touch()
    with ended_in_brief(config_of(tmp_path, save_on_term=True)):
        assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == ""


def test_a_handler_that_ray_sets_is_replaced_before_the_actor_starts(tmp_path: Path) -> None:
    class Runner:
        """An actor class, which notes the handler under which its actor starts."""

        def options(self, **options: str) -> "Runner":
            self.made_with = options
            return self

        def remote(self) -> object:
            return signal.getsignal(signal.SIGTERM)

    with ended_in_brief(config_of(tmp_path)) as set_handler:
        ours = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        runner = Runner()

        def first() -> dict[str, str]:
            set_handler()
            return {"scheduling_strategy": "SPREAD"}

        assert AfterRay(runner, first).options(runtime_env="nsight").remote() == ours
        assert runner.made_with == {"runtime_env": "nsight", "scheduling_strategy": "SPREAD"}


def save(root: Path, step: int, *, is_complete: bool) -> None:
    folder = root / f"global_step_{step}"
    folder.mkdir()
    (folder / "data.pt").write_text("data")
    if is_complete:
        (root / TRACKER).write_text(str(step))
        mark_complete(folder, step=step)


def test_the_hint_names_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 2, is_complete=True)
    save(tmp_path, 4, is_complete=False)
    there = f"goes on from {tmp_path}/global_step_2."
    assert resume_hint(config_of(tmp_path)) == f"To resume: the same command {there}"
    for mode in ("disable", "resume_path"):
        assert resume_hint(config_of(tmp_path, mode=mode)) == (
            f"To resume: the same command with trainer.resume_mode=auto {there}"
        )


def test_without_a_checkpoint_the_hint_says_so(tmp_path: Path) -> None:
    start = "the same command starts from the beginning."
    assert resume_hint(config_of(tmp_path)) == f"To resume: there is no checkpoint in {tmp_path}; {start}"
    assert resume_hint(config_of(tmp_path, save_freq=-1)) == (
        f"To resume: there is no checkpoint in {tmp_path} (trainer.save_freq=-1 saves none); {start}"
    )


def test_a_broken_tracker_is_no_second_error(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("")
    assert resume_hint(config_of(tmp_path)).startswith(f"To resume: {tmp_path}/{TRACKER} is empty; ")


@pytest.mark.parametrize(
    ("manager", "sampler", "retries"),
    [
        ("rollout_hooks.worker.TreeAgentLoopManager", None, True),
        ("rollout_hooks.worker.TreeAgentLoopManager", "mine.py", False),
        ("mine.Manager", None, False),
    ],
)
def test_dead_agent_loop_workers_are_left_to_our_manager_and_buffer(
    manager: str, sampler: str | None, retries: bool
) -> None:
    rollout = {"agent": {"agent_loop_manager_class": manager}}
    trainer = {"v1": {"sampler": {"custom_sampler": {"path": sampler}}}}
    assert _retries_agents(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "trainer": trainer})) is retries
