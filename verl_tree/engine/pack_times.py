"""Measured times of model calls, and the cost model that is fitted to them.

Ranks run in step: FSDP's collectives make every model call last as long as that of the dearest rank. So a measured time
is attributed to the dearest pack of any rank in that step. Where runs must repeat bit for bit (verl's
`full_determinism`) nothing is measured, because times would decide which rank computes what.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest

import torch

from verl_tree.cost.fit import CostFitter
from verl_tree.cost.model import CostModel, Work


class PackClock:
    """Seconds of model calls, one after another; on a GPU by events, so that the host does not wait for each."""

    def __init__(self, device_type: str) -> None:
        """Args: device_type: `cuda` or `cpu`."""
        self._is_cuda = device_type == "cuda"
        self._marks: list[tuple[float, float]] | list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measures what runs inside."""
        started = self._mark()
        yield
        self._marks.append((started, self._mark()))

    def _mark(self) -> "float | torch.cuda.Event":
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> list[float]:
        """The times measured so far; waits for the device once."""
        if not self._is_cuda:
            return [ended - started for started, ended in self._marks]
        torch.cuda.synchronize()
        return [started.elapsed_time(ended) / 1000 for started, ended in self._marks]


class OnlineCost:
    """The cost model of one kind of model call (with or without a backward), fitted as packs are measured.

    Attributes:
        model: the latest fit; None before there is one.
    """

    def __init__(self) -> None:
        """Starts without measurements."""
        self.model: CostModel | None = None
        self._fitter = CostFitter()

    @property
    def current(self) -> CostModel:
        """The latest fit, or the prior."""
        return CostModel.prior() if self.model is None else self.model

    def learn(self, works_of_ranks: Sequence[Sequence[Work]], *, seconds: Sequence[float]) -> None:
        """Adds one mini-batch and fits again.

        Args:
            works_of_ranks: per rank its packs, in the order in which they ran.
            seconds: of every step, as measured on this rank.
        """
        model = self.current
        steps = zip_longest(*works_of_ranks, fillvalue=Work())
        for works, step_s in zip(steps, seconds, strict=False):  # without any pack a step still runs, on nothing
            self._fitter.add(max(works, key=model.predict), seconds=step_s)
        fitted = self._fitter.fit()
        self.model = self.model if fitted is None else fitted

    def metrics(self, *, prefix: str) -> dict[str, float]:
        """Coefficients and the fit's relative error; nothing before the first fit."""
        if self.model is None:
            return {}
        return self.model.as_metrics(prefix) | {f"{prefix}/relative_error": self._fitter.relative_error()}
