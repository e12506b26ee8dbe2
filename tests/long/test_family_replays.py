"""Whole training runs of model families: three steps on trees, and the same on verl's own engine."""

from collections.abc import Callable
from pathlib import Path

import pytest
from family_runs import NUM_STEPS, check_steps, every_family, inputs
from replayed_runs import run_both, worst_difference

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

TOLERANCE = 1e-4
"""Relative, of metrics; AdamW divides by gradients that are almost zero."""


@every_family
def test_steps_equal_those_of_verls_engine(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with inputs(name, tmp_path) as family:
        tree, flat = run_both(tmp_path, *family.options, num_steps=NUM_STEPS, of_trees=family.of_trees)
    worst = worst_difference(tree, flat)
    assert max(worst.values()) <= TOLERANCE, worst
    check_steps(name, tree)
    record_property(f"{name} | whole run", max(worst.values()))
