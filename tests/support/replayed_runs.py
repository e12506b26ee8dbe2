"""Whole runs that store their rollouts or repeat stored ones, and the comparison of two of them."""

from pathlib import Path
from typing import Any

from tiny_run import run

COMPARED = ("actor/loss", "actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/grad_norm")
Metrics = dict[int, dict[str, Any]]


def replaying_options(folder: str, *, num_steps: int) -> tuple[str, ...]:
    """Return options that store the rollouts of each step, or replay stored ones."""
    return (
        "skip.rollout_tq.enable=true",
        "skip.rollout_tq.action=cache",
        f"skip.rollout_tq.steps={list(range(1, num_steps + 1))}".replace(" ", ""),
        f"skip.rollout_tq.dump_dir={folder}",
    )


def _one_update_options(num_steps: int) -> tuple[str, ...]:
    """Return options of so many steps with AdamW, of one update each."""
    return (
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.optimizer=AdamW",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        f"trainer.total_training_steps={num_steps}",
    )


def run_both(folder: Path, *overrides: str, num_steps: int, of_trees: tuple[str, ...] = ()) -> tuple[Metrics, Metrics]:
    """Train on trees with AdamW, one update a step, and repeat the rollouts on verl's own engine; return the metrics.

    `of_trees` are overrides that verl's own engine does not get.
    """
    stored = replaying_options(f"{folder}/rollouts", num_steps=num_steps)
    options = (*_one_update_options(num_steps), *stored, *overrides)
    tree = run(folder, "tree", *options, *of_trees)
    assert sorted(tree) == list(range(1, num_steps + 1))
    return tree, run(folder, "flat", *options, "tree.enabled=false")


def worst_difference(tree: Metrics, flat: Metrics) -> dict[str, float]:
    """Return for each compared metric the largest difference of a step, relative to the metric's largest size."""
    assert set(tree) == set(flat)
    worst = {}
    for name in COMPARED:
        scale = max(abs(metrics[name]) for metrics in flat.values())
        assert scale > 0, name
        worst[name] = max(abs(tree[step][name] - flat[step][name]) for step in flat) / scale
    return worst
