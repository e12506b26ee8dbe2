"""Measures the points of por.py with one model at a time, and writes what it finds to a log.

Whatever a path raises is a result: it is written, what it held is freed, and the next path runs. Only a device that
does not answer any more ends the benchmark. Started again, it goes on behind the path that did this.
"""

import argparse
import gc
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from harness import Times
from por_log import Clock, RunLog
from por_models import TOO_LARGE_WITH_STEP, model_flops, new_model, peak_flops
from por_paths import Case, Path, errors
from por_rows import SHAPES, Rows, drawn_rows, shape_rows, stored_rows
from transformers import PreTrainedModel

from verl_tree.functional.memory import peak_bytes

NUM_ERROR_LAYERS = 2
SCORE_AND_GRADIENT_BYTES = 8

MEMORY_KINDS = ("memory", "checkpointed memory")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Point:
    """Paths that are measured together, on a drawn tree of that POR, on a shape or on the trees stored in a file.

    Attributes:
        kind: What is measured: times ("run"), errors, or the peak of memory, without and with gradient checkpointing.
    """

    model: str
    por: float
    paths: tuple[str, ...]
    kind: Literal["run", "errors", "memory", "checkpointed memory"] = "run"
    stored: pathlib.Path | None = None
    shape: str = "drawn"

    @property
    def key(self) -> dict[str, Any]:
        """What a record of this point is found by."""
        trees = self.shape if self.stored is None else self.stored.stem
        return {"kind": self.kind, "model": self.model, "trees": trees, "por": self.por}


