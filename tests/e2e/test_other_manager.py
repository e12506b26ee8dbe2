"""Two steps of real training whose rows verl's own agent loop manager writes: nothing of ours is in the rollout."""

from pathlib import Path

import pytest
from tiny_run import make_inputs, run

from verl_tree.records import read_trees

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

MANAGER = "verl.trainer.ppo.v1.agent_loop_tq.AgentLoopManagerTQ"
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    """Count the letter a."""
    return {"score": float(solution_str.count("a")), "num_letters": len(solution_str)}
'''


def test_verls_manager_trains_trees(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    metrics = run(
        tmp_path,
        "other",
        f"actor_rollout_ref.rollout.agent.agent_loop_manager_class={MANAGER}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent",
        "actor_rollout_ref.rollout.agent.agent_loop_config_path=null",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={tmp_path}/reward.py",
        f"tree.dump_dir={tmp_path}/stored",
        "trainer.total_training_steps=2",
    )
    assert set(metrics) == {1, 2}
    for values in metrics.values():
        # Four prompts of two sessions with one row each, which share the prompt.
        assert (values["tree/sessions"], values["tree/leaves"], values["tree/failed_prompts"]) == (8, 8, 0)
        assert 0.1 < values["tree/por"] < 0.5
        assert "tree/calls" not in values, "nobody recorded any"
        assert values["actor/grad_norm"] > 0
        assert values["training/rollout_probs_diff_max"] < 0.05
    stored = read_trees(tmp_path / "stored" / "step_000002.parquet")
    assert [len(tree.leaves) for tree in stored] == [2, 2, 2, 2]
    for leaf in (leaf for tree in stored for leaf in tree.leaves):
        assert leaf.calls == ()
        assert leaf.reward_extra_info["num_letters"] > 0
        assert leaf.reward == leaf.reward_extra_info["score"]
    log = (tmp_path / "other.log").read_text()
    assert f"agent_loop_manager_class={MANAGER}: the rows that it writes are trained as trees" in log
