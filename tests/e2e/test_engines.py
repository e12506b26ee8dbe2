"""The tree engines compute what verl's own compute: every family, on one to four ranks, in fp32 and fp64, on gloo."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from engine_cases import CASES_OF, GRADIENTS, RECURRENT, ROUNDED, SEQUENCE, VIRTUAL, Case
from rank_scripts import run_script
from tiny_models import IMAGES, MODELS, TITLES

from verl_tree.families import EXPERTS

# The cases of some ranks run at once, which takes minutes on a busy machine.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

TOLERANCE = 1e-5
"""Relative, per optimiser step, float32 against float32; two chunk sizes of the flat rule differ by as much."""
FLOAT64_TOLERANCE = 1e-10


def params(wanted: Callable[[Case], bool] = lambda _: True) -> list[Any]:
    """Return engines, numbers of ranks and cases, with the mark of what is left to `scripts/test.sh --long`."""
    return [
        pytest.param(engine, ranks, case, marks=marks, id=f"{case.family}-{case.name}-{engine}-{ranks[0]}in{ranks[1]}")
        for engine, cases in CASES_OF.items()
        for case in cases
        if wanted(case)
        for all_ranks, marks in ((case.runs, []), (case.long, [pytest.mark.long]))
        for ranks in all_ranks
    ]


@pytest.fixture(scope="module")
def results(selected: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Return what runs the selected cases of a number of ranks, so many of them in a team, once each."""
    folder = tmp_path_factory.mktemp("engines")

    def run(engine: str, ranks: tuple[int, int]) -> dict[str, Any]:
        num_ranks, sp = ranks
        names = {each["case"].key for each in selected if (each.get("engine"), each.get("ranks")) == (engine, ranks)}
        options = (f"--engine={engine}", f"--sp={sp}", *sorted(names))
        return run_script(
            "beside_verl.py", *options, num_ranks=num_ranks, out=folder / f"{engine}_{num_ranks}_{sp}.json"
        )

    return cache(run)


@pytest.mark.parametrize(("engine", "ranks", "case"), params())
def test_equals_verls_own_engine(
    results: Callable[..., dict[str, Any]],
    engine: str,
    ranks: tuple[int, int],
    case: Case,
    record_property: Callable[[str, object], None],
) -> None:
    """Compare log-probs, entropy, values, loss, every gradient and every parameter after the steps."""
    errors = results(engine, ranks)[case.key]
    assert_equal(errors, case)
    assert_not_empty(errors, case)
    if case.same_objective and not case.planned and not case.spoilt:
        of_ranks = "engine, 1 rank" if ranks[0] == 1 else f"engine, {ranks[0]} ranks"
        of_fsdp = "Ulysses" if ranks[1] > 1 else "critic" if case.is_critic else of_ranks
        column = {"veomni": "VeOmni", "megatron": "Megatron"}.get(engine, of_fsdp)
        record_property(f"{TITLES[case.family]} | {column}", errors["gradient"])


def assert_equal(errors: dict[str, float], case: Case) -> None:
    """Compare the two sides of a case; a control must be far off, or the canary must have seen it."""
    if case.spoilt == GRADIENTS:
        assert errors["seen"], errors
        return
    if case.spoilt == ROUNDED:
        assert all(TOLERANCE > errors[name] > 10 * FLOAT64_TOLERANCE for name in ("gradient", "log_probs")), errors
        return
    if case.spoilt:
        assert errors["gradient"] > 1e-2, errors
        assert errors["log_probs"] > 1e-3, errors
        return
    tolerance = (FLOAT64_TOLERANCE if case.float64 else TOLERANCE) * case.num_steps
    outputs = ("values",) if case.is_critic else ("log_probs", "entropy")
    updates = ("step", "grad_norm") if case.same_objective else ()
    gradients = ("gradient",) if case.same_objective and not case.planned else ()
    for name in (*outputs, *updates, *gradients):
        assert errors[name] <= tolerance, (name, errors)
    if not case.same_objective:
        assert errors["gradient"] > 1e-2, errors
    # The terms of the loss may cancel, so its error is relative to the terms, which are of order one.
    assert errors["loss_difference"] <= tolerance * max(1.0, errors["loss"]), errors


