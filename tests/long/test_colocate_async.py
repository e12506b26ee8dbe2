"""Six steps of `colocate_async` on long-tailed sessions, whose trees are relayed.

The run with a kill in it, and beside verl's engine, is `tests/long/test_async_runs.py`.
"""

from pathlib import Path

import numpy as np
import pytest
from async_run import (
    COLOCATE,
    NUM_PROMPTS,
    RELAY_CAPACITY,
    Metrics,
    check_prompts,
    check_relay,
    read_steps,
)
from long_tail_loop import LONG_TURN_LEN, TURN_LEN
from tiny_run import run

from verl_tree.records import StoredTree

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

NUM_STEPS = 6


@pytest.fixture(scope="module")
def steps(folder: Path) -> Metrics:
    relayed = f"tree.capacity={RELAY_CAPACITY}"
    stored = f"tree.dump_dir={folder}/trees"
    return run(folder, "colocate", *COLOCATE, relayed, stored, f"trainer.total_training_steps={NUM_STEPS}")


@pytest.fixture(scope="module")
def trees(folder: Path, steps: Metrics) -> dict[int, list[StoredTree]]:
    return read_steps(folder, steps)


def test_all_steps_are_trained_on_whole_groups(steps: Metrics, trees: dict[int, list[StoredTree]]) -> None:
    assert sorted(steps) == list(range(1, NUM_STEPS + 1))
    for step, groups in trees.items():
        assert len(groups) == NUM_PROMPTS
        assert steps[step]["tree/failed_prompts"] == 0
        assert steps[step]["tree/depth"] >= 3


def test_no_prompt_is_lost_or_trained_twice(trees: dict[int, list[StoredTree]]) -> None:
    """Prompts are numbered in the order of the data, and each number is trained once."""
    check_prompts(trees)


def test_long_sessions_span_versions_and_keep_their_tokens(steps: Metrics, trees: dict[int, list[StoredTree]]) -> None:
    leaves = [leaf for groups in trees.values() for group in groups for leaf in group.leaves]
    response_lens = [len(leaf.token_ids) - leaf.prompt_len for leaf in leaves]
    # Three turns a leaf, of which the last may be long, and three or four observed tokens.
    assert set(response_lens) == {3 * TURN_LEN + 3, 3 * TURN_LEN + 4, 2 * TURN_LEN + LONG_TURN_LEN + 3}
    for leaf in leaves:
        assert not np.isnan(leaf.log_probs[leaf.is_trained]).any()
    long_leaves = [leaf for leaf, length in zip(leaves, response_lens, strict=True) if length > LONG_TURN_LEN]
    spans = [leaf.max_global_steps - leaf.min_global_steps for leaf in long_leaves]
    assert max(spans) >= 1
    assert sum(metrics["tree/async/resumed_calls"] for metrics in steps.values()) > 0
    assert max(metrics["training/off_policy/trajectory_staleness/max"] for metrics in steps.values()) >= 1


def test_relayed_trees_compute_every_token_once(steps: Metrics) -> None:
    for metrics in steps.values():
        check_relay(metrics)


def test_stale_tokens_are_rejected(steps: Metrics) -> None:
    assert max(metrics["rollout_corr/rollout_rs_masked_fraction"] for metrics in steps.values()) > 0
