"""Every shipped configuration, compiled ahead of time for its GPUs, without one.

Products must be on the matrix units, run side by side, and overlap with the copies of the next tiles. Shared memory and
registers must suffice. The largest head dim is the tightest; the others are left to `scripts/test.sh --long`.
"""

import pytest
from kernel_cases import TABLE_DIMS, cases, compiled, hopper_cases

from verl_tree.attention.triton_configs import FLOAT32_CONFIGS, HOPPER_CONFIGS, SMALL_CONFIGS

HOPPER_SHARED_BYTES = 227 * 1024
SMALL_SHARED_BYTES = 99 * 1024
"""Of compute capability 8.6 and 8.9, the least among the GPUs that are served."""

MAX_DKV_STACK_BYTES = 128
"""Two accumulators stay in registers; what is spilled beside them a thread, at most."""

ALL_BUT_SOFTCAP = ("window", "sinks")

PIPELINED_STAGES = 3
"""From so many on, Triton leaves copies in flight while the products of a tile run."""


DIMS = [
    pytest.param(head_dim, marks=[] if head_dim == max(TABLE_DIMS) else [pytest.mark.long]) for head_dim in TABLE_DIMS
]


def check_hopper(one):
    assert one["wgmma"] > 0, one
    assert one["mma"] == 0, one
    assert one["async_copies"] > 0, one
    assert one["shared_bytes"] <= HOPPER_SHARED_BYTES, one
    assert one["stack_bytes"] <= (MAX_DKV_STACK_BYTES if one["kernel"] == "dkv" else 0), one
    # C7510 to C7519: ptxas lets one wgmma wait for the other.
    assert one["advisories"] == [], one
    # The loops over full and over partial tiles.
    assert len(one["loop_waits"]) == 2, one
    assert all(one["loop_waits"]), one
    if one["num_stages"] >= PIPELINED_STAGES:
        assert min(map(min, one["loop_waits"])) > 0, one


@pytest.mark.parametrize("head_dim", DIMS)
def test_hopper_without_options_and_with_all(head_dim, tmp_path):
    """Softcaps, which have configurations of their own, without and with the other options."""
    for one in compiled(hopper_cases(head_dims=(head_dim,), added=((), ALL_BUT_SOFTCAP)), tmp_path):
        check_hopper(one)


@pytest.mark.long
def test_hopper_with_padded_dims_and_in_float16(tmp_path):
    """D = 96 has the configurations of 128, and fp16 those of bf16."""
    asked = [
        *cases(HOPPER_CONFIGS, head_dims=(96,), options=ALL_BUT_SOFTCAP),
        *cases(HOPPER_CONFIGS, head_dims=(128,), dtype="fp16"),
    ]
    for one in compiled(asked, tmp_path):
        check_hopper(one)


@pytest.mark.parametrize("head_dim", DIMS)
def test_small_gpus(head_dim, tmp_path):
    for one in compiled(cases(SMALL_CONFIGS, capability=80, head_dims=(head_dim,)), tmp_path):
        assert one["mma"] > 0, one
        assert one["shared_bytes"] <= SMALL_SHARED_BYTES, one
        assert one["stack_bytes"] <= (MAX_DKV_STACK_BYTES if one["kernel"] == "dkv" else 0), one


def test_float32_without_groups_and_the_kernels_without_products(tmp_path):
    """float32; one query head per key-value head, which Triton makes a constant; sums of rows and of parts."""
    float32 = cases(FLOAT32_CONFIGS, dtype="fp32", head_dims=(64,), num_groups=1)
    other = {"capability": 90, "dtype": "bf16", "head_dim": 96, "num_groups": 4, "options": []}
    other |= {"num_warps": 4, "num_stages": 3}
    without_products = [other | {"kernel": "delta"}, other | {"kernel": "add_parts", "key_block": 128}]
    ungrouped = cases(HOPPER_CONFIGS, head_dims=(128,), num_groups=1)
    measured = compiled([*float32, *without_products, *ungrouped], tmp_path)
    for one in measured:
        assert one["shared_bytes"] <= (SMALL_SHARED_BYTES if one["dtype"] == "fp32" else HOPPER_SHARED_BYTES), one
        assert one["stack_bytes"] <= (MAX_DKV_STACK_BYTES if one["kernel"] == "dkv" else 0), one
    for one in measured[-3:]:
        check_hopper(one)
