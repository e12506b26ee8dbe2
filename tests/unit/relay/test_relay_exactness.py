"""Relayed trees against flat rows, in float64, under every loss of verl 0.9.1 with every aggregation.

Flat is transformers' SDPA on one sequence after another and one call of the loss on all rows. The loss and the gradient
of every parameter agree to 1e-10, relative to each; the errors are around 1e-14.

All losses meet all aggregations, `CASES`. For each of these 73 cases, what else varies is drawn with a fixed seed: two
of seven capacities from 2 to T, no or either kind of gradient checkpointing, the store on the device or the host, the
loss whole or in groups of rows, and the kind of KL, with entropy. The 24 forests go round.
"""

from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from tiny_models import tiny_model

pytest.importorskip("verl")

from relay_cases import (
    AGGREGATIONS,
    NUM_FORESTS,
    POLICY_LOSSES,
    LossCase,
    flat_result,
    flat_rows,
    forest,
    lay_out,
    relayed_result,
    verl_rows,
    worst_error,
)

from verl_tree.engine.losses.row_losses import is_sum_over_rows
from verl_tree.relay.store import ContextStore
from verl_tree.tree import TokenForest

TOLERANCE = 1e-10
CASES = [*product([*POLICY_LOSSES, "value"], AGGREGATIONS), ("sft", AGGREGATIONS[0])]
KL_TYPES = [None, "kl", "abs", "mse", "low_var_kl", "k1+", "k3+"]


@cache
def model_of(kind):
    if kind == "critic":
        return tiny_model("qwen3 critic", num_labels=1, classifier_dropout=0.0)
    return tiny_model()


@pytest.fixture(autouse=True)
def _leave_the_models_as_they_were():
    yield
    for kind in ("policy", "critic"):
        model_of(kind).gradient_checkpointing_disable()
        model_of(kind).eval()


def flat_side(case, *, seed):
    """Return the model, verl's rows and their scores by themselves."""
    model = model_of("critic" if case.name == "value" else "policy")
    model.set_attn_implementation("sdpa")
    scores = flat_rows(model, forest(seed), is_critic=case.name == "value")
    return model, verl_rows(forest(seed), scores, case, seed=seed), scores


def test_the_forests_have_every_special_case():
    with_special = {"several roots": 0, "one-token nodes": 0, "duplicates": 0, "strict prefixes": 0}
    for seed in range(NUM_FORESTS):
        rows, tree = {tuple(row.tolist()) for row in forest(seed)}, TokenForest.from_sequences(forest(seed))
        assert tree.depth >= 3
        with_special["several roots"] += tree.num_roots > 1
        with_special["one-token nodes"] += bool((tree.node_end - tree.node_start == 1).any())
        with_special["duplicates"] += len(rows) < tree.num_leaves
        with_special["strict prefixes"] += any(len(a) < len(b) and b[: len(a)] == a for a in rows for b in rows)
    assert min(with_special.values()) >= NUM_FORESTS // 2, with_special


