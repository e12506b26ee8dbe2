"""Measured times of model calls, and which pack of which rank each of them belongs to."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest

import torch

from verl_tree.cost.fit import CostFitter
from verl_tree.cost.model import Work


class PackClock:
    """Seconds of model calls, one after another; on a GPU by events, so that the host does not wait for each.

    Args:
        device_type: `cuda` or `cpu`.
    """

    def __init__(self, device_type: str) -> None:
        self._is_cuda = device_type == "cuda"
        self._seconds: list[float] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._started_s = time.process_time()

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure what runs inside."""
        if not self._is_cuda:
            started_s = time.perf_counter()
            yield
            self._seconds.append(time.perf_counter() - started_s)
            return
        started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        started.record()
        yield
        ended.record()
        self._events.append((started, ended))

    def seconds(self) -> list[float]:
        """Return the times measured so far; waits for the device once."""
        if self._is_cuda:
            torch.cuda.synchronize()
        return self._seconds + [started.elapsed_time(ended) / 1000 for started, ended in self._events]

    def busy_s(self) -> float:
        """Return the processor seconds since the clock was made; 0 on a GPU, whose work they do not show."""
        return 0.0 if self._is_cuda else time.process_time() - self._started_s


def learn_costs(fitter: CostFitter, works_of_ranks: Sequence[Sequence[Work]], *, seconds: Sequence[float]) -> None:
    """Add the steps of one mini-batch to the measurements and fit the cost model again.

    FSDP's collectives make every model call last as long as that of the dearest rank. So the time of a step belongs to
    the dearest pack that any rank ran in it.

    Args:
        fitter: What learns.
        works_of_ranks: The packs of each rank, in the order in which they ran.
        seconds: The time of each step, as measured on this rank.
    """
    steps = zip_longest(*works_of_ranks, fillvalue=Work())
    # Not strict: without any pack a step still runs, on nothing.
    for works, step_s in zip(steps, seconds, strict=False):
        fitter.add(max(works, key=fitter.model.predict), seconds=step_s)
    fitter.fit()
