"""Real training whose rows verl's own agent loop manager writes: nothing of ours is in the rollout.

It is `separate_async` without a warm-up, so every step trains its own prompts: a row is as fresh as the weights that
arrived over gloo. The same trainer with stale rows of our manager is in `test_async_runs.py`.
"""

from pathlib import Path
from typing import Any

import pytest
from tiny_run import run

from verl_tree.records import read_trees

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NUM_STEPS = 4
MANAGER = "verl.trainer.ppo.v1.agent_loop_tq.AgentLoopManagerTQ"
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    """Count the letter a."""
    return {"score": float(solution_str.count("a")), "num_letters": len(solution_str)}
'''


@pytest.fixture(scope="module")
def metrics(folder: Path) -> dict[int, dict[str, Any]]:
    """Train two sync periods of two updates."""
    (folder / "reward.py").write_text(REWARD)
    return run(
        folder,
        "other",
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.parameter_sync_step=2",
        "trainer.v1.separate_async.num_warmup_batches=0",
        "actor_rollout_ref.hybrid_engine=false",
        f"actor_rollout_ref.rollout.agent.agent_loop_manager_class={MANAGER}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent",
        "actor_rollout_ref.rollout.agent.agent_loop_config_path=null",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={folder}/reward.py",
        f"tree.dump_dir={folder}/stored",
        f"trainer.total_training_steps={NUM_STEPS}",
    )


def test_verls_manager_trains_trees(folder: Path, metrics: dict[int, dict[str, Any]]) -> None:
    assert sorted(metrics) == list(range(1, NUM_STEPS + 1))
    for values in metrics.values():
        # Four prompts of two sessions with one row each, which share the prompt.
        assert (values["tree/sessions"], values["tree/leaves"], values["tree/failed_prompts"]) == (8, 8, 0)
        assert 0.1 < values["tree/por"] < 0.5
        assert "tree/calls" not in values, "nobody recorded any"
    stored = [tree for step in metrics for tree in read_trees(folder / "stored" / f"step_{step:06d}.parquet")]
    assert [len(tree.leaves) for tree in stored] == [2, 2, 2, 2] * NUM_STEPS
    leaves = [leaf for tree in stored for leaf in tree.leaves]
    for leaf in leaves:
        assert leaf.calls == ()
        assert leaf.reward == leaf.reward_extra_info["score"]
        # A response of special tokens only is an empty text.
        assert leaf.reward <= leaf.reward_extra_info["num_letters"]
    assert any(leaf.reward_extra_info["num_letters"] > 0 for leaf in leaves)
    log = (folder / "other.log").read_text()
    assert f"agent_loop_manager_class={MANAGER}: the rows that it writes are trained as trees" in log


def test_rollouts_have_the_weights_of_the_actor(metrics: dict[int, dict[str, Any]]) -> None:
    """Sampled and recomputed log-probs agree in both updates of a period, although the first has changed the weights.

    So the weights arrive as they were sent, and the second update finds the policy that sampled.
    """
    for step, values in metrics.items():
        assert values["training/off_policy/trajectory_staleness_worst/max"] == 0
        assert values["training/rollout_probs_diff_max"] < 1e-6, step
        # With a learning rate of 0.1 an update is seen in the loss of the next one.
        assert values["actor/grad_norm"] > 1e-2
