"""The tree engine computes what verl's FSDP2 engine computes on rows with images: on one and two ranks, in fp32."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from image_cases import FAMILIES, FAMILY_NAMES
from image_engine_cases import FROZEN
from rank_scripts import run_script

# All cases of some ranks run at once, which takes minutes on a busy machine.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

TOLERANCE = 1e-5
"""Relative, float32 against float32."""

NAMES = {1: ["one_pack"], 2: ["packs", "gradient_checkpointing", "lora", "relay", "gspo"]}
"""Cases by the number of ranks; docs/images.md has what all of them measured."""

LONG = {"gradient_checkpointing", "gspo"}
"""Cases that are left to `scripts/test.sh --long`."""


@pytest.fixture(scope="module")
def results(
    selected: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], dict[str, Any]]:
    """Return what runs the selected cases of a number of ranks, once each."""
    folder = tmp_path_factory.mktemp("image_engines")

    def run(num_ranks: int) -> dict[str, Any]:
        out = folder / f"{num_ranks}.json"
        # A frozen tower is a test of its own, on one rank.
        names = {each.get("name", FROZEN) for each in selected if each.get("num_ranks", 1) == num_ranks}
        return run_script("image_engine_cases.py", *sorted(names), num_ranks=num_ranks, out=out)

    return cache(run)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("num_ranks", "name"),
    [
        pytest.param(ranks, name, marks=[pytest.mark.long] if name in LONG else [])
        for ranks, names in NAMES.items()
        for name in names
    ],
)
def test_equals_verls_own_engine(
    results: Callable[[int], dict[str, Any]],
    num_ranks: int,
    name: str,
    family: str,
    record_property: Callable[[str, object], None],
) -> None:
    """Compare log-probs, entropy, loss, the gradient of text part and tower, and every parameter after the step."""
    errors = results(num_ranks)[f"{family}-{name}"]
    for each in ("log_probs", "entropy", "gradient", "step", "grad_norm"):
        assert errors[each] <= TOLERANCE, (each, errors)
    assert errors["loss_difference"] <= TOLERANCE * max(1.0, errors["loss"]), errors
    # An empty comparison would pass.
    assert errors["gradient_norm"] > 1e-3, errors
    assert errors["moved"] > 1e-4, errors
    assert errors["por"] > 0.4, errors
    assert errors["tower_gradients"] >= 4, errors
    # GSPO clips whole rows.
    assert name == "gspo" or errors["clipped"] > 0.01, errors
    ranks = "1 rank" if num_ranks == 1 else "2 ranks"
    record_property(f"{FAMILY_NAMES[family]} | engine, {ranks}", errors["gradient"])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_frozen_tower_stays_and_the_text_part_learns_as_ever(
    results: Callable[[int], dict[str, Any]], family: str
) -> None:
    found = results(1)[f"{family}-{FROZEN}"]
    assert found["tower_gradients"] >= 4, found
    assert found["frozen_tower_gradients"] == found["tower_moved"] == found["text_stayed"] == 0, found
    assert found["text_gradient"] <= TOLERANCE, found
