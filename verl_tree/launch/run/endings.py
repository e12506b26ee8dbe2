"""How a training run ends where a traceback would say no more: refused, interrupted, with the cause last, or well.

Nothing is imported here that takes time: the entry point needs this module before its first line.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130
"""The exit status of what Ctrl-C ended, as shells have it."""
LAST_LINES_S = 0.5
"""Ray's thread prints what the processes wrote this much later; Ray waits as long where it ends with the driver."""


@contextmanager
def refused_in_brief() -> Iterator[None]:
    """End the process with the lines of a refusal, and no traceback, unless one is asked for.

    Raises:
        SystemExit: The body raised a ValueError, or an error of Hydra's or OmegaConf's.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        if _wants_traceback():
            raise
        lines = "\n".join(f"  {line}" for line in refusal_lines(error))
        sys.exit(f"Refused; nothing was started.\n{lines}")


def refusal_lines(error: Exception) -> list[str]:
    """Return what an error says; Hydra's has its cause in another one."""
    from hydra.errors import HydraException

    causes = [error, error.__cause__] if isinstance(error, HydraException) else [error]
    return [line for cause in causes if cause is not None for line in str(cause).strip().splitlines()]


@contextmanager
def ended_with_causes() -> Iterator[None]:
    """End the process with the cause as its last lines; a traceback or the ends of logs are printed before.

    Raises:
        SystemExit: A step of the body, or a validation, got no trajectory; or a process failed, died or hung.
    """
    from ray.exceptions import RayError, RayTaskError

    from rollout_hooks.capture.errors import describe_error
    from verl_tree.launch.run.watchdog import RunFailedError
    from verl_tree.trainer.rows.no_trajectory import NoTrajectoryError

    try:
        yield
    except (NoTrajectoryError, RunFailedError, RayError) as error:
        if _wants_traceback():
            raise
        if isinstance(error, NoTrajectoryError):
            # Ray's own message is a traceback. That the error is of Ray's class, too, is hidden from type checkers.
            remote: BaseException = error
            cause, details = str(remote.cause if isinstance(remote, RayTaskError) else error), []
        elif isinstance(error, RunFailedError):
            cause, details = error.cause, [str(error.__cause__ or ""), error.logs]
        else:
            cause, details = describe_error(error), [str(error)]
        print("\n".join(filter(None, details)), file=sys.stderr, flush=True)
        sys.exit(f"The training run has ended: {cause}")


def _wants_traceback() -> bool:
    """Whether the user asks for the tracebacks of Hydra's own refusals."""
    return os.environ.get("HYDRA_FULL_ERROR") == "1"


@contextmanager
def interrupted_in_brief(told: str) -> Iterator[None]:
    """End the process in one line that ends with `told`, not in a traceback, if the body is interrupted.

    Raises:
        SystemExit: The body was interrupted.
    """
    try:
        yield
    except KeyboardInterrupt:
        print(f"Interrupted; {told}", file=sys.stderr, flush=True)
        raise SystemExit(INTERRUPTED) from None


@contextmanager
def ray_stopped() -> Iterator[None]:
    """Stop Ray behind the body: the console still hears its last lines, and the cause of a failure comes after them."""
    import ray

    try:
        yield
    finally:
        if ray.is_initialized():
            time.sleep(LAST_LINES_S)
            ray.shutdown()
