"""Rewards of nodes beside verl's reward function, through the worker; Ray and the queue are left out."""

import asyncio
from types import SimpleNamespace

import pytest
from branch_reward_cases import says
from omegaconf import open_dict
from scripted_llm import config, tokenizer
from scripted_llm import row as dataset_row
from typing_extensions import override
from verl.experimental.agent_loop.agent_loop import register
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker
from verl.trainer.ppo.v1 import agent_loop_tq
from worker_cases import InProcessWorker

from rollout_hooks.capture.running import PromptProgress
from rollout_hooks.loops.base import BranchingAgentLoop


@register("rewards_nodes")
class RewardsNodes(BranchingAgentLoop):
    """Two leaves below a rewarded turn, none with a reward of its own: verl scores them."""

    @override
    async def run_branches(self, root, **row):
        await root.generate()
        root.add_reward(0.25)
        (side,) = root.fork()
        for branch in (side, root):
            await branch.generate()
        root.add_reward(0.125)
        side.finish()
        root.finish()


REWARD_FUNCTION = """
def score(data_source, solution_str, ground_truth, extra_info, **kwargs):
    return {"score": 8.0 + len(extra_info["turn_scores"])}
"""
"""verl's custom reward function; verl tells it the rewards of the nodes of the last leaf."""


@pytest.fixture
def rewarding(tmp_path):
    """Make a handle to verl's reward worker as verl's agent loop worker calls it, without Ray in between."""
    tokenizer().save_pretrained(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD_FUNCTION)
    settings = config()
    with open_dict(settings):
        settings.actor_rollout_ref.model.path = str(tmp_path)
        settings.reward.custom_reward_function.path = str(tmp_path / "reward.py")
        settings.reward.custom_reward_function.name = "score"
    # Made in the call: it keeps the event loop that is running.
    return SimpleNamespace(
        compute_score=SimpleNamespace(remote=lambda data: RewardLoopWorker(settings).compute_score(data))
    )


@pytest.fixture
def put_rows(monkeypatch):
    """Collect what verl's worker puts into TransferQueue, in place of a queue."""
    put = []

    async def put_batch(*, fields, **_):
        put.append(fields)

    monkeypatch.setattr(agent_loop_tq.tq, "async_kv_batch_put", put_batch)
    return put


def run_session(worker):
    """Run one session of `RewardsNodes` on the worker; return its report."""
    trajectory = {"step": 1, "sample_index": 0, "rollout_n": 0, "validate": False}
    worker.mm_processor_kwargs = {}
    worker._prompts["u"] = PromptProgress(2, [])
    fields = dataset_row(global_steps=1, data_source="test", reward_model={"ground_truth": "7"}, extra_info={})
    asyncio.run(
        worker._run_agent_loop({"logprobs": True}, trajectory, agent_name="rewards_nodes", trace=False, **fields)
    )
    return asyncio.run(worker.drain_capture_report("train"))


def test_verls_reward_function_scores_the_leaves_and_node_rewards_are_added(rewarding, put_rows):
    report = run_session(InProcessWorker(lambda _: says("ab"), reward_handles=[rewarding]))
    assert (report.failed_sessions, report.num_leaves) == ((), 2)
    (fields,) = put_rows
    # The score of the last leaf, with its two rewards, is 10; the other leaf gets a copy of it, not of the rewards.
    assert [row.tolist() for row in fields["rm_scores"].unbind()] == [[0, 0.25, 0, 10], [0, 0.25, 0, 10.125]]


def test_node_rewards_that_verl_would_overwrite_are_refused(put_rows):
    """A reward model on the actor's resource pool scores rows after they were written."""
    report = run_session(InProcessWorker(lambda _: says("ab"), reward_handles=None))
    assert "enable_resource_pool=True" in report.failed_sessions[0].cause
    assert "node_rewards=((1, 0.25),)" in report.failed_sessions[0].cause
    assert put_rows == []


def test_node_rewards_do_not_stand_for_a_missing_score(put_rows):
    report = run_session(InProcessWorker(lambda _: says("ab"), reward_handles=[]))
    assert "reward.num_workers=0" in report.failed_sessions[0].cause
    assert put_rows == []
