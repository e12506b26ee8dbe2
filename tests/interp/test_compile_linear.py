"""The fused log-prob kernels, compiled ahead of time for a Hopper GPU, without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

from verl_tree.functional.linear_log_probs import HOPPER_CONFIG, HOPPER_NARROW_CONFIG, SMALL_CONFIG

HOPPER_SHARED_BYTES = 227 * 1024
SMALL_SHARED_BYTES = 99 * 1024
PLAIN, OTHERS = [(), ("entropy",)], [("entropy", "softcap"), ("entropy", "bias"), ("entropy", "softcap", "bias")]


def compiled(cases, tmp_path):
    """Return what the compiler says of each case, in a process of its own, in which triton does not interpret."""
    program = Path(__file__).parents[1] / "support" / "compile_linear.py"
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


def cases(kernels, *, config, dtype="bf16", options=PLAIN):
    target = {"capability": 90, "dtype": dtype, "config": config}
    return [target | {"kernel": kernel, "options": chosen} for kernel in kernels for chosen in options]


def test_the_kernels_that_make_logits(tmp_path):
    """Products on the matrix units, a product always open while the next is issued, nothing spilled."""
    makes_logits = ("normalizer", "grad_logits")
    asked = [
        *cases(makes_logits, config=HOPPER_CONFIG),
        *cases(makes_logits, config=HOPPER_NARROW_CONFIG, options=OTHERS),
        *cases(makes_logits, config=HOPPER_CONFIG, dtype="fp16", options=PLAIN[1:]),
    ]
    for one in compiled(asked, tmp_path):
        assert one["hgmma"] > 0, one
        assert one["hmma"] == 0, one
        assert one["tma_copies"] > 0, one
        assert one["open_products"] == 1, one
        assert one["advisories"] == [], one
        assert one["stack_bytes"] == 0, one
        assert one["shared_bytes"] <= HOPPER_SHARED_BYTES, one


def test_the_other_kernels_and_the_other_configuration(tmp_path):
    others = cases(("label", "pair_gradient", "label_gradient"), config=HOPPER_CONFIG, options=OTHERS[-1:])
    small = cases(("normalizer", "grad_logits"), config=SMALL_CONFIG, options=OTHERS[-1:])
    for one in compiled([*others, *small], tmp_path):
        assert one["advisories"] == [], one
        assert one["stack_bytes"] == 0, one
        assert one["shared_bytes"] <= SMALL_SHARED_BYTES, one
