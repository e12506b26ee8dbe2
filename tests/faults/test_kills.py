"""Processes of a run are killed (kill -9) in every phase of a step; each start goes on from the last checkpoint.

The runs are a chain: a case resumes what the case before left, trains a step, and is killed in the next one. So every
case but the first also shows that the fault before it can be resumed. What is sampled is stored. At the end one run
without faults repeats all steps on the stored rollouts and must give the same losses, bit for bit.
"""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faulty_run import FaultyRun, last_saved, weights_left
from marked_phases import PHASES
from replayed_runs import replaying_options

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

VICTIMS = {
    "vllm": "VLLM::EngineCore",
    "worker": "ray::WorkerDict",
    "storage": "ray::SimpleStorageUnit",
    "trainer": r"ray::\w*TaskRunner",
    "driver": "driver",
}
"""The titles of the processes. Agent loop workers are not among them: `test_retries`."""
CASES = [(victim, phase) for phase in PHASES for victim in VICTIMS]
END_LIMIT_S = 60.0
"""A run must end with its cause in this time after the kill, on a slow machine too."""
LEFT_LIMIT_S = 30.0
KILL_AFTER_S = {"generation": 0.5}
"""Between the start of the phase and the kill, else 0.05: long enough to be in it, shorter than the shortest phase.

In a generation most sessions have ended by then, and a long one has not.
"""
LAST_STEP = 200
COMPARED = ("actor/loss", "actor/grad_norm", "actor/kl_loss", "tree/tokens", "tree/flat_tokens")


def options(folder: Path) -> tuple[str, ...]:
    """Return options of a run that saves, validates and stores its rollouts in every step."""
    return (
        "actor_rollout_ref.rollout.agent.default_agent_loop=long_tail",
        "data.max_response_length=160",
        "actor_rollout_ref.rollout.max_model_len=240",
        "actor_rollout_ref.actor.optim.optimizer=AdamW",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "trainer.save_freq=1",
        "trainer.max_actor_ckpt_to_keep=2",
        "trainer.test_freq=1",
        "trainer.resume_mode=auto",
        f"trainer.total_training_steps={LAST_STEP}",
        "tree.watchdog.poll_s=0.5",
        # What is faster by the times measured so far differs between two runs, and with it the order of additions.
        "tree.gate=never",
        "tree.relay=never",
        *replaying_options(f"{folder}/rollouts", num_steps=LAST_STEP),
    )


@pytest.fixture(scope="module")
def logged() -> dict[int, dict[str, Any]]:
    """Collect the metrics of the steps that the runs of all cases logged."""
    return {}


@pytest.mark.parametrize(("victim", "phase"), CASES, ids=[f"{phase}-{victim}" for victim, phase in CASES])
def test_kill(
    folder: Path, logged: dict, victim: str, phase: str, record_property: Callable[[str, object], None]
) -> None:
    saved, weights = last_saved(folder), weights_left()
    with FaultyRun(folder, f"{len(list(folder.glob('*.marks')))}_{phase}_{victim}", options(folder)) as run:
        run.wait_for(phase, step=saved + 2)
        time.sleep(KILL_AFTER_S.get(phase, 0.05))
        killed = run.kill(VICTIMS[victim])
        started = time.monotonic()
        status = run.process.wait(timeout=END_LIMIT_S)
        end_s = time.monotonic() - started
        left = run.left_after(LEFT_LIMIT_S)
        record_property("seconds until the end", round(end_s, 1))
        assert status != 0
        assert left == []
        assert saved + 1 in run.metrics, "it resumed and trained a step"
        assert all(path in run.log for path in weights), "the start named the memory that earlier kills had left"
        if phase == "generation":
            assert last_saved(folder) == saved + 1, "a step was saved that lacks what the kill cut off"
        logged.update(run.metrics)
        if victim != "driver":
            cause = "the vLLM process" if victim == "vllm" else "the process of"
            assert re.search(rf"{cause} .*pid {killed.pid}\b", run.log), run.log[-6000:]


def test_without_faults_every_step_is_the_same(folder: Path, logged: dict) -> None:
    """One run repeats the rollouts of all steps from the first weights on."""
    steps = sorted(logged)
    assert steps, "no case ran"
    name = "unbroken"
    unbroken = (f"trainer.total_training_steps={steps[-1]}", "trainer.resume_mode=disable", "trainer.test_freq=-1")
    saving = ("trainer.save_freq=-1", f"trainer.default_local_dir={folder}/unbroken")
    with FaultyRun(folder, name, (*options(folder), *unbroken, *saving)) as run:
        assert run.process.wait(timeout=500) == 0, run.log[-6000:]
        expected = run.metrics
    assert sorted(expected) == list(range(1, steps[-1] + 1))
    for step in steps:
        assert {key: logged[step][key] for key in COMPARED} == {key: expected[step][key] for key in COMPARED}, step
    (folder / "logged.json").write_text(json.dumps(logged))