@pytest.mark.parametrize(
    ("number", "name", "aggregation"),
    [(number, name, aggregation) for number, (name, aggregation) in enumerate(CASES)],
    ids=[f"{name}-{mode}-{'-'.join(options) or 'plain'}" for name, (mode, options) in CASES],
)
# What torch says of a layer that it will recompute, but whose forward runs without gradient.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_every_loss_with_every_aggregation(number, name, aggregation):
    rng, (mode, options) = np.random.default_rng(number), aggregation
    kl_type = KL_TYPES[rng.integers(len(KL_TYPES))]
    if kl_type is not None and name in POLICY_LOSSES:
        options = options | {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": kl_type, "entropy_coeff": 0.2}
    case = LossCase(name, mode, options)
    # The six aggregations of a loss meet six forests, and each of them meets another one with the next loss.
    model, data, scores = flat_side(case, seed=(number + number // 6) % NUM_FORESTS)
    micro = lay_out(data, capacity=2, mode="rows")
    want = flat_result(model, data, scores, case, rows=micro.rows)
    assert min(gradient.norm() for gradient in want.gradients.values()) > 0

    recomputes = [None, {"use_reentrant": False}, {"use_reentrant": True}][rng.integers(3)]
    if recomputes is not None:
        model.gradient_checkpointing_enable(recomputes)
        model.train()
    num_tokens = micro.layout.num_tokens
    for capacity in rng.choice(
        [2, 4, 7, num_tokens // 4, num_tokens // 2, num_tokens - 1, num_tokens], 2, replace=False
    ):
        settings = {"capacity": max(int(capacity), 2), "on_host": rng.random() < 0.5}
        settings["max_loss_terms"] = [None, 7][rng.integers(2)]
        assert worst_error(relayed_result(model, data, case, **settings), want) < TOLERANCE, (settings, recomputes)


def test_both_forms_of_the_schedule_run():
    """Guards the test above: 3 policy losses and one aggregation couple rows."""
    known = [is_sum_over_rows(LossCase(name, *aggregation).function()) for name, aggregation in CASES]
    assert (sum(known), len(known)) == (9 * 5 + 1, 12 * 6 + 1)


def test_clipping_is_active():
    """Guards the test above: some tokens or rows are clipped and some are not, below and above."""
    for name in ("vanilla", "gspo", "dppo_tv", "dppo_kl", "cispo", "clip_cov", "geo_mean", "value"):
        fractions = []
        for seed in (0, 1):
            case = LossCase(name)
            model, data, scores = flat_side(case, seed=seed)
            rows = lay_out(data, capacity=2, mode="rows").rows
            (metrics,) = flat_result(model, data, scores, case, rows=rows).metrics
            if name == "value":
                fractions.append(metrics["critic/vf_clipfrac"])
            else:
                fractions += metrics["actor/pg_clipfrac"].values
        assert 0.05 < np.mean(fractions) < 0.95, (name, fractions)


@pytest.mark.parametrize("shared_tokens", ["mean", "once"])
@pytest.mark.parametrize("name", ["vanilla", "gspo"])
def test_another_objective_for_shared_tokens_is_that_of_one_pack(name, shared_tokens):
    """Flat rows have no such objective, so a pack of all tokens is the reference."""
    case = LossCase(name, "seq-mean-token-mean", {"entropy_coeff": 0.2})
    model, data, _ = flat_side(case, seed=3)
    num_tokens = lay_out(data, capacity=2, mode="rows").layout.num_tokens
    pack = relayed_result(model, data, case, capacity=num_tokens, shared_tokens=shared_tokens)
    assert worst_error(relayed_result(model, data, case, capacity=num_tokens), pack) > 1e-2
    for capacity in (2, 7):
        got = relayed_result(model, data, case, capacity=capacity, shared_tokens=shared_tokens)
        assert worst_error(got, pack) < TOLERANCE


@pytest.mark.parametrize("name", ["vanilla", "value", "kl_cov"])
def test_gradients_that_are_not_handed_up_are_missed(name, monkeypatch):
    """Guards all tests here: without the gradients of the spine's keys and values, the result is another one."""
    add, dropped = ContextStore.add, []

    def forget(store, layer, rows, gradients):
        sums = add(store, layer, rows, gradients)
        dropped.append(max(float(each.abs().max()) for each in sums))
        return tuple(torch.zeros_like(each) for each in sums)

    case = LossCase(name)
    for seed in range(4):
        model, data, scores = flat_side(case, seed=seed)
        want = flat_result(model, data, scores, case, rows=lay_out(data, capacity=2, mode="rows").rows)
        with monkeypatch.context() as patch:
            patch.setattr(ContextStore, "add", forget)
            dropped.clear()
            got = relayed_result(model, data, case, capacity=7)
        assert max(dropped) > 1e-4
        assert worst_error(got, want) > 1e-3
