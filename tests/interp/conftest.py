"""Runs the Triton kernels of this directory in Triton's interpreter, on the CPU.

The variable is read when triton is first imported, so these tests need a pytest process of their own.
"""

import os
import sys

assert "triton" not in sys.modules, "tests/interp needs its own process: TRITON_INTERPRET comes too late"
os.environ["TRITON_INTERPRET"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402
from triton_cases import run  # noqa: E402

from verl_tree.attention import triton_backend as backend  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def exact_bfloat16(monkeypatch):
    """Corrects bfloat16 in the interpreter of triton 3.6 to 3.9.

    There `tl.dot` multiplies its bits as integers, and a conversion from float32 cuts the last bits off where a GPU
    rounds to nearest.
    """
    convert_float, create_dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def convert(data, source, target, rounding_mode):
        if (source, target) == (tl.float32, tl.bfloat16):
            return torch.from_numpy(np.array(data)).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return convert_float(data, source, target, rounding_mode)

    def widen(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        wide = convert_float(handle.data, tl.bfloat16, tl.float32, None).view(np.float32)
        return interpreter.TensorHandle(wide, tl.float32)

    def dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        return create_dot(self, widen(a), widen(b), d, input_precision, max_num_imprecise_acc)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@pytest.fixture(autouse=True)
def no_overflow_checks(monkeypatch):
    """Half of the interpreter's time goes into these; the offsets of the tests are far from 2**31."""
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """`torch.empty` gives NaN, so that an element that no kernel writes shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def run_triton(monkeypatch):
    """`triton_cases.run` through the Triton kernels with the case's own block sizes."""

    def run_with_configs(case, **kwargs):
        monkeypatch.setattr(backend, "choose_configs", lambda *_, **__: case.configs)
        return run(backend.triton_attention, case, **kwargs)

    return run_with_configs
