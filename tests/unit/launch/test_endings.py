"""A training run that fails ends with the cause, behind tracebacks and logs."""

import pickle

import pytest
import ray
from ray.exceptions import RayTaskError

from verl_tree.launch.run.endings import ended_with_causes
from verl_tree.launch.run.watchdog import RunFailedError
from verl_tree.trainer.rows.no_trajectory import NoTrajectoryError

CAUSES = "step 3 (train): 2 sessions failed\n  2 x KeyError: 'plan' (first: u_0)"


def remote(error: Exception) -> BaseException:
    """Return an error of the task runner as `ray.get` raises it in the driver."""
    cause = pickle.loads(pickle.dumps(error))
    told = f"Traceback (most recent call last):\n  verl\n{error!r}"
    return RayTaskError("run", told, cause, proctitle="p", pid=1, ip="x").as_instanceof_cause()


def test_the_last_lines_are_the_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    with pytest.raises(SystemExit) as ended, ended_with_causes():
        raise remote(NoTrajectoryError(CAUSES))
    assert ended.value.code == f"The training run has ended: {CAUSES}"
    assert not ray.is_initialized()


def test_tracebacks_come_back_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(NoTrajectoryError), ended_with_causes():
        raise remote(NoTrajectoryError(CAUSES))


def test_the_traceback_of_a_worker_comes_before_its_cause(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error of a worker passes through the task runner."""
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    missing = "Error no file named model.safetensors found in directory /models/mine."
    of_worker = remote(OSError(missing))
    assert isinstance(of_worker, RayTaskError)
    of_runner = RayTaskError("run", f"Traceback\n{of_worker}", of_worker, proctitle="p", pid=2, ip="x")
    with pytest.raises(SystemExit) as ended, ended_with_causes():
        raise of_runner
    assert ended.value.code == f"The training run has ended: OSError: {missing}"
    assert capsys.readouterr().err.startswith("Traceback\n")


def test_the_logs_of_a_hang_come_before_its_cause(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    with pytest.raises(SystemExit) as ended, ended_with_causes():
        raise RunFailedError("no Ray task has started", logs="--- last lines") from remote(KeyError("mine"))
    assert ended.value.code == "The training run has ended: no Ray task has started"
    lines = capsys.readouterr().err.splitlines()
    assert "KeyError('mine')" in lines
    assert lines[-1] == "--- last lines"


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="another"), ended_with_causes():
        raise RuntimeError("another")
