"""Checks attention backends on a device, case by case, against float64 on the same device.

A case is a layer (dtype, head dim, heads, options) on a forest or on a section behind its context; `check_cases.py` has
them, the most valuable first. Forward and the three gradients, two or three times. A case passes if

- the error of the worst token and the mean error are at most `FACTOR` times those of a correct kernel of that dtype
  (`flash_rounding.py`);
- a backend that promises to repeat itself does so bit for bit: `triton`, and all under deterministic algorithms.

Before every call the device's free memory is filled with NaN, so an element that a kernel forgets to write shows. On
the long forest the gradient of the output is zero but for some queries, which an oracle computes (`check_long.py`); the
whole results of the backends are compared with each other.

    python benchmarks/check_attention.py --backends triton --out triton.jsonl --oracles FOLDER [--seconds 90]
    python benchmarks/check_attention.py --backends oracle --oracles FOLDER       # once, for all backends
    python benchmarks/check_attention.py --backends triton --compile 0/16         # every 16th kernel, no results

Every case is a line of JSON, written at once. What does not fit into the time is counted as not run. A process checks
one backend, as a kernel that breaks the device's context breaks it for the rest of the process. Needs torch and numpy,
and triton or flash-attn-4 for the backends that are built on them. Exit status 1 if a case failed.
"""

import argparse
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from check_cases import Case, Layer, cases, plan_of
from check_long import check_long
from flash_rounding import mean_error, rounded_attention, worst_token_error
from harness import add_device_options, new_parser, run_cases
from tree_calls import random_inputs, results_of, visible_pairs

from verl_tree.attention import BACKENDS, AttentionPlan, ScoreOptions

ORACLE = "oracle"
REPEATING = ("triton",)
"""Backends that promise to repeat themselves bit for bit without being asked to."""

FACTOR = 2.5
"""Allowed error, as a multiple of that of a correct kernel. A kernel that adds up rounded parts, such as a gradient for
every head of a group, errs up to 1.8 times as much."""

LEAST_LIMIT = 1e-5
"""Error that is always allowed. In float32 that of exact arithmetic is only a few rounding errors."""


def main() -> None:
    """Run the cases of the backends and write their records."""
    options = _parse_options()
    wanted = cases(small=options.small)
    if options.compile is not None:
        wanted = _kernels_of(wanted, *options.compile)
    run_cases(
        (
            ({"kind": "case", "backend": backend, **_named(case)}, partial(_check, backend, case, options=options))
            for backend in options.backends
            for case in wanted
        ),
        options,
    )


def _parse_options() -> argparse.Namespace:
    parser = new_parser(__doc__)
    fast = [name for name, backend in BACKENDS.items() if not backend.is_oracle]
    add_device_options(parser, seconds=150.0)
    parser.add_argument("--backends", nargs="+", default=fast, choices=[ORACLE, *BACKENDS])
    parser.add_argument("--oracles", type=Path, help="folder for what all backends are compared with")
    parser.add_argument("--compile", type=_share, metavar="I/N", help="only compile every Nth kernel, from I on")
    return parser.parse_args()


def _share(text: str) -> tuple[int, int]:
    index, count = text.split("/")
    return int(index), int(count)


def _kernels_of(wanted: list[Case], index: int, count: int) -> list[Case]:
    """Return every `count`-th layer, from `index` on, each on the first forest it is asked for."""
    first = {case.layer: case for case in reversed(wanted) if not case.is_long}
    layers = [layer for layer in dict.fromkeys(case.layer for case in wanted) if layer in first]
    return [first[layer] for layer in layers[index::count]]


def _named(case: Case) -> dict[str, Any]:
    return {"forest": case.forest, **dataclasses.asdict(case.layer)}


