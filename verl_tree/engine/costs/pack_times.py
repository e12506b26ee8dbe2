"""Measured times of the steps of a mini-batch, and the work that each time belongs to."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from verl_tree.cost.fit import CostFitter
from verl_tree.cost.model import Work


class PackClock:
    """A clock for model calls that run one after another.

    On a GPU (`device_type` is `cuda`) it uses events, so that the host does not wait for each call.
    """

    def __init__(self, device_type: str) -> None:
        self._is_cuda = device_type == "cuda"
        self._seconds: list[float] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._started_s = time.process_time()

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure one call, the body of the `with` block."""
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
        """Return the times of the calls so far. On a GPU this waits for the device once."""
        if self._is_cuda:
            torch.cuda.synchronize()
        return self._seconds + [started.elapsed_time(ended) / 1000 for started, ended in self._events]

    def busy_s(self) -> float:
        """Return the processor seconds since the clock was made; 0 on a GPU, whose work does not show in them."""
        return 0.0 if self._is_cuda else time.process_time() - self._started_s


def learn_costs(fitter: CostFitter, works_of_steps: Sequence[Sequence[Work]], *, seconds: Sequence[float]) -> None:
    """Add the steps of one mini-batch to the measurements and fit the cost model again.

    `works_of_steps` has the work of each rank in each step. FSDP's collectives make a step last as long on every rank
    as on the dearest. So its time, measured on this rank, is attributed to the dearest work of any rank.
    """
    for works, step_s in zip(works_of_steps, seconds, strict=True):
        dearest = max(works, key=fitter.model.predict)
        if dearest != Work():  # where no rank has rows, one idle step still runs
            fitter.add(dearest, seconds=step_s)
    fitter.fit()
