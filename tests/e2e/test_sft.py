"""Fine-tuning on trees is verl's own: the same losses and parameters, on one and two ranks, also after a restart."""

from typing import Any

import pytest
from rank_scripts import run_script

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

NUM_STEPS = 12
TOLERANCE = 1e-6
"""Of losses and gradient norms, relative, and of parameters of order one, after twelve steps of AdamW."""


@pytest.fixture(scope="module", params=[1, 2], ids=["1rank", "2ranks"])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all sides on some ranks."""
    out = tmp_path_factory.mktemp("sft") / "results.json"
    return run_script("sft_cases.py", num_ranks=request.param, out=out) | {"ranks": request.param}


def values(logged: dict[str, dict[str, float]], name: str) -> list[float]:
    """Return a metric of the steps that have it, in their order."""
    return [logged[step][name] for step in sorted(logged, key=int) if name in logged[step]]


@pytest.mark.parametrize("side", ["verls", "relayed", "flat"])
def test_equals_verls_own_trainer(results: dict[str, Any], side: str) -> None:
    """`verls` is verl's trainer with rows in our order; trees are in packs, or relayed; `flat` has no trees."""
    for name in ("train/loss", "train/grad_norm"):
        tree, other = (values(results["logged"][each], name) for each in ("tree", side))
        assert len(tree) == NUM_STEPS
        assert other == pytest.approx(tree, rel=TOLERANCE), name
    assert results["distances"][side] <= TOLERANCE


def test_the_comparison_is_not_empty(results: dict[str, Any]) -> None:
    """The model learns, rows share tokens, and on two ranks one of them lacks rows now and then."""
    tree = results["logged"]["tree"]
    losses = values(tree, "train/loss")
    assert losses[-1] < losses[0] - 0.3
    assert min(values(tree, "tree/por")) < max(values(tree, "tree/por"))
    assert sum(values(tree, "tree/packed_tokens")) < 0.7 * sum(values(tree, "tree/flat_tokens"))
    assert sum(values(results["logged"]["relayed"], "tree/sections")) > 0
    assert (results["num_padding"] > 0) == (results["ranks"] == 2)


def test_tokens_are_those_of_the_rows_without_padding(results: dict[str, Any]) -> None:
    """Ours has no row in which nothing is trained; verl counts it."""
    tree, flat = (results["logged"][side] for side in ("tree", "flat"))
    assert values(tree, "train/global_tokens") == values(tree, "tree/flat_tokens")
    assert values(tree, "train/global_tokens") == values(flat, "train/global_tokens")


def test_validation_is_the_mean_over_all_tokens(results: dict[str, Any]) -> None:
    """Three rows of different lengths on one or two ranks, computed with transformers from the exported model."""
    measured = values(results["logged"]["tree"], "val/loss")
    assert len(measured) == 3
    assert measured[-1] == pytest.approx(results["validation_loss"], rel=TOLERANCE)


@pytest.mark.parametrize("step", [4, 6], ids=["in an epoch", "at its end"])
def test_a_resumed_run_takes_the_same_steps(results: dict[str, Any], step: int) -> None:
    tree, resumed = results["logged"]["tree"], results["logged"]["resumed"][str(step)]
    assert sorted(map(int, resumed)) == list(range(step + 1, NUM_STEPS + 1))
    for number, metrics in resumed.items():
        for name in ("train/loss", "train/grad_norm", "train/global_tokens", "tree/tokens"):
            assert metrics[name] == tree[number][name], (number, name)
    assert results["distances"]["resumed"] == 0.0


def test_a_checkpoint_is_a_model_of_transformers(results: dict[str, Any]) -> None:
    assert results["distances"]["exported"] == 0.0
