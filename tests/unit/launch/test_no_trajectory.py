"""A training run in which every session failed ends with the causes, not with a traceback of verl's."""

import pickle

import pytest
import ray
from ray.exceptions import RayTaskError

from verl_tree.launch.endings import ended_with_causes
from verl_tree.trainer.no_trajectory import NoTrajectoryError

CAUSES = "step 3 (train): 2 sessions failed\n  2 x KeyError: 'plan' (first: u_0)"


def of_the_task_runner() -> BaseException:
    """Return the error as `ray.get` raises it in the driver."""
    cause = pickle.loads(pickle.dumps(NoTrajectoryError(CAUSES)))
    error = RayTaskError("run", "Traceback (most recent call last):\n  verl", cause, proctitle="p", pid=1, ip="x")
    return error.as_instanceof_cause()


def test_the_last_lines_are_the_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    with pytest.raises(SystemExit) as ended, ended_with_causes():
        raise of_the_task_runner()
    assert ended.value.code == f"The training run has ended: {CAUSES}"
    assert not ray.is_initialized()


def test_tracebacks_come_back_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(NoTrajectoryError), ended_with_causes():
        raise of_the_task_runner()


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="another"), ended_with_causes():
        raise RuntimeError("another")
