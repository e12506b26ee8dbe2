"""`separate_async` with rollouts in processes of their own, whose weights arrive over gloo (`hybrid_engine=false`).

Ten steps on long-tailed sessions are killed in the middle, resumed, and repeated by verl's engine.
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
from replayed_runs import replaying_options
from tiny_run import run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

NUM_FRESH_STEPS = 4
MODE = (
    *LONG_TAIL,
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=2",
    "actor_rollout_ref.hybrid_engine=false",
)


@pytest.fixture(scope="module")
def resumed(folder: Path) -> Metrics:
    return run_killed_and_resumed(folder, *MODE)


def test_rollouts_have_the_weights_of_the_actor(folder: Path) -> None:
    """Sampled and recomputed log-probs agree in both updates of a period, although the first has changed the weights.

    So the weights arrive as they were sent, and the second update finds the policy that sampled. verl leaves the
    warm-up out where rollouts are stored by `skip`, so every step trains its own prompts.
    """
    options = replaying_options(f"{folder}/fresh", num_steps=NUM_FRESH_STEPS)
    steps = run(folder, "fresh", *MODE, *options, f"trainer.total_training_steps={NUM_FRESH_STEPS}")
    assert sorted(steps) == list(range(1, NUM_FRESH_STEPS + 1))
    for step, metrics in steps.items():
        assert metrics["training/off_policy/trajectory_staleness_worst/max"] == 0
        assert metrics["training/rollout_probs_diff_max"] < 1e-6, step
        # With a learning rate of 0.1 an update is seen in the loss of the next one.
        assert metrics["actor/grad_norm"] > 1e-2
        assert metrics["tree/failed_prompts"] == 0


def test_no_prompt_is_lost_or_trained_twice(folder: Path, resumed: Metrics) -> None:
    assert sorted(resumed) == list(range(1, NUM_STEPS + 1))
    trees = read_steps(folder, resumed)
    assert [[len(group.leaves) for group in groups] for groups in trees.values()] == [[2 * 4] * NUM_PROMPTS] * NUM_STEPS
    check_prompts(folder, trees)
    assert max(metrics["training/off_policy/trajectory_staleness/max"] for metrics in resumed.values()) >= 1


def test_ten_steps_equal_those_of_verls_engine(folder: Path, resumed: Metrics) -> None:
    flat = check_replay(folder, resumed, *MODE)
    assert [resumed[step]["tree/por"] for step in flat] == [flat[step]["tree/por"] for step in flat]
