"""Self-tests of kernels, each run once per process, when inputs of a kind first come.

Kernels are compiled on the machine that runs them, by compilers that change, and a wrong result would go unnoticed in
training. So a kernel is used on a GPU only after it has agreed there with plain code: its output and gradients are
compared row by row with those of plain code in float64, and may err a few times as much as plain code in their dtype.
"""

import logging
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

Results = dict[str, Tensor]
"""The output of a kernel, "output", and its gradients, "dq" and so on; rows are along the last dimension."""

logger = logging.getLogger(__name__)

_results: dict[tuple[str, Hashable], list[str]] = {}
_lock = threading.Lock()
_told: set[Hashable] = set()


def reasons_of_first_run(name: str, kernel: Hashable, test: Callable[[], list[str]]) -> list[str]:
    """Return what a kernel's self-test said when it was first asked for; then it runs, and its findings are logged."""
    with _lock:
        if (name, kernel) in _results:
            return _results[name, kernel]
        if torch.cuda.is_current_stream_capturing():
            return ["the self-test has not run yet and cannot during graph capture; run the model once before"]
        # In a thread of its own the caller's autocast, no_grad, inference mode and saved-tensor hooks are not active.
        # Activation checkpointing counts saved tensors by such hooks, and the recomputation skips the test.
        with ThreadPoolExecutor(max_workers=1) as executor:
            future = executor.submit(test)
            error = future.exception()
        if isinstance(error, torch.OutOfMemoryError):
            # It says nothing of the kernel, so the next call tests again.
            return [f"the self-test found no memory: {error}"]
        reasons = future.result() if error is None else [f"self-test raised {type(error).__name__}: {error}"]
        if reasons:
            logger.warning("%s is not used for %s: %s", name, kernel, "; ".join(reasons))
        _results[name, kernel] = reasons
        return reasons


def results(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], grad_out: Tensor, *, names: Sequence[str]
) -> Results:
    """Return the output and the gradients of all inputs; `names` are those of the inputs."""
    leaves = [each.clone().requires_grad_() for each in inputs]
    out = function(*leaves)
    gradients = torch.autograd.grad(out, leaves, grad_out.to(out.dtype))
    return {"output": out.detach()} | {f"d{name}": each for name, each in zip(names, gradients, strict=True)}


def errors_and_limits(
    repeats: Sequence[Results], *, want: Results, plain: Results, limits: Mapping[str, float], least: float = 0.0
) -> dict[str, tuple[float, float]]:
    """Return by name the first error of some repeats that is above its limit, or one that is not, and the limit.

    The error of a row is the norm of its difference to float64, `want`, relative to its norm or to the root mean square
    norm of all rows, whichever is larger. The worst row counts, so that one wrong pair or state shows. A limit is a
    multiple of the error of plain code in the same dtype, `plain`, and at least `least`.
    """
    found = {}
    for name in want:
        limit = max(limits[name] * _worst_row(plain[name], want[name]), least)
        errors = [_worst_row(got[name], want[name]) for got in repeats]
        found[name] = next((error for error in errors if not error <= limit), errors[0]), limit
    return found


def disagreements(errors: Mapping[str, tuple[float, float]], *, where: str) -> list[str]:
    """Return a reason for every error that is above its limit, or no number."""
    return [
        f"{where}: worst relative error of {name} is {error:.1e}, the limit {limit:.1e}"
        for name, (error, limit) in errors.items()
        if not error <= limit
    ]


def _worst_row(got: Tensor, want: Tensor) -> float:
    norm = want.norm(dim=-1)
    scale = norm.clamp(min=norm.square().mean().sqrt().item())
    return ((got.double() - want).norm(dim=-1) / scale).max().item()


def tell_once(logger: logging.Logger, level: int, key: Hashable, message: str, *args: object) -> None:
    """Log which kernel was chosen and why, once in a process for each key of a logger."""
    if (logger.name, key) not in _told:
        _told.add((logger.name, key))
        logger.log(level, message, *args)
