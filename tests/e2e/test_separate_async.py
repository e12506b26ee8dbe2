"""`separate_async` with rollouts in processes of their own, whose weights arrive over gloo (`hybrid_engine=false`).

Ten steps on long-tailed sessions are killed in the middle, resumed, and repeated by verl's engine. Their rows are
stale; in `test_other_manager.py` none is, which shows that the weights arrive as they were sent.
"""

from pathlib import Path

import pytest
from async_run import (
    LONG_TAIL,
    NUM_PROMPTS,
    NUM_STEPS,
    Metrics,
    check_prompts,
    check_replay,
    read_steps,
    run_killed_and_resumed,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

MODE = (
    *LONG_TAIL,
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=2",
    "actor_rollout_ref.hybrid_engine=false",
)


@pytest.fixture(scope="module")
def resumed(folder: Path) -> Metrics:
    return run_killed_and_resumed(folder, *MODE)


def test_no_prompt_is_lost_or_trained_twice(folder: Path, resumed: Metrics) -> None:
    assert sorted(resumed) == list(range(1, NUM_STEPS + 1))
    trees = read_steps(folder, resumed)
    assert [[len(group.leaves) for group in groups] for groups in trees.values()] == [[2 * 4] * NUM_PROMPTS] * NUM_STEPS
    check_prompts(folder, trees)
    assert max(metrics["training/off_policy/trajectory_staleness/max"] for metrics in resumed.values()) >= 1


def test_ten_steps_equal_those_of_verls_engine(folder: Path, resumed: Metrics) -> None:
    flat = check_replay(folder, resumed, *MODE)
    assert [resumed[step]["tree/por"] for step in flat] == [flat[step]["tree/por"] for step in flat]
