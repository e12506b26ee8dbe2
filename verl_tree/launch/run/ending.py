"""How a training run ends, whatever ends it: what the process says last, and its exit status.

| what ends it | what is said last | status |
|---|---|---|
| settings that cannot work | the reasons | 1 |
| a step without a trajectory; a process that failed, died or hung | its traceback or logs, the hint, the cause | 1 |
| another error | its traceback, which ends with the hint | 1 |
| Ctrl-C | "Interrupted" and the hint | 130 |
| SIGTERM, at once or after a step with a checkpoint (`tree.save_on_term`) | the hint | 143 |

The hint says how to resume. Nothing is imported here that takes time: the entry point needs this module before its
first line.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig

INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
"""What a shell reports of a process that a signal ended; a scheduler must not take the run for finished."""
LAST_LINES_S = 0.5
"""Ray's thread prints what the processes wrote this much later; Ray waits as long where it ends with the driver."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What a process says when it ends, and its exit status; or, with status 1, its very last lines."""

    message: str
    status: int | str


def refusals() -> tuple[type[Exception], ...]:
    """Return the errors that say that a command cannot work."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    return ValueError, HydraException, OmegaConfBaseException


def refusal_lines(error: Exception) -> list[str]:
    """Return what an error says; Hydra's has its cause in another one."""
    from hydra.errors import HydraException

    causes = [error, error.__cause__] if isinstance(error, HydraException) else [error]
    return [line for cause in causes if cause is not None for line in str(cause).strip().splitlines()]


@contextmanager
def refused_in_brief(*, or_interrupted: bool = False) -> Iterator[None]:
    """End the process with the lines of a refusal, or of an interrupt, if the body ends so; it starts nothing.

    Raises:
        SystemExit: The body raised one of `refusals`, and no traceback is asked for; or it was interrupted.
    """
    try:
        yield
    except KeyboardInterrupt:
        if not or_interrupted:
            raise
        print("Interrupted; nothing was started.", file=sys.stderr, flush=True)
        raise SystemExit(INTERRUPTED) from None
    except refusals() as error:
        if _wants_traceback():
            raise
        lines = "\n".join(f"  {line}" for line in refusal_lines(error))
        sys.exit(f"Refused; nothing was started.\n{lines}")


@contextmanager
def ended_in_brief(config: "DictConfig") -> Iterator[Callable[[], object]]:
    """End the process as the table above says if the body, which starts Ray and trains, does not come to its end.

    The first of these that knows decides: the watchdog, which explains errors and its own interrupt; SIGTERM; Ctrl-C.
    Then Ray is stopped, so that the console still hears its last lines; the ending is told behind them.

    The body must run in the main thread. Yields a function to be called once Ray has started: `ray.init` (Ray 2.60)
    sets a handler of SIGTERM under which the process would abort while it waits for Ray.

    Raises:
        SystemExit: The process shall end so.
    """
    import ray

    from verl_tree.config import TreeConfig
    from verl_tree.launch.run.watchdog import watch_run

    watching = watch_run(TreeConfig.from_mapping(config.tree).watchdog, retries_agents=_retries_agents(config))
    try:
        with _ended_by_term(config) as set_handler, watching:
            yield set_handler
        return
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        ending = _ending_of(error)
        if ending is None:
            error.add_note(resume_hint(config))
            raise
    finally:
        if ray.is_initialized():
            time.sleep(LAST_LINES_S)
            ray.shutdown()
    print("\n".join(filter(None, [ending.message, resume_hint(config)])), file=sys.stderr, flush=True)
    sys.exit(ending.status)


def _retries_agents(config: "DictConfig") -> bool:
    """Whether dead agent loop workers are started anew: by our manager, which only our replay buffers ask to look."""
    from omegaconf import OmegaConf

    from verl_tree.launch.checks.code import MANAGER_KEY, TREE_MANAGER

    sampler = OmegaConf.select(config, "trainer.v1.sampler.custom_sampler.path")
    return OmegaConf.select(config, MANAGER_KEY) == TREE_MANAGER and sampler is None


