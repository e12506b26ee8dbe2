"""Measures the speed-up of training on trees over the overlap ratio (POR), the paper's figure 8, on one device.

Needs no verl. A random-weight Qwen3 computes forward and backward of one update on the rows of a drawn tree: the same
number of leaves and of flat tokens at every POR (`verl_tree.testing.synthetic.overlap`). Compared are the whole tree,
packs and sections under a capacity of some longest paths, and flat rows (`por_paths.py` explains each). All recompute
their layers in the backward pass (gradient checkpointing) and use the same log-prob code.

    python benchmarks/por.py --device cuda --out por.jsonl --seconds 480 [--models 1.7B,8B,0.6B,4B]
    python benchmarks/por.py --device cpu --out por.jsonl --seconds 600 --models 30M --flat-tokens 4096 --leaves 32
    python benchmarks/report_por.py por.jsonl [--plot por.png]

Every run is a line of JSON, written at once, so a benchmark that is killed keeps what it had. One that finds its file
goes on where the file ends. The most valuable points come first: POR .8 with the whole tree of all models, errors, the
other PORs, the capacities. The paths of a point take turns. A path that does not fit in memory is a result, too.

- Times are those of gradients alone; with `--with-step` of an optimiser step, too (models up to 4B; torch's AdamW, whose
  states have the dtype of the weights). A run that would not end within `--seconds` is not begun.
- `peak_bytes` is what a run allocates above `held_bytes`, which it finds: weights, and states of the optimiser. On a CPU
  the run that warms up measures it. On CUDA a path warms up with its first model call.
- `flops` is `por_models.model_flops` of what the path computes; `mfu` is that over the time and the device's peak.
- Flat rows take nearly the same time at every POR: only their lengths differ. So on CUDA they run at the first POR only
  (`--flat-pors`).
- Errors: gradients and log-probs of every path on a copy with 2 layers, against a float32 copy of the same weights that
  runs row by row with transformers' own attention and logits.
"""

import argparse
import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from flat_attention import default_kernels
from harness import Times, keep_freed_memory, new_parser
from por_log import Clock, RunLog
from por_models import LARGEST_WITH_STEP, SIZES, model_flops, new_model, peak_flops
from por_paths import Case, NotApplicableError, Path, errors

from verl_tree.functional.memory import peak_bytes

HEADLINE_POR = 0.8
NUM_ERROR_LAYERS = 2
SMALL: dict[str, Any] = {"models": "tiny", "pors": "0,0.8", "capacities": "1.5", "repetitions": 1}
SMALL |= {"leaves": 16, "flat_tokens": 1024, "micro_batch_tokens": 256}
SAME_WHEN_RESUMED = ("device", "dtype", "leaves", "flat_tokens", "micro_batch_tokens", "threads", "backend", "with_step")


@dataclass(frozen=True, slots=True)
class Point:
    """Paths whose times, or errors, are measured together."""

    model: str
    por: float
    paths: tuple[str, ...]
    is_errors: bool = False


def main() -> None:
    """Measure one point after another, until all are measured or the time is over."""
    options = _parse_options()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("verl_tree.attention").setLevel(logging.INFO)  # which kernel was chosen, and why not another
    if options.device == "cpu":
        keep_freed_memory()
        torch.set_num_threads(options.threads)
    benchmark = Benchmark(options, RunLog(options.out, options, same=SAME_WHEN_RESUMED))
    for point in points(options):
        benchmark.measure(point)


def _parse_options() -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--seconds", type=float, default=480, help="begin nothing that would end later")
    parser.add_argument("--models", default="1.7B,8B,0.6B,4B", help=f"comma-separated, of {', '.join(SIZES)}")
    parser.add_argument("--pors", default="0,0.2,0.4,0.6,0.8,0.9,0.95")
    parser.add_argument("--capacities", default="4,2,1.5", help="of packs and sections, in longest paths; '' for none")
    parser.add_argument("--leaves", type=int, default=64)
    parser.add_argument("--flat-tokens", type=int, default=131_072)
    parser.add_argument("--micro-batch-tokens", type=int, default=32_768, help="most tokens of a call of flat rows")
    parser.add_argument("--error-tokens", type=int, default=16_384, help="most flat tokens where errors are measured")
    parser.add_argument("--repetitions", type=int, default=3, help="timed runs of a path, after one to warm up")
    parser.add_argument("--backend", default="auto", help="attention backend of trees and of flat/same")
    parser.add_argument("--flat-kernels", help="comma-separated: same, varlen, fa4, sdpa")
    parser.add_argument("--flat-pors", help="where flat rows run (default on CUDA: at the first point; on a CPU: always)")
    parser.add_argument("--with-step", action="store_true", help="with a step of the optimiser")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="default: bfloat16 on CUDA, else float32")
    parser.add_argument("--peak-tflops", type=float, help="of the device, for the MFU; known for some GPUs")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="on a CPU")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it runs")
    if parser.parse_args().small:
        parser.set_defaults(**SMALL)
    options = parser.parse_args()
    if options.out is None:
        parser.error("give --out FILE.jsonl: results are written as they come")
    options.models = options.models.split(",")
    if unknown := set(options.models) - set(SIZES):
        parser.error(f"no such model: {', '.join(sorted(unknown))}; choose from {', '.join(SIZES)}")
    is_cuda = options.device == "cuda"
    options.dtype = options.dtype or ("bfloat16" if is_cuda else "float32")
    options.flat_kernels = (options.flat_kernels or ",".join(["same", *default_kernels(options.device)])).split(",")
    options.pors, options.capacities = _numbers(options.pors), _numbers(options.capacities)
    if options.flat_pors is None:
        options.flat_pors = [_headline(options)] if is_cuda else options.pors
    else:
        options.flat_pors = _numbers(options.flat_pors)
    return options


