"""The tree engine computes what verl's FSDP2 engine computes on rows with images: on one and two ranks, in fp32."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from image_cases import FAMILIES
from image_engine_cases import CASES, Case

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TOLERANCE = 1e-5
"""Relative, float32 against float32."""


@pytest.fixture(scope="module", params=[1, 2], ids=["1rank", "2ranks"])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all cases of one world size once."""
    out = tmp_path_factory.mktemp("image_engines") / "results.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={request.param}"]
    script = Path(__file__).parents[1] / "support" / "image_engine_cases.py"
    done = subprocess.run(
        [*launch, str(script), "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_verls_own_engine(results: dict[str, Any], case: Case, family: str) -> None:
    """Compare log-probs, entropy, loss, the gradient of text part and tower, and every parameter after the step."""
    errors = results[f"{family}-{case.name}"]
    for name in ("log_probs", "entropy", "gradient", "step", "grad_norm"):
        assert errors[name] <= TOLERANCE, (name, errors)
    assert errors["loss_difference"] <= TOLERANCE * max(1.0, errors["loss"]), errors
    # An empty comparison would pass.
    assert errors["gradient_norm"] > 1e-3, errors
    assert errors["moved"] > 1e-4, errors
    assert errors["por"] > 0.4, errors
    assert errors["tower_gradients"] >= 4, errors
    assert case.actor.get("policy_loss") or errors["clipped"] > 0.01, errors
