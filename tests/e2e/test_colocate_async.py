"""Ten steps of `colocate_async` on long-tailed sessions: killed in the middle, resumed, and repeated by verl's engine.

Both parts of the killed run store what they sample. The second part relays its trees. verl's flat engine then trains on
all ten steps in one go.
"""

from pathlib import Path

import numpy as np
import pytest
from async_run import (
    LAST_SAVED,
    LONG_TAIL,
    NUM_PROMPTS,
    NUM_STEPS,
    SAVE_FREQ,
    Metrics,
    check_prompts,
    check_replay,
    read_steps,
    run_killed_and_resumed,
)
from long_tail_loop import LONG_TURN_LEN, TURN_LEN

from verl_tree.records import StoredTree

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

MODE = (
    *LONG_TAIL,
    "trainer.v1.trainer_mode=colocate_async",
    "algorithm.rollout_correction.rollout_is=token",
    "algorithm.rollout_correction.rollout_rs=token_k1",
    "algorithm.rollout_correction.rollout_rs_threshold='0.9_1.1'",
)
RELAY_CAPACITY = 16
"""Tokens of a section. Every trajectory is longer."""


@pytest.fixture(scope="module")
def resumed(folder: Path) -> Metrics:
    return run_killed_and_resumed(folder, *MODE, only_resumed=(f"tree.capacity={RELAY_CAPACITY}",))


@pytest.fixture(scope="module")
def trees(folder: Path, resumed: Metrics) -> dict[int, list[StoredTree]]:
    return read_steps(folder, resumed)


def test_all_steps_are_trained_on_whole_groups(resumed: Metrics, trees: dict[int, list[StoredTree]]) -> None:
    assert sorted(resumed) == list(range(1, NUM_STEPS + 1))
    for step, groups in trees.items():
        assert len(groups) == NUM_PROMPTS
        assert [len(group.leaves) for group in groups] == [2 * 4] * NUM_PROMPTS
        assert resumed[step]["tree/failed_prompts"] == 0
        assert resumed[step]["tree/depth"] >= 3


def test_no_prompt_is_lost_or_trained_twice(trees: dict[int, list[StoredTree]]) -> None:
    """Prompts are numbered in the order of the data, over the resume too, and each number is trained once."""
    check_prompts(trees)


def test_long_sessions_span_versions_and_keep_their_tokens(
    resumed: Metrics, trees: dict[int, list[StoredTree]]
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


def test_relayed_trees_compute_every_token_once(resumed: Metrics) -> None:
    assert all(resumed[step]["tree/packs"] > 0 for step in range(1, SAVE_FREQ + 1)), "the first part relays nothing"
    for step in range(LAST_SAVED + 1, NUM_STEPS + 1):
        metrics = resumed[step]
        assert metrics["prompt_length/min"] >= RELAY_CAPACITY
        assert metrics["tree/err"] == metrics["tree/por"]
        assert metrics["tree/sections"] >= metrics["tree/tokens"] / RELAY_CAPACITY
        assert metrics["tree/packs"] == 0
        assert 0 < metrics["tree/spine_ratio"] < 1
        assert metrics["tree/store_gib"] > 0


def test_ten_steps_equal_those_of_verls_engine(folder: Path, resumed: Metrics) -> None:
    """Stale rows, corrected and rejected token by token: losses and gradient norms agree over a kill and a relay."""
    flat = check_replay(folder, resumed, *MODE)
    assert [resumed[step]["tree/por"] for step in flat] == [flat[step]["tree/por"] for step in flat]
    rejected = "rollout_corr/rollout_rs_masked_fraction"
    assert [resumed[step][rejected] for step in flat] == [flat[step][rejected] for step in flat]
    assert max(metrics[rejected] for metrics in flat.values()) > 0
