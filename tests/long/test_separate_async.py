"""Ten steps of `separate_async` on long-tailed sessions: killed in the middle, resumed, repeated by verl's engine."""

from pathlib import Path

import pytest
from async_run import (
    NUM_STEPS,
    SEPARATE,
    Metrics,
    check_prompts,
    check_replay,
    read_steps,
    run_killed_and_resumed,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def resumed(folder: Path) -> Metrics:
    return run_killed_and_resumed(folder, *SEPARATE)


def test_no_prompt_is_lost_or_trained_twice(folder: Path, resumed: Metrics) -> None:
    assert sorted(resumed) == list(range(1, NUM_STEPS + 1))
    check_prompts(read_steps(folder, resumed))
    assert max(metrics["training/off_policy/trajectory_staleness/max"] for metrics in resumed.values()) >= 1


def test_ten_steps_equal_those_of_verls_engine(folder: Path, resumed: Metrics) -> None:
    flat = check_replay(folder, resumed, *SEPARATE)
    assert [resumed[step]["tree/por"] for step in flat] == [flat[step]["tree/por"] for step in flat]
