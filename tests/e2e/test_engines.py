"""The tree engine computes what verl's FSDP2 engine computes: on one to four ranks, in fp32, real verl on gloo."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from engine_cases import CASES, RUNS, Case
from rank_scripts import run_script

# A fixture runs all cases of some ranks, which takes minutes on a busy machine.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

TOLERANCE = 1e-5
"""Relative, per optimiser step, float32 against float32."""

LONG = {
    (1, 1): set(RUNS[1, 1]) - {"token_mean", "critic", "mini_batches_of_sessions", "relay_joint"},
    (2, 1): {
        "one_pack",
        "dense_backend",
        *(f"packing_{each}" for each in ("heuristic", "exact", "deepest_first", "dfs_first_fit", "arrival_first_fit")),
        "small_chunks",
        "shared_tokens_once_flat",
        "gspo_mean",
        "gspo_once",
        "critic_seq_mean",
        *(f"session_weight_{each}" for each in ("token_sum", "gspo", "rollout_correction", "shared_tokens_mean")),
        "rollout_correction_seq-mean-token-mean",
        "bypass_ppo_clip",
        "single_row",
        *(f"relay_{each}" for each in ("checkpointing_on_host", "critic", "lora", "ten_steps")),
        *(f"relay_{each}" for each in ("rollout_correction", "bypass_reinforce")),
    },
    (2, 2): {
        "gradient_checkpointing",
        "tied_embeddings",
        "capacity_by_memory",
        "small_chunks",
        "duplicates_and_prefixes",
        "ten_steps",
        *(f"relay_{each}" for each in ("every_token", "critic", "lora", "temperature_per_row", "ten_steps")),
    },
    (4, 2): set(RUNS[4, 2]) - {"token_mean", "relay_idle_rank"},
    (4, 4): set(RUNS[4, 4]),
}
"""Cases that are left to `scripts/test.sh --long`.

What two ranks must agree on stays: every denominator, KL and entropy, LoRA, critics, ranks without work, each kind of
relay. All losses with all aggregations, and what changes no sum over ranks, are compared in float64 in `tests/unit`.
"""

NAMES = [
    pytest.param(*ranks, name, marks=[pytest.mark.long] if name in LONG.get(ranks, ()) else [])
    for ranks, names in RUNS.items()
    for name in names
]


@pytest.fixture(scope="module")
def results(
    selected: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int, int], dict[str, Any]]:
    """Return what runs the selected cases of a number of ranks, `sp` of them in a team, once each."""
    folder = tmp_path_factory.mktemp("engines")

    def run(num_ranks: int, sp: int) -> dict[str, Any]:
        out = folder / f"{num_ranks}_{sp}.json"
        names = [each["name"] for each in selected if (each["num_ranks"], each["sp"]) == (num_ranks, sp)]
        return run_script("engine_cases.py", f"--sp={sp}", *names, num_ranks=num_ranks, out=out)

    return cache(run)


@pytest.mark.parametrize(("num_ranks", "sp", "name"), NAMES)
def test_equals_verls_own_engine(
    results: Callable[[int, int], dict[str, Any]],
    num_ranks: int,
    sp: int,
    name: str,
    record_property: Callable[[str, object], None],
) -> None:
    """Compare log-probs, entropy, values, loss, every gradient and every parameter after the steps."""
    (case,) = (case for case in CASES if case.name == name)
    errors = results(num_ranks, sp)
    assert_equal(errors, case)
    assert_not_empty(errors, case)
    if case.same_objective and not case.planned:
        ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
        column = "Ulysses" if sp > 1 else "critic" if case.is_critic else f"engine, {ranks}"
        record_property(f"Qwen3 | {column}", errors[name]["gradient"])


def assert_equal(results: dict[str, Any], case: Case) -> None:
    """Compare the two sides of a case."""
    errors = results[case.name]
    tolerance = TOLERANCE * case.num_steps
    outputs = ("values",) if case.is_critic else ("log_probs", "entropy")
    updates = ("step", "grad_norm") if case.same_objective else ()
    gradients = ("gradient",) if case.same_objective and not case.planned else ()
    for name in (*outputs, *updates, *gradients):
        assert errors[name] <= tolerance, (name, errors)
    if not case.same_objective:
        assert errors["gradient"] > 1e-2, errors
    # The terms of the loss may cancel, so its error is relative to the terms, which are of order one.
    assert errors["loss_difference"] <= tolerance * max(1.0, errors["loss"]), errors


def assert_not_empty(results: dict[str, Any], case: Case) -> None:
    """Look for what a case needs to compare: the step moves the parameters, and deep rows share tokens."""
    errors = results[case.name]
    assert errors["gradient_norm"] > 1e-3, errors
    assert errors["moved"] > 1e-4, errors
    if case.rows == "deep":
        assert errors["por"] > 0.3, errors
        # Both clip and dual clip act. GSPO has no dual clip, and a critic has neither.
        assert case.is_critic or "policy_loss" in case.actor or errors["clipped"] > 0.01, errors
