"""Hundreds of steps with random kills, then many without: every prompt is trained once, and memory stays flat."""

import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median

import psutil
import pytest
from async_run import prompt_number, prompt_text
from faulty_run import FaultyRun, last_saved
from marked_phases import PHASES
from test_kills import VICTIMS
from tiny_run import make_inputs

from verl_tree.records import read_trees

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(7200)]

NUM_STEPS = 300
LAST_FAULT = 200
"""No fault comes behind this step, so that memory can be watched over many steps of one run."""
SAVE_FREQ = 3
NUM_PROMPTS = 4
END_LIMIT_S = 60.0
LOOK_EVERY_S = 3.0
MODES = {
    "sync": (),
    "colocate_async": (
        "trainer.v1.trainer_mode=colocate_async",
        "algorithm.rollout_correction.rollout_is=token",
    ),
}


def options(folder: Path, mode: str) -> tuple[str, ...]:
    return (
        "actor_rollout_ref.rollout.agent.default_agent_loop=long_tail",
        "data.max_response_length=160",
        "actor_rollout_ref.rollout.max_model_len=240",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        f"trainer.save_freq={SAVE_FREQ}",
        "trainer.max_actor_ckpt_to_keep=2",
        "trainer.test_freq=10",
        "trainer.resume_mode=auto",
        f"trainer.total_training_steps={NUM_STEPS}",
        f"tree.dump_dir={folder}/trees",
        "tree.watchdog.poll_s=0.5",
        *MODES[mode],
    )


def resident_bytes(run: FaultyRun) -> int:
    """Return the memory that a run's processes have to themselves."""
    total = 0
    for each in run.processes():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += each.memory_full_info().uss
    return total


@pytest.mark.parametrize("mode", MODES)
def test_soak(tmp_path: Path, mode: str, record_property: Callable[[str, object], None]) -> None:
    make_inputs(tmp_path)
    chosen = random.Random(7)
    num_faults, worst_end_s, logged = 0, 0.0, {}
    while last_saved(tmp_path) < LAST_FAULT:
        saved = last_saved(tmp_path)
        with FaultyRun(tmp_path, f"{mode}_{num_faults}", options(tmp_path, mode)) as run:
            run.wait_for(chosen.choice(PHASES[:3]), step=saved + chosen.randint(2, 24))
            time.sleep(chosen.uniform(0.0, 2.0))
            run.kill(VICTIMS[chosen.choice(list(VICTIMS))])
            started = time.monotonic()
            run.process.wait(timeout=END_LIMIT_S)
            worst_end_s = max(worst_end_s, time.monotonic() - started)
            assert run.left_after(END_LIMIT_S) == []
            logged.update(run.metrics)
        num_faults += 1
    with FaultyRun(tmp_path, f"{mode}_end", options(tmp_path, mode)) as run:
        samples = []
        while run.process.poll() is None:
            time.sleep(LOOK_EVERY_S)
            samples.append((max(run.metrics, default=0), resident_bytes(run)))
        assert run.process.returncode == 0, run.log[-6000:]
        logged.update(run.metrics)

    record_property("faults", num_faults)
    record_property("worst seconds until the end", round(worst_end_s, 1))
    trees = [
        tree for step in range(1, NUM_STEPS + 1) for tree in read_trees(tmp_path / "trees" / f"step_{step:06d}.parquet")
    ]
    numbers = [prompt_number(tree) for tree in trees]
    assert len(set(numbers)) == len(numbers) == NUM_STEPS * NUM_PROMPTS, "a prompt is lost or trained twice"
    assert all(f"task {number % 16} of" in prompt_text(tree) for number, tree in zip(numbers, trees, strict=True))
    assert {len(tree.leaves) for tree in trees} == {8}, "a leaf is lost"
    for step, metrics in logged.items():
        assert metrics["tree/dropped_leaves"] == metrics["tree/failed_sessions"] == 0, step

    # The first steps fill caches.
    steady = [(step, size) for step, size in samples if step > LAST_FAULT + 30]
    third = len(steady) // 3
    growth = median(size for _, size in steady[-third:]) / median(size for _, size in steady[:third])
    record_property("memory of the last third / first third", round(growth, 3))
    assert growth < 1.05
