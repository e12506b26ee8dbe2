"""The end of a trial that does not end: what the agent has done so far, and at which line it waits."""

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rollout_hooks.capture.tracebacks import running_place, waiting_places


@contextmanager
def deadline(timeout_s: float, *, describe: Callable[[str], str]) -> Iterator[None]:
    """End the process with status 1 if the block, which is inside a running event loop, takes longer.

    Printed is what `describe` makes of the cause. A thread does it, since an agent may hold the loop or swallow its
    own cancellation; and it ends the process, since Python would wait for threads that the agent has started.
    """
    loop, thread = asyncio.get_running_loop(), threading.get_ident()

    def give_up() -> None:
        places = list(waiting_places(asyncio.all_tasks(loop)))
        running = running_place(sys._current_frames()[thread])
        at = ", ".join(dict.fromkeys([*places, *filter(None, [running])])) or "code of libraries only"
        print(describe(f"no end after {timeout_s:g} s (--timeout); it waits at {at}"), flush=True)
        os._exit(1)

    timer = threading.Timer(timeout_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
