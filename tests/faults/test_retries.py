"""One of two agent loop workers is killed (kill -9) in a generation; the run goes on, and lacks nothing."""

import time
from pathlib import Path

import pytest
from async_run import COLOCATE, LONG_TAIL, prompt_number
from faulty_run import FaultyRun

from verl_tree.records import read_trees

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

NUM_STEPS = 4
KILLED_STEP = 2
NUM_PROMPTS, NUM_LEAVES = 4, 8
"""Of a step, and of a prompt: two sessions with four leaves each."""
AGENT_LOOP = r"ray::\w*AgentLoopWorker"


@pytest.mark.parametrize("mode", [LONG_TAIL, COLOCATE], ids=["sync", "colocate_async"])
def test_the_prompts_of_a_killed_agent_loop_worker_run_again(folder: Path, mode: tuple[str, ...]) -> None:
    name = "sync" if mode is LONG_TAIL else "colocate"
    options = (
        *mode,
        "actor_rollout_ref.rollout.agent.num_workers=2",
        f"trainer.total_training_steps={NUM_STEPS}",
        f"tree.dump_dir={folder}/trees_{name}",
        "tree.watchdog.poll_s=0.5",
    )
    with FaultyRun(folder, name, options) as run:
        run.wait_for("generation", step=KILLED_STEP)
        time.sleep(0.2)
        killed = run.kill(AGENT_LOOP)
        assert run.process.wait(timeout=400) == 0, run.log[-6000:]
        assert run.left_after(30.0) == []
        metrics, log = run.metrics, run.log
    assert "prompts run again from their beginning" in log
    assert f"pid: {killed.pid}" in log, log[-6000:]
    assert sorted(metrics) == list(range(1, NUM_STEPS + 1))
    retried = [metrics[step]["tree/retried_prompts"] for step in metrics]
    assert sum(retried) >= 1, "it died in the middle of a prompt"
    assert all(metrics[step]["tree/failed_prompts"] == metrics[step]["tree/failed_sessions"] == 0 for step in metrics)
    assert all(metrics[step]["actor/grad_norm"] > 0 for step in metrics), "it goes on to learn"
    paths = [folder / f"trees_{name}" / f"step_{step:06d}.parquet" for step in metrics]
    trees = [tree for path in paths for tree in read_trees(path)]
    numbers = [prompt_number(tree) for tree in trees]
    assert len(set(numbers)) == len(numbers) == NUM_STEPS * NUM_PROMPTS, "a prompt is lost or trained twice"
    assert {len(tree.leaves) for tree in trees} == {NUM_LEAVES}, "a leaf is lost or trained twice"
