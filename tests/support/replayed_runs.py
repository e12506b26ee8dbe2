"""Whole runs that store their rollouts or repeat stored ones, and the comparison of two of them."""

from typing import Any

COMPARED = ("actor/loss", "actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/grad_norm")


def replaying_options(folder: str, *, num_steps: int) -> tuple[str, ...]:
    """Return options that store the rollouts of each step, or replay stored ones."""
    return (
        "skip.rollout_tq.enable=true",
        "skip.rollout_tq.action=cache",
        f"skip.rollout_tq.steps={list(range(1, num_steps + 1))}".replace(" ", ""),
        f"skip.rollout_tq.dump_dir={folder}",
    )


def worst_difference(tree: dict[int, dict[str, Any]], flat: dict[int, dict[str, Any]]) -> dict[str, float]:
    """Return for each compared metric the largest difference of a step, relative to the metric's largest size."""
    assert set(tree) == set(flat)
    worst = {}
    for name in COMPARED:
        scale = max(abs(metrics[name]) for metrics in flat.values())
        assert scale > 0, name
        worst[name] = max(abs(tree[step][name] - flat[step][name]) for step in flat) / scale
    return worst
