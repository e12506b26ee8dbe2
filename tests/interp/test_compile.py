"""Every shipped configuration, compiled ahead of time for its GPUs, without one.

Products must be on the matrix units, and shared memory and registers must suffice.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_tree.attention.triton_configs import (
    FLOAT32_CONFIGS,
    HOPPER_CAPPED_CONFIGS,
    HOPPER_CONFIGS,
    SMALL_CONFIGS,
    padded_dim,
)

HOPPER_SHARED_BYTES = 227 * 1024
SMALL_SHARED_BYTES = 99 * 1024
"""Of compute capability 8.6 and 8.9, the least among the GPUs that are served."""

BF16 = {"capability": 90, "dtype": "bf16"}
MAX_DKV_STACK_BYTES = 128
"""Two accumulators stay in registers; what is spilled beside them a thread, at most."""


def cases(table, *, capability, dtype, head_dims, num_groups=4, options=()):
    """Return the three kernels for each head dim, as compile_kernels.py takes them."""
    target = {"capability": capability, "dtype": dtype, "num_groups": num_groups, "options": options}
    return [
        {"kernel": kernel, "head_dim": head_dim} | target | config._asdict()
        for head_dim in head_dims
        for configs in [table[padded_dim(head_dim)]]
        for kernel, config in (("forward", configs.forward), ("dkv", configs.dkv), ("dq", configs.dq))
    ]


def compiled(cases, tmp_path):
    """Return what the compiler says of each case, in a process of its own, in which triton does not interpret."""
    program = Path(__file__).parents[1] / "support" / "compile_kernels.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, program, json.dumps(cases)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    measured = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(measured) == len(cases)
    return measured


@pytest.mark.parametrize(("dtype", "head_dims"), [("bf16", (64, 96, 128, 256)), ("fp16", (64, 128, 256))])
def test_hopper(dtype, head_dims, tmp_path):
    for one in compiled(cases(HOPPER_CONFIGS, capability=90, dtype=dtype, head_dims=head_dims), tmp_path):
        assert one["hgmma"] > 0, one
        assert one["hmma"] == 0, one
        assert one["shared_bytes"] <= HOPPER_SHARED_BYTES, one
        assert one["async_copies"] > 0, one
        assert one["stack_bytes"] <= (MAX_DKV_STACK_BYTES if one["kernel"] == "dkv" else 0), one


def test_hopper_with_options(tmp_path):
    """As gpt-oss (sinks, half of its layers with a window), Mistral and Gemma-3, and Gemma-2 in its two head dims."""
    asked = [
        *cases(HOPPER_CONFIGS, head_dims=(64,), options=("window", "sinks"), **BF16)[:2],
        *cases(HOPPER_CONFIGS, head_dims=(128, 256), options=("window",), **BF16),
        *cases(HOPPER_CAPPED_CONFIGS, head_dims=(128,), options=("window", "softcap"), **BF16)[:2],
        *cases(HOPPER_CAPPED_CONFIGS, head_dims=(256,), options=("window", "softcap"), **BF16),
    ]
    for one in compiled(asked, tmp_path):
        assert one["hgmma"] > 0, one
        assert one["hmma"] == 0, one
        assert one["shared_bytes"] <= HOPPER_SHARED_BYTES, one
        assert one["stack_bytes"] <= (MAX_DKV_STACK_BYTES if one["kernel"] == "dkv" else 0), one


def test_small_gpus(tmp_path):
    for one in compiled(cases(SMALL_CONFIGS, capability=80, dtype="bf16", head_dims=(64, 128, 256)), tmp_path):
        assert one["hmma"] > 0, one
        assert one["shared_bytes"] <= SMALL_SHARED_BYTES, one
        assert one["stack_bytes"] <= (MAX_DKV_STACK_BYTES if one["kernel"] == "dkv" else 0), one


def test_float32_without_groups_and_the_sums_of_rows(tmp_path):
    """float32; one query head per key-value head, which Triton makes a constant; and `delta_kernel`."""
    float32 = cases(FLOAT32_CONFIGS, capability=90, dtype="fp32", head_dims=(64,), num_groups=1)
    delta = {"kernel": "delta", "capability": 90, "dtype": "bf16", "head_dim": 96, "num_groups": 4, "options": ()}
    ungrouped = cases(HOPPER_CONFIGS, capability=90, dtype="bf16", head_dims=(128,), num_groups=1)
    warps = {"num_warps": 4, "num_stages": 3}
    for one in compiled([*float32, delta | warps, *ungrouped], tmp_path):
        assert one["shared_bytes"] <= (SMALL_SHARED_BYTES if one["dtype"] == "fp32" else HOPPER_SHARED_BYTES), one
        assert one["stack_bytes"] <= (MAX_DKV_STACK_BYTES if one["kernel"] == "dkv" else 0), one
