"""Ten steps on long-tailed sessions by the asynchronous trainers: killed, resumed, and repeated by verl's engine.

Both parts of a killed run store what they sample. verl's flat engine then trains on all ten steps in one go: losses and
gradient norms agree over a kill, and over the relay of the second part's trees.
"""

from pathlib import Path

import pytest
from async_run import (
    COLOCATE,
    LAST_SAVED,
    NUM_STEPS,
    RELAY_CAPACITY,
    SAVE_FREQ,
    SEPARATE,
    check_prompts,
    check_relay,
    check_replay,
    read_steps,
    run_killed_and_resumed,
)
from tiny_run import make_inputs

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]


def test_colocate_async(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    steps = run_killed_and_resumed(tmp_path, *COLOCATE, only_resumed=(f"tree.capacity={RELAY_CAPACITY}",))
    assert sorted(steps) == list(range(1, NUM_STEPS + 1))
    check_prompts(read_steps(tmp_path, steps))
    assert all(steps[step]["tree/packs"] > 0 for step in range(1, SAVE_FREQ + 1)), "the first part relays nothing"
    for step in range(LAST_SAVED + 1, NUM_STEPS + 1):
        check_relay(steps[step])

    flat = check_replay(tmp_path, steps, *COLOCATE)
    for name in ("tree/por", "rollout_corr/rollout_rs_masked_fraction"):
        assert [steps[step][name] for step in flat] == [flat[step][name] for step in flat]


def test_separate_async(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    steps = run_killed_and_resumed(tmp_path, *SEPARATE)
    assert sorted(steps) == list(range(1, NUM_STEPS + 1))
    check_prompts(read_steps(tmp_path, steps))
    assert max(metrics["training/off_policy/trajectory_staleness/max"] for metrics in steps.values()) >= 1

    flat = check_replay(tmp_path, steps, *SEPARATE)
    assert [steps[step]["tree/por"] for step in flat] == [flat[step]["tree/por"] for step in flat]
