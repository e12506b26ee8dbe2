"""What the whole runs of the asynchronous trainers share: their options, and the comparison with verl's engine."""

from typing import Any

from tiny_run import CHARACTERS

from verl_tree.records import StoredTree

LONG_TAIL = (
    "actor_rollout_ref.rollout.agent.default_agent_loop=long_tail",
    "data.max_response_length=160",
    "actor_rollout_ref.rollout.max_model_len=240",
)
"""Long sessions: `long_tail_loop`, with room for the long turn."""

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


def prompt_number(tree: StoredTree) -> int:
    """Return the number that the trainer gave to the prompt."""
    return int(tree.uid.split("-")[0])


def prompt_text(tree: StoredTree) -> str:
    """Return a group's prompt in the tiny model's characters."""
    leaf = tree.leaves[0]
    specials = "<end>", "<pad>", "<unk>", ":"
    return "".join([*specials, *CHARACTERS][token] for token in leaf.token_ids[: leaf.prompt_len])