def _check(backend: str, case: Case, *, options: argparse.Namespace) -> dict[str, Any]:
    """Return the record of one case: errors and limits, or why the backend refuses."""
    plan = plan_of(case.forest, device=options.device, small=options.small)
    layer, sizes = case.layer, {"tokens": plan.num_tokens, "context": plan.num_context}
    inputs, grad_out = random_inputs(layer, plan, device=options.device)
    scored = ScoreOptions.of_layer(
        plan,
        scale=layer.head_dim**-0.5,
        num_heads=layer.heads[0],
        window=layer.window,
        softcap=layer.softcap,
        sinks=inputs[3] if layer.sinks else None,
    )
    with _deterministic(layer):
        if backend != ORACLE:
            reasons = BACKENDS[backend].not_supported_reasons(*inputs[:3], plan, options=scored)
            if reasons:
                return {**sizes, "refused": reasons}
        must_repeat = layer.deterministic or backend in REPEATING
        if case.is_long:
            if backend == ORACLE:
                return sizes
            return {**sizes, **check_long(backend, layer, plan, folder=options.oracles, must_repeat=must_repeat)}
        if options.compile is not None:
            results_of(backend, layer, plan, inputs, grad_out)
            return sizes
    oracle = _oracle(case, plan, inputs, grad_out, folder=options.oracles, keep=backend == ORACLE)
    if backend == ORACLE:
        return {**sizes, "rounded": oracle["rounded"]}
    with _deterministic(layer):
        runs = [
            results_of(backend, layer, plan, inputs, grad_out, fill=options.device == "cuda")
            for _ in range(case.num_runs)
        ]
    return {**sizes, **judge(runs, oracle, must_repeat=must_repeat)}


def judge(runs: list[dict[str, torch.Tensor]], oracle: dict[str, Any], *, must_repeat: bool) -> dict[str, Any]:
    """Compare the runs of a case with its oracle, every run with every limit."""
    errors, limits = {}, {}
    for measure, error_of in {"worst": worst_token_error, "mean": mean_error}.items():
        for name, want in oracle["want"].items():
            key = f"{name} {measure}"
            errors[key] = max(error_of(run[name], want) for run in runs)
            limits[key] = max(FACTOR * oracle["rounded"][key], LEAST_LIMIT)
    repeats = all(torch.equal(run[name], runs[0][name]) for run in runs[1:] for name in runs[0])
    passed = all(errors[key] <= limits[key] for key in errors) and (repeats or not must_repeat)
    return {"errors": errors, "limits": limits, "repeats": repeats, "must_repeat": must_repeat, "passed": passed}


def make_oracle(
    layer: Layer, plan: AttentionPlan, inputs: list[torch.Tensor], grad_out: torch.Tensor
) -> dict[str, Any]:
    """Return the results in float64, by the dense backend, and the errors of a correct kernel of the layer's dtype."""
    want = results_of("dense", layer, plan, [each.double() for each in inputs], grad_out.double())
    visible_QT = visible_pairs(plan, window=layer.window)
    rounded = rounded_attention(inputs, grad_out, visible_QT, scale=layer.head_dim**-0.5, softcap=layer.softcap)
    errors = {f"{name} worst": worst_token_error(rounded[name], want[name]) for name in want}
    errors |= {f"{name} mean": mean_error(rounded[name], want[name]) for name in want}
    return {"want": {name: each.float() for name, each in want.items()}, "rounded": errors}


def _oracle(
    case: Case,
    plan: AttentionPlan,
    inputs: list[torch.Tensor],
    grad_out: torch.Tensor,
    *,
    folder: Path | None,
    keep: bool,
) -> dict[str, Any]:
    """Return the oracle of a case from the folder, or make it. Only the process `oracle` keeps what it makes."""
    path = None if folder is None else folder / f"{case.layer}, {case.forest}.pt".replace("/", " ")
    if path is not None and path.exists():
        return torch.load(path, map_location=grad_out.device)
    oracle = make_oracle(case.layer, plan, inputs, grad_out)
    if keep and path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(oracle, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
    return oracle


@contextmanager
def _deterministic(layer: Layer) -> Iterator[None]:
    """Ask torch for deterministic algorithms, if the layer does. Memory stays as it is found, filled with NaN."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(layer.deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled


if __name__ == "__main__":
    main()
