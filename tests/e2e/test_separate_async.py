"""`separate_async` with rollouts in processes of their own, whose weights arrive over gloo (`hybrid_engine=false`).

Rows are stale; in `test_other_manager.py` none is, which shows that the weights arrive as they were sent. The run with
a kill in it, and beside verl's engine, is `tests/long/test_async_runs.py`.
"""

from pathlib import Path

import pytest
from async_run import SEPARATE, check_prompts, read_steps
from tiny_run import run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

NUM_STEPS = 6


def test_no_prompt_is_lost_or_trained_twice(folder: Path) -> None:
    stored = f"tree.dump_dir={folder}/trees"
    metrics = run(folder, "separate", *SEPARATE, stored, f"trainer.total_training_steps={NUM_STEPS}")
    assert sorted(metrics) == list(range(1, NUM_STEPS + 1))
    check_prompts(read_steps(folder, metrics))
    assert max(values["training/off_policy/trajectory_staleness/max"] for values in metrics.values()) >= 1
    assert all(values["tree/por"] > 0.4 for values in metrics.values())
