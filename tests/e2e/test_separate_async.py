"""`separate_async` with rollouts in processes of their own, whose weights arrive over gloo (`hybrid_engine=false`)."""

from pathlib import Path
from typing import Any

import pytest
from async_run import LONG_TAIL, replaying_options, worst_difference
from tiny_run import make_inputs, run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

NUM_STEPS = 10
MODE = (
    *LONG_TAIL,
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=2",
    "actor_rollout_ref.hybrid_engine=false",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the inputs of all training runs."""
    folder = tmp_path_factory.mktemp("runs")
    make_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def tree(folder: Path) -> dict[int, dict[str, Any]]:
    """Train without warm-up, which verl leaves out where rollouts are stored: every step trains its own prompts."""
    return run(folder, "tree", *MODE, *replaying_options(f"{folder}/rollouts", num_steps=NUM_STEPS))


def test_rollouts_have_the_weights_of_the_actor(tree: dict[int, dict[str, Any]]) -> None:
    """Sampled and recomputed log-probs agree in both updates of a period, although the first has changed the weights.

    So the weights arrive as they were sent, and the second update finds the policy that sampled.
    """
    assert sorted(tree) == list(range(1, NUM_STEPS + 1))
    for step, metrics in tree.items():
        assert metrics["training/off_policy/trajectory_staleness_worst/max"] == 0
        assert metrics["training/rollout_probs_diff_max"] < 1e-6, step
        # With a learning rate of 0.1 an update is seen in the loss of the next one.
        assert metrics["actor/grad_norm"] > 1e-2
        assert metrics["tree/failed_prompts"] == 0


def test_ten_steps_equal_those_of_verls_engine(folder: Path, tree: dict[int, dict[str, Any]]) -> None:
    flat = run(
        folder, "flat", *MODE, *replaying_options(f"{folder}/rollouts", num_steps=NUM_STEPS), "tree.enabled=false"
    )
    worst = worst_difference(tree, flat)
    assert max(worst.values()) <= 1e-6, worst
    for name in ("critic/score/mean", "tree/por"):
        assert [tree[step][name] for step in flat] == [flat[step][name] for step in flat], name
