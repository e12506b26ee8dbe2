"""A node that runs out of memory: Ray kills processes of the run, which ends with Ray's words and what needs less."""

import re
import time
from pathlib import Path

import psutil
import pytest
from faulty_run import FaultyRun

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(800)]

ROOM_BYTES = 9 * 2**30
"""What the run may take before Ray kills; the tiny run takes less."""
STEP_BYTES = 2**28
END_LIMIT_S = 120.0


def test_a_process_that_ray_kills_for_memory_ends_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process takes the rest of the room once the run has trained a step."""
    memory = psutil.virtual_memory()
    limit = memory.total - memory.available + ROOM_BYTES
    if limit > 0.9 * memory.total:
        pytest.skip(f"{memory.available} free bytes are too few to fill {ROOM_BYTES} of them")
    monkeypatch.setenv("RAY_memory_usage_threshold", f"{limit / memory.total:.4f}")
    taken: list[bytearray] = []
    with FaultyRun(folder, "memory", ("tree.watchdog.poll_s=0.5",)) as run:
        run.wait_for("generation", step=2)
        started = time.monotonic()
        while run.process.poll() is None and time.monotonic() - started < END_LIMIT_S:
            memory = psutil.virtual_memory()
            if memory.total - memory.available < limit + STEP_BYTES:
                taken.append(bytearray(b"x") * STEP_BYTES)
            else:
                time.sleep(0.1)
        taken.clear()
        assert run.process.wait(timeout=1.0) != 0
        assert run.left_after(30.0) == []
        assert re.search(r"the process of .* died: .*memory", run.log), run.log[-6000:]
        assert "To need less of the node's memory: fewer processes" in run.log
        assert 1 in run.metrics
