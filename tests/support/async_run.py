"""What whole runs of the asynchronous trainers share: ten steps with a kill in the middle, and what must hold."""

from pathlib import Path
from typing import Any

from replayed_runs import replaying_options, worst_difference
from storing_buffer import storing_options
from tiny_run import CHARACTERS, run, run_and_kill_driver

from verl_tree.records import StoredTree, read_trees

NUM_STEPS = 10
SAVE_FREQ = 4
LAST_SAVED = 8
NUM_PROMPTS = 4
"""Prompts a step; as many are in flight between steps."""

Metrics = dict[int, dict[str, Any]]

LONG_TAIL = (
    "actor_rollout_ref.rollout.agent.default_agent_loop=long_tail",
    "data.max_response_length=160",
    "actor_rollout_ref.rollout.max_model_len=240",
)
"""Long sessions: `long_tail_loop`, with room for the long turn."""
COLOCATE = (
    *LONG_TAIL,
    "trainer.v1.trainer_mode=colocate_async",
    "algorithm.rollout_correction.rollout_is=token",
    "algorithm.rollout_correction.rollout_rs=token_k1",
    "algorithm.rollout_correction.rollout_rs_threshold='0.9_1.1'",
)
"""Trainer and rollouts in the same places, with stale rows corrected and rejected token by token."""
RELAY_CAPACITY = 16
"""Tokens of a section. Every trajectory is longer."""
SEPARATE = (
    *LONG_TAIL,
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=2",
    "actor_rollout_ref.hybrid_engine=false",
)
"""Rollouts in processes of their own, which get new weights every second step."""


def run_killed_and_resumed(folder: Path, *mode: str, only_resumed: tuple[str, ...] = ()) -> Metrics:
    """Train, kill the driver behind the first checkpoint, resume, and return the metrics of all ten steps.

    Both parts store what they sample in `folder/rollouts` and what they train in `folder/trees`. The second part has
    the options `only_resumed`, too; the steps behind `LAST_SAVED` are always its own.
    """
    options = (
        *mode,
        *storing_options(folder / "rollouts"),
        f"tree.dump_dir={folder}/trees",
        f"trainer.save_freq={SAVE_FREQ}",
        "trainer.resume_mode=auto",
    )
    killed = run_and_kill_driver(folder, "killed", *options, after_step=SAVE_FREQ + 1)
    assert max(killed) < NUM_STEPS
    continued = run(folder, "resumed", *options, *only_resumed, f"trainer.test_freq={NUM_STEPS}")
    first = min(continued)
    # The run may have reached its second checkpoint before it was killed.
    assert first in (SAVE_FREQ + 1, LAST_SAVED + 1)
    assert f"Restored {NUM_PROMPTS} training prompt groups" in (folder / "resumed.log").read_text()
    return {step: metrics for step, metrics in killed.items() if step < first} | continued


def read_steps(folder: Path, steps: Metrics) -> dict[int, list[StoredTree]]:
    """Return the trees that each step trained."""
    return {step: read_trees(folder / "trees" / f"step_{step:06d}.parquet") for step in steps}


def check_relay(metrics: dict[str, Any]) -> None:
    """Assert that a step with `RELAY_CAPACITY` relayed every tree, and computed every token once."""
    assert metrics["prompt_length/min"] >= RELAY_CAPACITY
    assert metrics["tree/err"] == metrics["tree/por"]
    assert metrics["tree/sections"] >= metrics["tree/tokens"] / RELAY_CAPACITY
    assert metrics["tree/packs"] == 0
    assert 0 < metrics["tree/spine_ratio"] < 1
    assert metrics["tree/store_gib"] > 0


def check_prompts(trees: dict[int, list[StoredTree]]) -> None:
    """Assert that no prompt is lost or trained twice, and that no group lacks a leaf."""
    groups = [group for step in sorted(trees) for group in trees[step]]
    assert [len(group.leaves) for group in groups] == [2 * 4] * NUM_PROMPTS * len(trees)
    numbers = [prompt_number(group) for group in groups]
    assert len(set(numbers)) == len(numbers) == len(trees) * NUM_PROMPTS
    # What was never trained was in flight at the end.
    assert max(numbers) < (len(trees) + 1) * NUM_PROMPTS
    for number, group in zip(numbers, groups, strict=True):
        assert f"task {number % 16} of this run?" in prompt_text(group)


def check_replay(folder: Path, steps: Metrics, *mode: str) -> Metrics:
    """Assert that verl's engine gives the same on the stored rollouts; return its metrics."""
    options = replaying_options(f"{folder}/rollouts", num_steps=NUM_STEPS)
    flat = run(folder, "flat", *mode, *options, "tree.enabled=false")
    worst = worst_difference(steps, flat)
    assert max(worst.values()) <= 1e-6, worst
    assert [steps[step]["critic/score/mean"] for step in flat] == [flat[step]["critic/score/mean"] for step in flat]
    return flat


def prompt_number(tree: StoredTree) -> int:
    """Return the number that the trainer gave to the prompt."""
    return int(tree.uid.split("-")[0])


def prompt_text(tree: StoredTree) -> str:
    """Return a group's prompt in the tiny model's characters."""
    leaf = tree.leaves[0]
    specials = "<end>", "<pad>", "<unk>", ":"
    return "".join([*specials, *CHARACTERS][token] for token in leaf.token_ids[: leaf.prompt_len])