class Benchmark:
    """Measures points, as the options of por.py say."""

    def __init__(self, options: argparse.Namespace, log: RunLog) -> None:
        self._options, self._log, self._clock = options, log, Clock(options.seconds)
        self._device, self._dtype = torch.device(options.device), getattr(torch, options.dtype)
        self._is_cuda = self._device.type == "cuda"
        self._peak_flops = peak_flops(self._device, peak_tflops=options.peak_tflops)
        self._model: PreTrainedModel | None = None
        self._model_name: str | None = None
        self._optimizer: torch.optim.Optimizer | None = None

    def measure(self, point: Point) -> None:
        """Measure what is missing of a point, if there is time."""
        left = {path: num_runs for path in point.paths if (num_runs := self._num_runs_left(point, path)) > 0}
        if not left or not self._clock.allows(0):
            return
        if point.kind == "errors":
            self._measure_errors(point, list(left))
        elif point.kind in MEMORY_KINDS:
            self._measure_memory(point, list(left))
        else:
            self._measure_times(point, left)

    def _num_runs_left(self, point: Point, path: str) -> int:
        found = self._log.find(**point.key, path=path)
        if any("not_run" in record for record in found):
            return 0
        if point.kind != "run":
            return 0 if found else 1
        return self._options.repetitions - sum(record["repetition"] > 0 for record in found)

    def _measure_times(self, point: Point, left: dict[str, int]) -> None:
        case = self._attempt(point, list(left), lambda: self._case(self._timed_model(point.model), point))
        if case is None:
            return
        paths = {name: path for name in left if (path := self._attempt(point, [name], partial(case.path, name)))}
        for run in range(max(left.values()) + 1):  # the first one warms up
            for name, path in list(paths.items()):
                flops = model_flops(case.model, path.counts)
                if run > left[name] or not self._clock.allows(flops):
                    continue
                repetition = 0 if run == 0 else self._options.repetitions - left[name] + run
                self._say(point, name, f"run {repetition}")
                measure = partial(self._run, point, path, model=case.model, repetition=repetition, flops=flops)
                if not self._attempt(point, [name], measure):
                    del paths[name]

    def _run(self, point: Point, path: Path, *, model: PreTrainedModel, repetition: int, flops: float) -> bool:
        """Run a path once, and write what it took unless it warms up. Return True."""
        model.zero_grad(set_to_none=True)
        times, warms_up = Times(), repetition == 0

        def update() -> None:
            with times.measure(is_cuda=self._is_cuda):
                path.gradients(is_short=warms_up)
                if self._optimizer is not None:
                    self._optimizer.step()

        held = sum(weight.nbytes for weight in model.parameters())
        if self._is_cuda:
            held = torch.cuda.memory_allocated(self._device)
        # On a CPU a profiler finds the peak, which costs time.
        peak = peak_bytes(update, device=self._device) if self._is_cuda else update()
        if warms_up:
            return True
        (seconds,), (cpu_s,) = times.wall_s, times.cpu_s
        self._clock.ran(flops, seconds=seconds)
        self._write(
            point,
            path.name,
            repetition=repetition,
            wall_s=seconds,
            cpu_s=cpu_s,
            load=os.getloadavg()[0],
            held_bytes=held,
            peak_bytes=peak,
            num_calls=path.num_calls,
            capacity=path.capacity,
            num_tokens=path.counts.num_tokens,
            num_pairs=path.counts.num_pairs,
            flops=flops,
            mfu=None if self._peak_flops is None else flops / seconds / self._peak_flops,
            attention=path.attention,
            planning_s=path.planning_s,
        )
        return True

    def _measure_memory(self, point: Point, left: list[str]) -> None:
        """Write the peak of each path above weights and gradients, and what of it is known: scores and a store."""
        case = self._attempt(point, left, lambda: self._case(self._timed_model(point.model), point))
        if case is None:
            return
        is_checkpointed = point.kind == MEMORY_KINDS[1]

        def measure(path_name: str) -> bool:
            path = case.path(path_name)
            _checkpoint(case.model, is_checkpointed)
            for parameter in case.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            case.store_bytes = 0
            peak = peak_bytes(path.gradients, device=self._device)
            self._write(
                point,
                path_name,
                peak_bytes=peak,
                expansion_bytes=SCORE_AND_GRADIENT_BYTES * case.forest.num_flat_tokens,
                store_bytes=case.store_bytes,
                num_calls=path.num_calls,
                capacity=path.capacity,
                num_tokens=path.counts.num_tokens,
            )
            return True

        for path_name in left:
            self._say(point, path_name, point.kind)
            self._attempt(point, [path_name], partial(measure, path_name))
            gc.collect()  # the profiler leaves cycles

    def _measure_errors(self, point: Point, left: list[str]) -> None:
        self._forget_model()
        num_flat_tokens = min(self._options.error_tokens, self._options.flat_tokens)

        def prepare() -> tuple[Case, Case]:
            copies = [
                self._new_model(point.model, dtype=dtype, num_layers=NUM_ERROR_LAYERS)
                for dtype in (self._dtype, torch.float32)
            ]
            copies[1].load_state_dict(copies[0].state_dict())
            case, exact = (self._case(model, point, num_flat_tokens=num_flat_tokens) for model in copies)
            return case, exact

        prepared = self._attempt(point, left, prepare)
        reference = self._attempt(point, left, prepared[1].reference) if prepared else None
        if prepared is None or reference is None:
            return
        case = prepared[0]
        names = [name for name, _ in case.model.named_parameters()]

        def compare(path_name: str) -> bool:
            path = case.path(path_name)
            case.model.zero_grad(set_to_none=True)
            log_prob_F = path.gradients()
            found = errors(log_prob_F, case.gradients(), reference=reference, names=names)
            self._write(point, path_name, dtype=self._options.dtype, attention=path.attention, **found)
            return True

        for path_name in left:
            if self._clock.allows(0):
                self._attempt(point, [path_name], partial(compare, path_name))

    def _case(self, model: PreTrainedModel, point: Point, *, num_flat_tokens: int | None = None) -> Case:
        rows = self._rows(point, num_flat_tokens=num_flat_tokens, vocab_size=model.config.vocab_size)
        micro_batch_tokens = self._options.micro_batch_tokens
        if point.kind in MEMORY_KINDS:  # flat rows in one call, as the tree
            micro_batch_tokens = sum(map(len, rows.sequences))
        return Case(model, rows, micro_batch_tokens=micro_batch_tokens, backend=self._options.backend)

    def _rows(self, point: Point, *, num_flat_tokens: int | None, vocab_size: int) -> Rows:
        if point.stored is not None:
            return stored_rows(point.stored)
        if point.shape in SHAPES:
            return shape_rows(point.shape, vocab_size=vocab_size)
        options = self._options
        return drawn_rows(
            point.por,
            num_leaves=options.leaves,
            num_flat_tokens=options.flat_tokens if num_flat_tokens is None else num_flat_tokens,
            vocab_size=vocab_size,
        )

    def _timed_model(self, name: str) -> PreTrainedModel:
        """Return the model of that name, made after the one before is gone."""
        if self._model is None or name != self._model_name:
            self._forget_model()
            if self._options.with_step and name in TOO_LARGE_WITH_STEP:
                raise ValueError(f"{name} with the states of its optimiser does not fit: leave --with-step out")
            self._model, self._model_name = self._new_model(name, dtype=self._dtype), name
            if self._options.with_step:
                self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-6, fused=True)
        return self._model

    def _new_model(self, name: str, *, dtype: torch.dtype, num_layers: int | None = None) -> PreTrainedModel:
        model = new_model(name, dtype=dtype, device=self._device, num_layers=num_layers)
        _checkpoint(model, not self._options.no_checkpointing)
        return model

    def _forget_model(self) -> None:
        self._model = self._model_name = self._optimizer = None
        self._free_memory()

    def _free_memory(self) -> None:
        gc.collect()
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    def _attempt(self, point: Point, paths: Sequence[str], run: Callable[[], T]) -> T | None:
        """Return what `run` returns; if it raises, write that the paths have not run, and return None.

        Raises:
            RuntimeError: The device does not answer any more.
        """
        try:
            return run()
        # Kernels are compiled here, and their compilers have errors of their own. A device is lent for minutes.
        except Exception as error:  # noqa: BLE001
            failure = f"{type(error).__name__}: {error}".splitlines()[0]
        peak = torch.cuda.max_memory_allocated(self._device) if self._is_cuda else None
        for path in paths:
            self._say(point, path, failure)
            self._write(point, path, not_run=failure, max_allocated_bytes=peak)
        if self._model is not None:
            self._model.zero_grad(set_to_none=True)
        self._free_memory()
        return None

    def _say(self, point: Point, path: str, text: str) -> None:
        print(f"{point.model}, {point.key['trees']}, POR {point.por:g}, {path}: {text}", file=sys.stderr, flush=True)

    def _write(self, point: Point, path: str, **found: Any) -> None:
        self._log.write(**point.key, path=path, **found)


def _checkpoint(model: PreTrainedModel, is_on: bool) -> None:
    if is_on:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()
