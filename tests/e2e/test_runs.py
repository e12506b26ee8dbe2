"""One flag apart: the same stored rollouts through trees and through verl's own engine; and a killed run resumes."""

from pathlib import Path
from typing import Any

import pytest
from tiny_run import make_inputs, run, run_and_kill

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

COMPARED = ("actor/loss", "actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/grad_norm")
STEPS = range(1, 11)
ADAMW = ("actor_rollout_ref.actor.optim.optimizer=AdamW", "actor_rollout_ref.actor.optim.lr=1e-3")
SAVED = ("trainer.save_freq=4", "trainer.resume_mode=auto")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The inputs of all runs."""
    folder = tmp_path_factory.mktemp("runs")
    make_inputs(folder)
    return folder


def stored(folder: Path) -> tuple[str, ...]:
    """Store the rollouts of every step, or replay them where they are stored."""
    return (
        "skip.rollout_tq.enable=true",
        "skip.rollout_tq.action=cache",
        f"skip.rollout_tq.steps={list(STEPS)}".replace(" ", ""),
        f"skip.rollout_tq.dump_dir={folder}/rollouts",
    )


@pytest.fixture(scope="module")
def tree_sgd(folder: Path) -> dict[int, dict[str, Any]]:
    """The run that generates the rollouts."""
    return run(folder, "tree_sgd", *stored(folder))


@pytest.fixture(scope="module")
def tree_adamw(folder: Path, tree_sgd: Any) -> dict[int, dict[str, Any]]:
    """The stored rollouts with AdamW."""
    del tree_sgd
    return run(folder, "tree_adamw", *stored(folder), *ADAMW)


def check_equal(tree: dict[int, dict[str, Any]], flat: dict[int, dict[str, Any]], *, tolerance: float) -> None:
    """Losses and gradient norms relative to their largest size in the run; rewards exactly."""
    assert set(tree) == set(flat) == set(STEPS)
    for name in COMPARED:
        scale = max(abs(metrics[name]) for metrics in flat.values())
        assert scale > 0, name
        worst = max(abs(tree[step][name] - flat[step][name]) for step in STEPS) / scale
        print(f"{name}: {worst:.1e} of {scale:.3g}")
        assert worst <= tolerance, (name, worst)
    for name in ("critic/score/mean", "tree/session_reward/mean", "tree/por"):
        assert [tree[step][name] for step in STEPS] == [flat[step][name] for step in STEPS], name


def test_the_rollouts_branch(tree_sgd: dict[int, dict[str, Any]]) -> None:
    for metrics in tree_sgd.values():
        assert metrics["tree/leaves_per_session"] == 4.0
        assert metrics["tree/por"] > 0.4 and metrics["tree/depth"] >= 3
        assert metrics["tree/failed_sessions"] == 0 and metrics["tree/forks"] > 0
        assert 1.5 < metrics["tree/compression"] <= 1 / (1 - metrics["tree/por"]) + 1e-6


def test_sgd_steps_equal_those_of_verls_engine(folder: Path, tree_sgd: dict[int, dict[str, Any]]) -> None:
    flat = run(folder, "flat_sgd", *stored(folder), "tree.enabled=false")
    check_equal(tree_sgd, flat, tolerance=1e-4)


def test_adamw_steps_equal_those_of_verls_engine(folder: Path, tree_adamw: dict[int, dict[str, Any]]) -> None:
    flat = run(folder, "flat_adamw", *stored(folder), *ADAMW, "tree.enabled=false")
    check_equal(tree_adamw, flat, tolerance=1e-3)


def test_a_killed_run_resumes_with_the_same_next_loss(folder: Path, tree_adamw: dict[int, dict[str, Any]]) -> None:
    run_and_kill(folder, "killed", *stored(folder), *ADAMW, *SAVED, after_step=5)
    resumed = run(folder, "resumed", *stored(folder), *ADAMW, *SAVED)
    assert min(resumed) == 5 and max(resumed) == STEPS[-1]
    for name in COMPARED:
        for step, metrics in resumed.items():
            assert metrics[name] == pytest.approx(tree_adamw[step][name], rel=1e-5, abs=1e-7), (name, step)


def test_ppo_with_a_critic_on_two_ranks(folder: Path) -> None:
    """GAE on the leaves of two ranks; the critic learns on trees too. A mini-batch of one group is cut to feed both."""
    metrics = run(
        folder,
        "critic",
        "algorithm.adv_estimator=gae",
        f"critic.model.path={folder}/model",
        "critic.ppo_mini_batch_size=1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        "critic.ppo_max_token_len_per_gpu=256",
        "critic.optim.lr=1e-2",
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=3",
    )
    assert set(metrics) == {1, 2, 3}
    for step in metrics.values():
        assert step["critic/vf_loss"] > 0 and step["critic/grad_norm"] > 0 and step["actor/grad_norm"] > 0
        assert step["tree/por"] > 0.4 and step["tree/leaves_per_session"] == 4.0
        assert step["tree/cut_groups"] == 4 and step["tree/cut_tokens"] > 0
        assert 1.0 <= step["tree/rank_imbalance/predicted"] < 1.5
        assert 1.0 <= step["tree/rank_imbalance/measured"] < 2.0, "a rank had nothing to do"
        assert step["tree/gap"] >= 0.0 and 0.0 < step["tree/fill"] <= 1.0 and step["tree/packing_s"] > 0.0
    assert metrics[3]["critic/vf_loss"] < metrics[1]["critic/vf_loss"]
