"""Ten steps of `colocate_async` on long-tailed sessions: killed in the middle, resumed, and repeated by verl's engine.

Both parts of the killed run store what they sample. verl's flat engine then trains on all ten steps in one go.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from async_run import LONG_TAIL, prompt_number, prompt_text, replaying_options, worst_difference
from long_tail_loop import LONG_TURN_LEN, TURN_LEN
from storing_buffer import storing_options
from tiny_run import make_inputs, run, run_and_kill_driver

from verl_tree.records import StoredTree, read_trees

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

NUM_STEPS = 10
SAVE_FREQ = 4
NUM_PROMPTS = 4
"""Prompts a step; as many are in flight between steps."""

MODE = (
    *LONG_TAIL,
    "trainer.v1.trainer_mode=colocate_async",
    "algorithm.rollout_correction.rollout_is=token",
    "algorithm.rollout_correction.rollout_rs=token_k1",
    "algorithm.rollout_correction.rollout_rs_threshold='0.9_1.1'",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the inputs of all training runs."""
    folder = tmp_path_factory.mktemp("runs")
    make_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def resumed(folder: Path) -> dict[int, dict[str, Any]]:
    """Train, kill the driver behind the first checkpoint, resume, and return the metrics of all ten steps."""
    options = (
        *MODE,
        *storing_options(folder / "rollouts"),
        f"tree.dump_dir={folder}/trees",
        f"trainer.save_freq={SAVE_FREQ}",
        "trainer.resume_mode=auto",
    )
    killed = run_and_kill_driver(folder, "killed", *options, after_step=SAVE_FREQ + 1)
    assert max(killed) < NUM_STEPS
    continued = run(folder, "resumed", *options, f"trainer.test_freq={NUM_STEPS}")
    first = min(continued)
    # The run may have reached its second checkpoint before it was killed.
    assert first in (SAVE_FREQ + 1, 2 * SAVE_FREQ + 1)
    return {step: metrics for step, metrics in killed.items() if step < first} | continued


@pytest.fixture(scope="module")
def trees(folder: Path, resumed: dict[int, dict[str, Any]]) -> dict[int, list[StoredTree]]:
    """Return the trees that each step trained."""
    return {step: read_trees(folder / "trees" / f"step_{step:06d}.parquet") for step in resumed}


def test_all_steps_are_trained_on_whole_groups(
    resumed: dict[int, dict[str, Any]], trees: dict[int, list[StoredTree]]
) -> None:
    assert sorted(resumed) == list(range(1, NUM_STEPS + 1))
    for step, groups in trees.items():
        assert len(groups) == NUM_PROMPTS
        assert [len(group.leaves) for group in groups] == [2 * 4] * NUM_PROMPTS
        assert resumed[step]["tree/failed_prompts"] == 0
        assert resumed[step]["tree/depth"] >= 3


def test_no_prompt_is_lost_or_trained_twice(folder: Path, trees: dict[int, list[StoredTree]]) -> None:
    """Prompts are numbered in the order of the data, over the resume too, and each number is trained once."""
    log = (folder / "resumed.log").read_text()
    assert re.search(rf"Restored {NUM_PROMPTS} training prompt groups", log)
    groups = [group for step in sorted(trees) for group in trees[step]]
    numbers = [prompt_number(group) for group in groups]
    assert len(set(numbers)) == len(numbers) == NUM_STEPS * NUM_PROMPTS
    # What was never trained was in flight at the end.
    assert max(numbers) < (NUM_STEPS + 1) * NUM_PROMPTS
    for number, group in zip(numbers, groups, strict=True):
        assert f"task {number % 16} of this run?" in prompt_text(group)


def test_long_sessions_span_versions_and_keep_their_tokens(
    resumed: dict[int, dict[str, Any]], trees: dict[int, list[StoredTree]]
) -> None:
    leaves = [leaf for groups in trees.values() for group in groups for leaf in group.leaves]
    response_lens = [len(leaf.token_ids) - leaf.prompt_len for leaf in leaves]
    # Three turns a leaf, of which the last may be long, and three or four observed tokens.
    assert set(response_lens) == {3 * TURN_LEN + 3, 3 * TURN_LEN + 4, 2 * TURN_LEN + LONG_TURN_LEN + 3}
    for leaf in leaves:
        assert not np.isnan(leaf.log_probs[leaf.is_trained]).any()
    long_leaves = [leaf for leaf, length in zip(leaves, response_lens, strict=True) if length > LONG_TURN_LEN]
    spans = [leaf.max_global_steps - leaf.min_global_steps for leaf in long_leaves]
    assert max(spans) >= 1
    assert sum(metrics["tree/async/resumed_calls"] for metrics in resumed.values()) > 0
    assert max(metrics["training/off_policy/trajectory_staleness/max"] for metrics in resumed.values()) >= 1


def test_ten_steps_equal_those_of_verls_engine(folder: Path, resumed: dict[int, dict[str, Any]]) -> None:
    """Stale rows, corrected and rejected token by token: losses and gradient norms agree over kill and resume."""
    flat = run(
        folder, "flat", *MODE, *replaying_options(f"{folder}/rollouts", num_steps=NUM_STEPS), "tree.enabled=false"
    )
    worst = worst_difference(resumed, flat)
    assert max(worst.values()) <= 1e-6, worst
    for name in ("critic/score/mean", "rollout_corr/rollout_rs_masked_fraction"):
        assert [resumed[step][name] for step in flat] == [flat[step][name] for step in flat], name
    assert max(metrics["rollout_corr/rollout_rs_masked_fraction"] for metrics in flat.values()) > 0
