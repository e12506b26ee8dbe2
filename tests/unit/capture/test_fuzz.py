"""A few sessions of `python tests/fuzz/capture`, which runs as many as asked for, and those that once broke."""

import fuzz_drivers
import pytest
from fuzz_drivers import DRIVERS, run_session

from rollout_hooks.capture.session_tree import SessionTree

SEEDS = {
    "tokens": [*range(30), 296, 488, 51455, 301502],
    "branch": [*range(40), 14, 56, 1606],
    "chat": range(25),
    "llm": range(30),
}


@pytest.mark.parametrize("driver", DRIVERS)
def test_rows_of_random_sessions_are_what_the_engine_served(driver):
    for seed in SEEDS[driver]:
        counts = run_session(driver, seed)
        assert counts["calls"] > 0


@pytest.mark.parametrize(("max_replaced", "seed"), [(64, 0), (0, 1)])
async def test_long_sessions_lose_nothing_and_are_healed_nearly_everywhere(max_replaced, seed, monkeypatch):
    monkeypatch.setattr(
        fuzz_drivers, "new_tree", lambda _: SessionTree(decode=fuzz_drivers.decode, max_replaced=max_replaced)
    )
    counts, _ = await fuzz_drivers.tokens(f"long-{seed}", num_rounds=500)
    if max_replaced:
        assert counts["healed"] > 100
        assert counts["drifted"] < counts["healed"] / 50
    else:
        assert counts["healed"] == 0
        assert counts["drifted"] > 50
