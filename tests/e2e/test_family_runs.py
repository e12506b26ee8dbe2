"""A whole training run on trees of a tiny Qwen3-VL on images.

With a Qwen3-MoE and a Qwen3-Next, and beside verl's own engine, it is in `tests/long/test_family_replays.py`.
"""

from pathlib import Path

import pytest
from family_runs import NUM_STEPS, check_steps, families, inputs
from replayed_runs import one_update_options
from tiny_run import run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@families("Qwen3-VL")
def test_samples_are_those_of_the_trained_weights(name: str, tmp_path: Path) -> None:
    with inputs(name, tmp_path) as family:
        options = (*one_update_options(NUM_STEPS), *family.options, *family.of_trees)
        check_steps(name, run(tmp_path, "tree", *options))
