"""A few sessions of `python tests/fuzz/capture`, which runs as many as asked for, and those that once broke."""

import asyncio

import pytest
from fuzz_drivers import DRIVERS

SEEDS = {
    "tokens": [*range(30), 296, 488, 51455, 301502],
    "branch": [*range(40), 14, 56, 1606],
    "chat": range(25),
    "llm": range(30),
}


@pytest.mark.parametrize("driver", DRIVERS)
def test_rows_of_random_sessions_are_what_the_engine_served(driver):
    for seed in SEEDS[driver]:
        counts = asyncio.run(DRIVERS[driver](f"{driver}-{seed}"))
        assert counts["calls"] > 0
