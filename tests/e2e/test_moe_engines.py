"""Mixtures of experts on the tree engine are what they are on verl's own: one and two ranks, in fp32, LoRA, critics."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from moe_cases import CASES
from rank_scripts import run_script
from test_engines import TOLERANCE, assert_equal, assert_not_empty

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]


LONG = {("Qwen3-MoE", "checkpointing"), *(("gpt-oss", name) for name in ("lora", "checkpointing", "critic"))}
"""Cases on two ranks that are left to `scripts/test.sh --long`. On one rank the first of a family stays."""

NAMES = [
    pytest.param(ranks, 1, family, case.name, marks=[pytest.mark.long] if is_long else [])
    for ranks in (1, 2)
    for family, cases in CASES.items()
    for case in cases
    for is_long in [case != cases[0] if ranks == 1 else (family, case.name) in LONG]
]


@pytest.fixture(scope="module")
def results(
    selected: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int, int], dict[str, Any]]:
    """Return what runs the selected cases on a number of ranks, `sp` of them in a team, once each."""
    folder = tmp_path_factory.mktemp("moe")

    def run(num_ranks: int, sp: int) -> dict[str, Any]:
        out = folder / f"{num_ranks}_{sp}.json"
        mine = [each for each in selected if (each["num_ranks"], each["sp"]) == (num_ranks, sp)]
        names = [f"{each['family']} {each['name']}" for each in mine]
        return run_script("moe_cases.py", f"--sp={sp}", *names, num_ranks=num_ranks, out=out)

    return cache(run)


@pytest.mark.parametrize(
    ("num_ranks", "sp", "family", "name"),
    [*NAMES, *((2, 2, family, cases[0].name) for family, cases in CASES.items())],
)
def test_equals_verls_own_engine(
    results: Callable[[int, int], dict[str, Any]],
    num_ranks: int,
    sp: int,
    family: str,
    name: str,
    record_property: Callable[[str, object], None],
) -> None:
    (case,) = (case for case in CASES[family] if case.name == name)
    errors = results(num_ranks, sp)[f"{family} {name}"]
    assert_equal({name: errors}, case)
    assert_not_empty({name: errors}, case)
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    column = "Ulysses" if sp > 1 else "critic" if case.is_critic else f"engine, {ranks}"
    record_property(f"{family} | {column}", errors["gradient"])


def test_a_team_records_and_imposes_routes(tmp_path: Path) -> None:
    """Each rank has the routers of its own tokens; rows have the routes of all."""
    errors = run_script("replay_cases.py", num_ranks=2, out=tmp_path / "errors.json")
    assert errors["other experts"] == 0
    assert errors["gradient"] < TOLERANCE
    assert errors["gradient of forks"] < TOLERANCE
