"""The tree engine computes what verl's FSDP2 engine computes: on one and two ranks, in fp32, real verl on gloo."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_cases import CASES

TOLERANCE = 1e-5
"""Relative, per optimiser step, float32 against float32."""


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module", params=[1, 2], ids=["1rank", "2ranks"])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all cases of one world size once, in processes of their own."""
    out = tmp_path_factory.mktemp("engines") / "results.json"
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={request.param}"]
    script = [
        f"--master-port={free_port()}",
        str(Path(__file__).parents[1] / "support" / "engine_cases.py"),
        "--out",
        str(out),
    ]
    done = subprocess.run(launch + script, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return json.loads(out.read_text()) | {"world_size": request.param}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_verls_own_engine(results: dict[str, Any], case: Any) -> None:
    """Compare log-probs, entropy, values, loss, every gradient and every parameter after the steps."""
    errors = results[case.name]
    tolerance = TOLERANCE * case.num_steps
    outputs = ("values",) if case.is_critic else ("log_probs", "entropy")
    updates = ("gradient", "step", "grad_norm") if case.same_objective else ()
    for name in (*outputs, *updates):
        assert errors[name] <= tolerance, (name, errors)
    if not case.same_objective:
        assert errors["gradient"] > 1e-2, errors
    # The terms of the loss may cancel, so its error is relative to the terms, which are of order one.
    assert errors["loss_difference"] <= tolerance * max(1.0, errors["loss"]), errors


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_case_is_not_empty(results: dict[str, Any], case: Any) -> None:
    """An empty comparison would pass, so the step must move the parameters, and deep rows must share tokens."""
    errors = results[case.name]
    assert errors["gradient_norm"] > 1e-3, errors
    assert errors["moved"] > 1e-4, errors
    if case.rows == "deep":
        assert errors["por"] > 0.3, errors
        # Both clip and dual clip act. GSPO has no dual clip, and a critic has neither.
        assert case.is_critic or "policy_loss" in case.actor or errors["clipped"] > 0.01, errors
