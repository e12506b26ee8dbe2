"""One flag apart: the same stored rollouts through trees and through verl's own engine; a run that dies resumes."""

import re
from pathlib import Path
from typing import Any

import pytest
from tiny_run import make_inputs, run, run_and_kill_engine

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

COMPARED = ("actor/loss", "actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/grad_norm")
STEPS = range(1, 11)
ADAMW = ("actor_rollout_ref.actor.optim.optimizer=AdamW", "actor_rollout_ref.actor.optim.lr=1e-3")
SAVE_FREQ = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The inputs of all runs."""
    folder = tmp_path_factory.mktemp("runs")
    make_inputs(folder)
    return folder


def options(folder: Path) -> tuple[str, ...]:
    """AdamW on the rollouts of every step, which are stored, or replayed where they are stored."""
    return (
        *ADAMW,
        "skip.rollout_tq.enable=true",
        "skip.rollout_tq.action=cache",
        f"skip.rollout_tq.steps={list(STEPS)}".replace(" ", ""),
        f"skip.rollout_tq.dump_dir={folder}/rollouts",
    )


@pytest.fixture(scope="module")
def tree(folder: Path) -> dict[int, dict[str, Any]]:
    """The run that generates the rollouts."""
    return run(folder, "tree", *options(folder))


def test_the_rollouts_branch(tree: dict[int, dict[str, Any]]) -> None:
    for metrics in tree.values():
        assert metrics["tree/leaves_per_session"] == 4.0
        assert metrics["tree/por"] > 0.4 and metrics["tree/depth"] >= 3
        assert metrics["tree/failed_sessions"] == 0 and metrics["tree/forks"] > 0
        assert 1.5 < metrics["tree/compression"] <= 1 / (1 - metrics["tree/por"]) + 1e-6


def test_ten_steps_equal_those_of_verls_engine(folder: Path, tree: dict[int, dict[str, Any]]) -> None:
    """Losses and gradient norms relative to their largest size in the run; rewards exactly."""
    flat = run(folder, "flat", *options(folder), "tree.enabled=false")
    assert set(tree) == set(flat) == set(STEPS)
    for name in COMPARED:
        scale = max(abs(metrics[name]) for metrics in flat.values())
        assert scale > 0, name
        # AdamW divides by gradients that are almost zero; with SGD the engines stay within 1e-6 (test_engines.py).
        worst = max(abs(tree[step][name] - flat[step][name]) for step in STEPS) / scale
        assert worst <= 1e-3, (name, worst)
    for name in ("critic/score/mean", "tree/session_reward/mean", "tree/por"):
        assert [tree[step][name] for step in STEPS] == [flat[step][name] for step in STEPS], name


def test_a_run_whose_engine_is_killed_says_so_and_resumes(folder: Path, tree: dict[int, dict[str, Any]]) -> None:
    """The cause is named at once; the next start goes on behind the last checkpoint, with the same losses."""
    saved = (f"trainer.save_freq={SAVE_FREQ}", "trainer.resume_mode=auto")
    log = run_and_kill_engine(
        folder, "killed", *options(folder), *saved, "tree.watchdog.poll_s=0.5", after_step=SAVE_FREQ + 1
    )
    assert re.search(r"RunFailedError: .*VLLM::", log)
    assert "--- last 40 lines of stderr of actor" in log
    resumed = run(folder, "resumed", *options(folder), *saved)
    # The run may have reached its second checkpoint before the watchdog looked.
    assert min(resumed) in (SAVE_FREQ + 1, 2 * SAVE_FREQ + 1) and max(resumed) == STEPS[-1]
    for name in COMPARED:
        for step, metrics in resumed.items():
            assert metrics[name] == pytest.approx(tree[step][name], rel=1e-5, abs=1e-7), (name, step)