def _numbers(text: str) -> list[float]:
    return [float(each) for each in text.split(",") if each]


def _headline(options: argparse.Namespace) -> float:
    return min(options.pors, key=lambda por: abs(por - HEADLINE_POR))


def points(options: argparse.Namespace) -> Iterator[Point]:
    """Return all points, the most valuable first."""
    headline = _headline(options)
    others = sorted(set(options.pors) - {headline}, reverse=True)
    flat = tuple(f"flat/{kernel}" for kernel in options.flat_kernels)
    limited = tuple(f"{kind}/{capacity:g}" for capacity in options.capacities for kind in ("packs", "relay"))

    def whole(model: str, por: float) -> Point:
        return Point(model, por, ("tree", *flat) if por in options.flat_pors else ("tree",))

    yield from (whole(model, headline) for model in options.models)
    yield from (Point(model, headline, ("tree", *flat, *limited), is_errors=True) for model in options.models)
    yield from (whole(model, por) for model in options.models for por in others)
    if limited:
        yield from (Point(model, por, limited) for por in (headline, *others) for model in options.models)


class Benchmark:
    """Measures points with one model at a time, and writes what it finds to a log."""

    def __init__(self, options: argparse.Namespace, log: RunLog) -> None:
        self._options, self._log = options, log
        self._device, self._dtype = torch.device(options.device), getattr(torch, options.dtype)
        self._is_cuda = self._device.type == "cuda"
        self._peak_flops = peak_flops(self._device, peak_tflops=options.peak_tflops)
        self._clock = Clock(options.seconds)
        self._model_name: str | None = None

    def measure(self, point: Point) -> None:
        """Measure what is missing of a point, if there is time."""
        kind = "errors" if point.is_errors else "run"
        left = {path: self._num_runs_left(point, path, kind=kind) for path in point.paths}
        left = {path: num_runs for path, num_runs in left.items() if num_runs > 0}
        if not left or not self._clock.allows(0):
            return
        measure = self._measure_errors if point.is_errors else self._measure_times
        failure = self._failure(lambda: measure(point, left))
        if failure is not None:  # outside of any path: the model itself, or the reference
            for path in left:
                self._write(point, path, kind=kind, not_run=failure)

    def _num_runs_left(self, point: Point, path: str, *, kind: str) -> int:
        found = self._log.find(kind=kind, model=point.model, por=point.por, path=path)
        if any("not_run" in record for record in found):
            return 0
        if point.is_errors:
            return 0 if found else 1
        return self._options.repetitions - sum(record["repetition"] > 0 for record in found)

    def _measure_times(self, point: Point, left: dict[str, int]) -> None:
        model = self._timed_model(point.model)
        case = self._case(model, point.por, num_flat_tokens=self._options.flat_tokens)
        paths = {name: path for name in left if (path := self._plan(case, point, name, kind="run")) is not None}
        for run in range(max(left.values()) + 1):  # the first one warms up
            for name, path in list(paths.items()):
                flops = model_flops(model, path.counts)
                if run > left[name] or not self._clock.allows(flops):
                    continue
                repetition = 0 if run == 0 else self._options.repetitions - left[name] + run
                print(f"{point.model}, POR {point.por:g}, {name}: run {repetition}", file=sys.stderr, flush=True)
                failure = self._failure(lambda: self._run(point, path, repetition=repetition, flops=flops))  # noqa: B023
                if failure is not None:
                    peak = torch.cuda.max_memory_allocated(self._device) if self._is_cuda else None
                    self._write(point, name, kind="run", not_run=failure, max_allocated_bytes=peak)
                    del paths[name]

    def _run(self, point: Point, path: Path, *, repetition: int, flops: float) -> None:
        """Run a path once and write what it took."""
        self._model.zero_grad(set_to_none=True)
        held = sum(parameter.nbytes for parameter in self._model.parameters())
        held = torch.cuda.memory_allocated(self._device) if self._is_cuda else held
        times, is_first = Times(), repetition == 0

        def update() -> None:
            with times.measure(is_cuda=self._is_cuda):
                path.gradients(is_short=self._is_cuda and is_first)
                if self._optimizer is not None:
                    self._optimizer.step()

        measures_memory = is_first != self._is_cuda
        peak = peak_bytes(update, device=self._device) if measures_memory else update()
        if is_first and self._is_cuda:
            return
        (seconds,), (cpu_s,) = times.wall_s, times.cpu_s
        if not is_first:
            self._clock.ran(flops, seconds=seconds)
        self._write(
            point,
            path.name,
            kind="run",
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

    def _measure_errors(self, point: Point, left: dict[str, int]) -> None:
        self._forget_model()
        model = self._new_model(point.model, dtype=self._dtype, num_layers=NUM_ERROR_LAYERS)
        exact = self._new_model(point.model, dtype=torch.float32, num_layers=NUM_ERROR_LAYERS)
        exact.load_state_dict(model.state_dict())
        num_flat_tokens = min(self._options.error_tokens, self._options.flat_tokens)
        reference = self._case(exact, point.por, num_flat_tokens=num_flat_tokens).reference()
        case = self._case(model, point.por, num_flat_tokens=num_flat_tokens)
        names = [name for name, _ in model.named_parameters()]
        for path_name in left:
            path = self._plan(case, point, path_name, kind="errors")
            if path is None or not self._clock.allows(0):
                continue

            def compare(path: Path = path) -> None:
                log_prob_F = path.gradients()
                found = errors(log_prob_F, case.gradients(), reference=reference, names=names)
                self._write(point, path.name, kind="errors", dtype=self._options.dtype, attention=path.attention, **found)

            failure = self._failure(compare)
            model.zero_grad(set_to_none=True)
            if failure is not None:
                self._write(point, path_name, kind="errors", not_run=failure)

    def _plan(self, case: Case, point: Point, name: str, *, kind: str) -> Path | None:
        """Plan a path; write why, if there is none."""
        try:
            return case.path(name)
        except (NotApplicableError, ValueError) as error:
            self._write(point, name, kind=kind, not_run=str(error))
            return None

    def _case(self, model: torch.nn.Module, por: float, *, num_flat_tokens: int) -> Case:
        return Case(
            model,
            por,
            num_leaves=self._options.leaves,
            num_flat_tokens=num_flat_tokens,
            micro_batch_tokens=self._options.micro_batch_tokens,
            backend=self._options.backend,
        )

    def _timed_model(self, name: str) -> torch.nn.Module:
        """Return the model of that name, after the one before is gone."""
        if name != self._model_name:
            self._forget_model()
            self._model = self._new_model(name, dtype=self._dtype)
            self._model_name, self._optimizer = name, None
            if self._options.with_step:
                num_weights = sum(parameter.numel() for parameter in self._model.parameters())
                if num_weights > LARGEST_WITH_STEP:
                    raise ValueError(f"{name} with the states of its optimiser does not fit: leave --with-step out")
                self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-6, fused=True)
        return self._model

    def _new_model(self, name: str, *, dtype: torch.dtype, num_layers: int | None = None) -> torch.nn.Module:
        model = new_model(name, dtype=dtype, device=self._device, num_layers=num_layers)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def _forget_model(self) -> None:
        self._model_name = self._model = self._optimizer = None
        self._free_memory()

    def _free_memory(self) -> None:
        gc.collect()
        if self._is_cuda:
            torch.cuda.empty_cache()

    def _failure(self, run: Callable[[], None]) -> str | None:
        """Run, and return why it failed, or None. What the failed run held is freed."""
        try:
            run()
            return None
        except (RuntimeError, ValueError) as error:  # among them torch.OutOfMemoryError
            failure = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        print(failure, file=sys.stderr, flush=True)
        if self._model_name is not None:
            self._model.zero_grad(set_to_none=True)
        self._free_memory()
        return failure

    def _write(self, point: Point, path: str, *, kind: str, **found: Any) -> None:
        self._log.write(kind=kind, model=point.model, por=point.por, path=path, **found)


if __name__ == "__main__":
    main()
