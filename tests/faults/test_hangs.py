"""A tool that never answers ends the run, with the name of what waits."""

import re
import time
from pathlib import Path

import pytest
from faulty_run import FaultyRun

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(800)]

TIMEOUT_S = 120.0
"""Longer than the start of vLLM on a slow machine, in which no task ends either."""
END_LIMIT_S = TIMEOUT_S + 70.0
"""The time-out, two looks of the watchdog and the end of the processes."""


def test_a_tool_that_hangs_ends_the_run_and_is_named(folder: Path) -> None:
    with (folder / "loops.yaml").open("a") as loops:
        loops.write("- name: hanging\n  _target_: hanging_loop.HangingLoop\n")
    options = (
        "actor_rollout_ref.rollout.agent.default_agent_loop=hanging",
        f"tree.watchdog.timeout_s={TIMEOUT_S}",
        "tree.watchdog.poll_s=0.5",
    )
    with FaultyRun(folder, "hanging", options) as run:
        run.wait_for("generation", step=2)
        started = time.monotonic()
        assert run.process.wait(timeout=END_LIMIT_S) != 0
        assert time.monotonic() - started >= TIMEOUT_S, "it ended before the time-out"
        assert run.left_after(30.0) == []
        assert re.search(r"no Ray task has started or ended for 120 s .*AgentLoopWorker", run.log), run.log[-6000:]
        assert 1 in run.metrics
