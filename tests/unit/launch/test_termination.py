"""What SIGTERM does to the driver; tests/e2e/test_runs.py sends one to a whole run."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from verl_tree.launch.run.termination import EXIT_STATUS, AfterRay, ending_on_term
from verl_tree.trainer.starts.checkpoints import END_REQUEST


def config_of(root: Path, *, save_on_term: bool) -> DictConfig:
    return OmegaConf.create({"trainer": {"default_local_dir": str(root)}, "tree": {"save_on_term": save_on_term}})


def terminate() -> None:
    """Send SIGTERM to this process, whose handler then runs."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)


def status_after(config: DictConfig, *body: Callable[[], object]) -> int:
    """Run the calls of a body under the handler, and return the status with which it ends."""

    def run() -> None:
        with ending_on_term(config):
            for call in body:
                call()

    with pytest.raises(SystemExit) as ended:
        run()
    return ended.value.code


def never() -> None:
    pytest.fail("the body goes on")


def test_it_ends_the_body_at_once(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert status_after(config_of(tmp_path, save_on_term=False), terminate, never) == EXIT_STATUS == 143
    assert signal.getsignal(signal.SIGTERM) == before
    assert list(tmp_path.iterdir()) == []


def test_with_the_option_it_asks_the_trainer_and_waits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    request = tmp_path / "checkpoints" / END_REQUEST
    is_asked: list[bool] = []
    config = config_of(tmp_path / "checkpoints", save_on_term=True)
    assert status_after(config, terminate, lambda: is_asked.append(request.exists())) == EXIT_STATUS
    assert is_asked == [True]
    assert not request.exists()
    assert "ends after the step it is in" in capfd.readouterr().err


def test_a_second_one_ends_it_at_once(tmp_path: Path) -> None:
    assert status_after(config_of(tmp_path, save_on_term=True), terminate, terminate, never) == EXIT_STATUS


def test_without_a_signal_nothing_changes_and_an_old_request_is_gone(tmp_path: Path) -> None:
    (tmp_path / END_REQUEST).touch()
    with ending_on_term(config_of(tmp_path, save_on_term=True)):
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyboardInterrupt), ending_on_term(config_of(tmp_path, save_on_term=True)):
        raise KeyboardInterrupt


def test_a_handler_that_ray_sets_is_replaced_before_the_actor_starts(tmp_path: Path) -> None:
    class Runner:
        """An actor class, which notes the handler under which its actor starts."""

        def options(self, **options: str) -> "Runner":
            self.made_with = options
            return self

        def remote(self) -> object:
            return signal.getsignal(signal.SIGTERM)

    with ending_on_term(config_of(tmp_path, save_on_term=False)) as end_on_term:
        ours = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        runner = Runner()
        assert AfterRay(runner, end_on_term).options(runtime_env="nsight").remote() == ours
        assert runner.made_with == {"runtime_env": "nsight"}
