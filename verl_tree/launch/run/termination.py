"""What SIGTERM does to the driver of a training run: it ends at once, or after its step with a checkpoint.

Schedulers send it before they kill. The trainer runs in another process, perhaps on another machine, so it is asked by
a file beside the checkpoints.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from omegaconf import DictConfig

from verl_tree.trainer.starts.checkpoints import END_REQUEST, folder_of

EXIT_STATUS = 128 + signal.SIGTERM
"""What a shell reports of a process that SIGTERM ended; a scheduler must not take the run for finished."""


@contextmanager
def ending_on_term(config: DictConfig) -> Iterator[Callable[[], object]]:
    """End the body on SIGTERM as `tree.save_on_term` says; the body must run in the main thread.

    Yields a function that sets the handler again: Ray (2.60) sets one of its own in `ray.init`, under which the process
    would abort while it waits for Ray.

    Raises:
        SystemExit: SIGTERM came; with `EXIT_STATUS`.
    """
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
        sys.exit(EXIT_STATUS)


@dataclass(frozen=True, slots=True)
class AfterRay:
    """A task runner class for verl's `run_ppo` that calls `first` between Ray's start and the actor's."""

    runner: Any
    first: Callable[[], object]

    def options(self, **options: Any) -> "AfterRay":
        """Return the class with Ray's options."""
        return AfterRay(self.runner.options(**options), self.first)

    def remote(self) -> Any:
        """Start the actor."""
        self.first()
        return self.runner.remote()