def _ending_of(error: BaseException) -> Ending | None:
    """Return how an error ends the process; None if its traceback says more."""
    from ray.exceptions import RayError, RayTaskError

    from rollout_hooks.capture.errors import describe_error
    from verl_tree.launch.run.watchdog import RunFailedError
    from verl_tree.trainer.rows.no_trajectory import NoTrajectoryError

    if isinstance(error, SystemExit):
        return Ending("", error.code or 0)
    if isinstance(error, KeyboardInterrupt):
        return Ending("Interrupted; its processes are stopped.", INTERRUPTED)
    if _wants_traceback():
        return None
    if isinstance(error, NoTrajectoryError):
        # Ray's own message is a traceback. That the error is of Ray's class, too, is hidden from type checkers.
        remote: BaseException = error
        message, cause = "", str(remote.cause if isinstance(remote, RayTaskError) else error)
    elif isinstance(error, RunFailedError):
        message, cause = "\n".join(filter(None, [str(error.__cause__ or ""), error.logs])), error.cause
    elif isinstance(error, RayError):
        message, cause = str(error), describe_error(error)
    else:
        return None
    return Ending(message, f"The training run has ended: {cause}")


def _wants_traceback() -> bool:
    """Whether the user asks for the tracebacks of Hydra's own refusals."""
    return os.environ.get("HYDRA_FULL_ERROR") == "1"


def resume_hint(config: "DictConfig") -> str:
    """Return a line with the newest checkpoint of a run that was interrupted or failed, and how to go on from it."""
    from verl_tree.trainer.starts.checkpoints import choose_start, folder_of

    root, mode = folder_of(config), config.trainer.resume_mode
    try:
        checkpoint = choose_start(root).checkpoint
    except ValueError as error:
        return f"To resume: {error}."
    if checkpoint is None:
        saves = "" if config.trainer.save_freq > 0 else f" (trainer.save_freq={config.trainer.save_freq} saves none)"
        return f"To resume: there is no checkpoint in {root}{saves}; the same command starts from the beginning."
    how = "the same command" if mode == "auto" else "the same command with trainer.resume_mode=auto"
    return f"To resume: {how} goes on from {checkpoint.folder}."


@contextmanager
def _ended_by_term(config: "DictConfig") -> Iterator[Callable[[], object]]:
    """End the body on SIGTERM as `tree.save_on_term` says. Yields a function that sets the handler again.

    The trainer runs in another process, perhaps on another machine, so it is asked by a file beside the checkpoints.

    Raises:
        SystemExit: SIGTERM came; with `TERMINATED`.
    """
    from verl_tree.trainer.starts.checkpoints import END_REQUEST, folder_of

    request = folder_of(config) / END_REQUEST
    request.unlink(missing_ok=True)
    num_signals = 0

    def end(_signum: int, _frame: FrameType | None) -> None:
        nonlocal num_signals
        num_signals += 1
        if not config.tree.save_on_term or num_signals > 1:
            # This is the only exception by which a signal handler can end the wait of `ray.get`.
            raise KeyboardInterrupt
        request.parent.mkdir(parents=True, exist_ok=True)
        request.touch()
        # Not `print`: the signal may have interrupted one.
        os.write(2, b"SIGTERM: the training run ends after the step it is in; a second one ends it at once\n")

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield lambda: signal.signal(signal.SIGTERM, end)
    except KeyboardInterrupt:
        if not num_signals:
            raise
    finally:
        signal.signal(signal.SIGTERM, previous)
        request.unlink(missing_ok=True)
    if num_signals:
        sys.exit(TERMINATED)


@dataclass(frozen=True, slots=True)
class AfterRay:
    """A task runner class for verl's `run_ppo` that calls `first` between Ray's start and the actor's.

    `first` returns Ray's options for the actor, beside those that verl gives.
    """

    runner: Any
    first: Callable[[], Mapping[str, Any]]
    given: Mapping[str, Any] = field(default_factory=dict)

    def options(self, **options: Any) -> "AfterRay":
        """Return the class with Ray's options."""
        return AfterRay(self.runner, self.first, options)

    def remote(self) -> Any:
        """Start the actor."""
        return self.runner.options(**self.given, **self.first()).remote()
