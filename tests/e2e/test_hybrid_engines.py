"""Hybrids: the tree engine computes what verl's FSDP2 engine computes, on one and two ranks, in fp32, on gloo."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from engine_cases import Case
from hybrid_engine_cases import CASES, SHORT_CONVS
from rank_scripts import run_script

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

TOLERANCE = 1e-5
"""Relative, per optimiser step, float32 against float32; two chunk sizes of the flat rule differ by as much."""

TITLES = {
    "qwen3_next": "Qwen3-Next",
    "qwen3_5_text": "Qwen3.5",
    "qwen3_5": "Qwen3.5",
    "qwen3_5_moe_text": "Qwen3.5-MoE",
    "olmo_hybrid": "OLMo-Hybrid",
    "lfm2": "LFM2",
    "lfm2_moe": "LFM2-MoE",
    "granitemoehybrid": "Granite-4 hybrid",
}
"""Rows of docs/models.md."""

LONG = {
    ("qwen3_next", "kl_and_entropy"),
    ("qwen3_next", "lora"),
    ("qwen3_5_text", "gradient_checkpointing"),
    ("qwen3_5_text", "duplicates_and_prefixes"),
    ("qwen3_5_text", "one_token_responses"),
    ("qwen3_5_text", "idle_rank"),
    ("qwen3_5_text", "three_steps"),
    ("olmo_hybrid", "relay_lora"),
    ("lfm2", "relay_lora"),
    ("granitemoehybrid", "relay_lora"),
    ("qwen3_5", "gradient_checkpointing"),
    ("qwen3_5", "lora"),
}
"""Cases that are left to `scripts/test.sh --long`. Each family stays, and each kind of case with one family."""

ON_ONE_RANK = ("qwen3_next", "qwen3_5")
"""Families that stay on one rank, too: one without and one with a vision tower."""


def marks_of(num_ranks: int, family: str, name: str = "token_mean") -> list[pytest.MarkDecorator]:
    """Return the mark of a case that is left to `scripts/test.sh --long`."""
    stays = (family, name) not in LONG and (num_ranks == 2 or family in ON_ONE_RANK)
    return [] if stays else [pytest.mark.long]


NAMES = [
    pytest.param(num_ranks, family, case, marks=marks_of(num_ranks, family, case.name))
    for num_ranks in (1, 2)
    for family, cases in CASES.items()
    for case in (cases[:1] if num_ranks == 1 else cases)
]


@pytest.fixture(scope="module")
def results(
    selected: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], dict[str, Any]]:
    """Return what runs the selected cases of a number of ranks, once each."""
    folder = tmp_path_factory.mktemp("hybrids")

    def run(num_ranks: int) -> dict[str, Any]:
        names = {
            f"{each['family']}_{each['case'].name if 'case' in each else 'token_mean'}"
            for each in selected
            if each["num_ranks"] == num_ranks
        }
        return run_script(
            "hybrid_engine_cases.py", *sorted(names), num_ranks=num_ranks, out=folder / f"{num_ranks}.json"
        )

    return cache(run)


@pytest.mark.parametrize(
    ("num_ranks", "family", "case"), NAMES, ids=lambda each: each.name if isinstance(each, Case) else str(each)
)
def test_equals_verls_own_engine(
    results: Callable[[int], dict[str, Any]],
    num_ranks: int,
    family: str,
    case: Case,
    record_property: Callable[[str, object], None],
) -> None:
    """Compare log-probs, entropy, values, loss, every gradient and every parameter after the steps."""
    errors = results(num_ranks)[f"{family}_{case.name}"]
    tolerance = TOLERANCE * case.num_steps
    outputs = ("values",) if case.is_critic else ("log_probs", "entropy")
    for name in (*outputs, "gradient", "grad_norm", "step"):
        assert errors[name] <= tolerance, (name, errors)
    assert errors["loss_difference"] <= tolerance * max(1.0, errors["loss"]), errors
    # An empty comparison would pass.
    assert errors["gradient_norm"] > 1e-3, errors
    assert errors["moved"] > 1e-5, errors
    if case.rows == "deep":
        assert errors["por"] > 0.3, errors
    if case.name.startswith("relay"):
        assert errors["sections"] > 5, errors
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    record_property(f"{TITLES[family]} | {'critic' if case.is_critic else f'engine, {ranks}'}", errors["gradient"])


@pytest.mark.parametrize(
    ("num_ranks", "family"),
    [
        pytest.param(num_ranks, family, marks=marks_of(num_ranks, family))
        for num_ranks in (1, 2)
        for family in CASES
        if family not in SHORT_CONVS
    ],
)
def test_two_right_answers_of_the_flat_engine_differ_as_much(
    results: Callable[[int], dict[str, Any]], num_ranks: int, family: str
) -> None:
    """In chunks of 8 and of 64 tokens: the gradients of the tree are as near to the one as the other is."""
    errors = results(num_ranks)[f"{family}_token_mean"]
    assert 0.0 < errors["gradient"] < 5 * errors["flat_gradient"], errors
