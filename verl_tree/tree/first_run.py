"""Self-tests of kernels, each run once per process, when inputs of a kind first come.

Kernels are compiled on the machine that runs them, by compilers that change, and a wrong result would go unnoticed in
training. So a kernel is used on a GPU only after it has agreed there with plain code.
"""

import logging
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor

import torch

logger = logging.getLogger(__name__)

_results: dict[tuple[str, Hashable], list[str]] = {}
_lock = threading.Lock()


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