def assert_not_empty(errors: dict[str, float], case: Case) -> None:
    """Look for what a case needs to compare: the step moves the parameters, and deep rows share tokens."""
    if case.spoilt == GRADIENTS:
        return
    assert errors["gradient_norm"] > 1e-3, errors
    assert errors["moved"] > 2e-4 * case.lr, errors
    if case.rows == "deep":
        assert errors["por"] > 0.3, errors
        # Both clip and dual clip act. GSPO has no dual clip, and a critic has neither.
        assert case.is_critic or "policy_loss" in case.actor or errors["clipped"] > 0.01, errors
    # Rows whose advantages are 0 leave the update, and no others do.
    assert (errors["live_tokens"] < 0.8) == case.rows.startswith("dead"), errors
    if case.rows.startswith("forest"):
        assert errors["por"] > 0.1, errors
        assert (errors["sections"] > 1) == (case.capacity < 4096), errors
    if case.name.startswith("relay"):
        assert errors["sections"] > 5, errors
    # The canary looks at the last update, unless a mixture may choose other experts, another mini-batch was due, or a
    # control turned it off, whose update it would end.
    has_experts = any(MODELS[case.family].settings.get(name) for name in EXPERTS)
    assert (errors["canary"] < 0) == (has_experts or case.planned or bool(case.spoilt)), errors
    assert errors["canary"] < 5, errors
    if case.frozen_tower:
        assert errors["tower_gradients"] == 0, errors  # and with equal steps no side has moved it
    if case.family in IMAGES:
        assert errors["por"] > 0.4, errors
        assert case.frozen_tower or errors["tower_gradients"] >= 4, errors


@pytest.mark.parametrize(
    ("engine", "ranks", "case"),
    params(lambda case: case.family in RECURRENT and case.name == "token_mean" and "lfm2" not in case.family),
)
def test_two_right_answers_of_the_flat_engine_differ_as_much(
    results: Callable[..., dict[str, Any]], engine: str, ranks: tuple[int, int], case: Case
) -> None:
    """In chunks of 8 and of 64 tokens: the gradients of the tree are as near to the one as the other is."""
    errors = results(engine, ranks)[case.key]
    assert 0.0 < errors["gradient"] < 5 * errors["flat_gradient"], errors


RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
"""Layers run again after those of later calls."""


@pytest.mark.parametrize(
    ("strategy", "family", "options"),
    [
        pytest.param("fsdp_tree", "qwen3 moe", {}, id="FSDP2"),
        pytest.param("veomni_tree", "qwen3 moe", {}, marks=pytest.mark.long, id="VeOmni"),
        pytest.param("veomni_tree", "qwen3_5_moe_text", {}, marks=pytest.mark.long, id="VeOmni, Qwen3.5"),
        pytest.param(
            "megatron_tree",
            "qwen3 moe",
            VIRTUAL | {"override_transformer_config": RECOMPUTED},
            id="Megatron, stages",
        ),
        pytest.param(
            "megatron_tree",
            "qwen3 moe",
            SEQUENCE | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
            marks=pytest.mark.long,
            id="Megatron, tokens and experts",
        ),
    ],
)
def test_two_ranks_record_and_impose_routes(
    strategy: str, family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Each rank has the routers of its own tokens, or of its own layers; rows have the routes of all."""
    of_engine = (f"--strategy={strategy}", f"--family={family}", f"--engine-options={json.dumps(options)}")
    errors = run_script("replay_cases.py", *of_engine, num_ranks=2, out=tmp_path / "errors.json")
    assert errors["other experts"] == 0
    assert errors["gradient"] < TOLERANCE
    assert errors["gradient of forks"] < TOLERANCE


def test_what_veomni_cannot_do_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    told = run_script("engine_refusals.py", "--engine=veomni", num_ranks=1, out=tmp_path / "told.json")
    assert "trainer.n_gpus_per_node=1" in told["one rank"]
    assert told["adapters"].startswith("model.lora_rank=4: ")
    assert "veomni.expert_parallel_size=2: with " in told["parts of a critic"]
    assert "(lfm2): with " in told["another type"]
    assert "(gemma3_text): with model_engine=veomni, " in told["another critic"]
    assert "TreeVeOmniEngineConfig" in told["no tree options"]


@pytest.mark.long
def test_weights_that_veomni_does_not_find_are_not_drawn(tmp_path: Path) -> None:
    told = run_script("engine_refusals.py", "--engine=veomni weights", num_ranks=2, out=tmp_path / "told.json")
    assert "VeOmni does not find model." in told["names of an earlier transformers"]
    assert "VeOmni does not find lm_head.weight" in told["no head"]


def test_what_megatron_cannot_do_is_refused_when_the_model_is_built(tmp_path: Path) -> None:
    told = run_script("engine_refusals.py", "--engine=megatron", num_ranks=1, out=tmp_path / "told.json")
    assert told["adapters"].startswith("model.lora_rank=4: ")
    assert told["context"].startswith("megatron.context_parallel_size=2: ")
    assert told["dropout"].startswith("hidden_dropout=0.1 in Megatron's config")
    assert told["doubled experts"].startswith(
        "megatron.expert_tensor_parallel_size=2: with expert_model_parallel_size=1, "
    )
    assert told["no experts"].startswith("num_moe_experts=None in Megatron's config: routes are not replayed; set ")
    assert told["groups"].startswith("moe_router_group_topk=1 in Megatron's config: ")
    assert told["experts computed anew"].startswith("recompute_modules=['moe'] in Megatron's config: ")
