"""Updates without the rows that teach nothing, beside updates of all rows, in float64.

The policy losses of verl 0.9.1 for which that is exact meet all aggregations; the 24 forests, the estimators and the
capacities go round, and in `--long` all meet all. A forest has three prompts, of which none, some or all have equal
rewards.
"""

import logging
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from process_groups import group_of_one
from tiny_models import tiny_model

pytest.importorskip("verl")

from advantage_cases import rows_of
from plain_engine import PlainEngine
from relay_cases import (
    AGGREGATIONS,
    NUM_FORESTS,
    POLICY_LOSSES,
    LossCase,
    Result,
    WeightedLoss,
    flat_rows,
    forest,
    verl_rows,
    worst_error,
)
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.utils import tensordict_utils as tu

from verl_tree.attention.hf import ATTENTION_NAME
from verl_tree.clashes import POLICY_LOSSES_OF_ADVANTAGES
from verl_tree.config import TreeConfig
from verl_tree.engine.losses.live_rows import leaves_out, live_rows
from verl_tree.engine.losses.row_choice import choose_rows, probabilities
from verl_tree.engine.losses.session_weights import weigh_sessions
from verl_tree.trainer.advantages import ESTIMATORS, Call, announce_rows
from verl_tree.tree import TokenForest

TOLERANCE = 1e-12
ALL_ESTIMATORS = [*ESTIMATORS, "grpo", "rloo"]
CASES = [
    (name, aggregation)
    for name, aggregation in product(POLICY_LOSSES, AGGREGATIONS)
    if name in POLICY_LOSSES_OF_ADVANTAGES and aggregation != ("seq-mean-token-sum-norm", {})
]
"""Losses in which a token of advantage 0 has no gradient, in aggregations that look at no other row."""
CAPACITIES: list[dict[str, Any]] = [{"capacity": 1000}, {"capacity": 40, "relay": "never"}, {"capacity": 5}]
NUM_PROMPTS = 3


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with group_of_one():
        yield


@cache
def model() -> Any:
    return tiny_model()


@cache
def scores_of(seed: int) -> list[tuple[Tensor, ...]]:
    """Return the log-probs of the rows of a forest, each by itself."""
    model().set_attn_implementation("sdpa")
    return [tuple(each.detach() for each in row) for row in flat_rows(model(), sequences_of(seed))]


def sequences_of(seed: int) -> list[np.ndarray]:
    return [row for row in forest(seed) if len(row) > 1]


def rewards_of(seed: int, *, num_rows: int) -> np.ndarray:
    """Draw rewards: of the prompts of a forest, none have equal ones, or the first has, or all have."""
    rng, prompts = np.random.default_rng(seed), np.arange(num_rows) % NUM_PROMPTS
    num_equal = (0, 1, NUM_PROMPTS)[seed % 3]
    # Equal rewards of .3 have a mean other than .3 in floating point.
    return np.where(prompts < num_equal, 0.3, rng.random(num_rows))


def advantages_of(name: str, data: TensorDict, sequences: list[np.ndarray], rewards: np.ndarray) -> list[Tensor]:
    """Let an estimator compute the advantages of rows, as the trainer does."""
    masks = data["response_mask"].unbind()
    lens = [len(mask) for mask in masks]
    mask_RW = torch.zeros(len(masks), max(lens), dtype=torch.int64)
    rewards_RW = torch.zeros(mask_RW.shape, dtype=torch.float64)
    for row, mask in enumerate(masks):
        mask_RW[row, : lens[row]] = mask
        rewards_RW[row, lens[row] - 1] = rewards[row]
    prompts = [row % NUM_PROMPTS for row in range(len(masks))]
    rows = rows_of(
        keys=[f"u{prompt}_{row}_0" for row, prompt in enumerate(prompts)],
        sequences=sequences,
        response_lens=lens,
        calls=[[Call(len(row) - length, len(row))] for row, length in zip(sequences, lens, strict=True)],
    )
    index = np.array([f"u{prompt}" for prompt in prompts], dtype=object)
    with announce_rows(rows):
        values_RW, _ = (ESTIMATORS.get(name) or get_adv_estimator_fn(name))(
            token_level_rewards=rewards_RW, response_mask=mask_RW, index=index, config={}
        )
    return [values_RW[row, :length] for row, length in enumerate(lens)]


def batch(case: LossCase, *, seed: int, estimator: str, is_weighed: bool = False) -> TensorDict:
    """Make verl's mini-batch of a forest, with advantages of an estimator."""
    sequences = sequences_of(seed)
    data = verl_rows(sequences, scores_of(seed), case, seed=seed)
    rewards = rewards_of(seed, num_rows=len(sequences))
    advantages = advantages_of(estimator, data, sequences, rewards)
    data["advantages"] = torch.nested.as_nested_tensor(advantages, layout=torch.jagged)
    if not is_weighed:
        return data
    role_weights = [0.0 if row % 4 == 1 else 1.0 for row in range(len(data))]
    weigh_sessions(data, [row // 2 for row in range(len(data))], group=None, role_weights=role_weights)
    return data


def update(data: TensorDict, function: Any, **tree: Any) -> tuple[Result, PlainEngine, dict[str, Any]]:
    """Compute the gradients of an update."""
    model().set_attn_implementation(ATTENTION_NAME)
    model().zero_grad()
    engine = PlainEngine(model(), **tree)
    torch.manual_seed(0)  # clip_cov draws
    output = engine.forward_backward_batch(data.copy(), function)
    gradients = {name: each.grad.clone() for name, each in model().named_parameters() if each.grad is not None}
    return Result(sum(output["loss"]), gradients, []), engine, output["metrics"]


def compare(name: str, aggregation: tuple[str, dict[str, Any]], *, seed: int, estimator: str, capacity: int) -> int:
    """Compare both updates; return how many rows were left out."""
    case = LossCase(name, *aggregation)
    data = batch(case, seed=seed, estimator=estimator)
    live, engine, metrics = update(data, case.function(), **CAPACITIES[capacity])
    whole, of_all, all_metrics = update(data, case.function(), compute="all", **CAPACITIES[capacity])
    if any(gradient.any() for gradient in whole.gradients.values()):
        assert worst_error(live, whole) < TOLERANCE
    else:
        # The optimiser takes its step: it needs gradients, of 0.
        assert live.gradients.keys() == whole.gradients.keys()
        assert live.loss == whole.loss == 0.0
        assert not any(gradient.any() for gradient in live.gradients.values())
        assert all(metrics[name].aggregate() == 0.0 for name in metrics if "live_rows" in name)
    num_left_out = of_all.tree_counts.num_leaves - engine.tree_counts.num_leaves
    assert num_left_out == int((~live_rows(data)).sum())
    assert {key.replace("actor/live_rows/", "actor/") for key in metrics} == all_metrics.keys()
    assert {key for key in metrics if "live_rows" not in key} == {"actor/pg_loss"}
    return num_left_out


def test_other_losses_keep_all_rows() -> None:
    """Four losses, and the aggregation that divides by the longest row of a call."""
    leaving = [
        (name, each)
        for name, each in product([*POLICY_LOSSES, "value", "sft"], AGGREGATIONS)
        if leaves_out(LossCase(name, *each).function(), TreeConfig())
    ]
    assert leaving == CASES
    assert not leaves_out(None, TreeConfig())
    assert len(CASES) == 7 * 5


@pytest.mark.parametrize(
    ("number", "name", "aggregation"),
    [(number, *case) for number, case in enumerate(CASES)],
    ids=[f"{name}-{mode}-{'-'.join(options) or 'plain'}" for name, (mode, options) in CASES],
)
def test_an_update_without_rows_that_teach_nothing_is_the_same(
    number: int, name: str, aggregation: tuple[str, dict[str, Any]]
) -> None:
    seed, estimator = (5 * number) % NUM_FORESTS, ALL_ESTIMATORS[number // 5]  # five aggregations of seven losses
    compare(name, aggregation, seed=seed, estimator=estimator, capacity=number % 3)


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("estimator", ALL_ESTIMATORS)
def test_all_losses_aggregations_and_forests(estimator: str) -> None:
    left_out = [
        compare(name, aggregation, seed=seed, estimator=estimator, capacity=(number + seed) % 3)
        for number, (name, aggregation) in enumerate(CASES)
        for seed in range(NUM_FORESTS)
    ]
    assert sum(left_out) > 0


def test_groups_of_equal_rewards_are_left_out() -> None:
    """Guards the tests above: none, some and all rows leave; of `gigpo`, which compares steps, none of the middle."""
    shares: dict[str, list[float]] = {name: [] for name in ALL_ESTIMATORS}
    for name, seed in product(ALL_ESTIMATORS, range(3)):
        shares[name].append(float(live_rows(batch(LossCase(), seed=seed, estimator=name)).mean()))
    for name in ESTIMATORS:
        none, some, every = shares[name]
        assert none == 1.0
        assert 0.0 < some < 1.0
        assert every == 0.0
    assert [shares[name][0] for name in ("grpo", "rloo")] == [1.0, 1.0]


def test_rows_whose_session_or_correction_weighs_nothing_are_left_out() -> None:
    data = batch(WeightedLoss(), seed=0, estimator="tree_grpo", is_weighed=True)
    dead = [row for row in range(len(data)) if row % 4 == 1]
    assert np.flatnonzero(~live_rows(data)).tolist() == dead
    weights = [each * 0 if row == 0 else each for row, each in enumerate(data["rollout_is_weights"].unbind())]
    data["rollout_is_weights"] = torch.nested.as_nested_tensor(weights, layout=torch.jagged)
    assert np.flatnonzero(~live_rows(data)).tolist() == [0, *dead]
    live, engine, _ = update(data, WeightedLoss().function())
    whole, of_all, _ = update(data, WeightedLoss().function(), compute="all")
    assert worst_error(live, whole) < TOLERANCE
    assert of_all.tree_counts.num_leaves - engine.tree_counts.num_leaves == 1 + len(dead)


def test_a_row_with_one_live_token_stays() -> None:
    data = batch(LossCase(), seed=2, estimator="tree_grpo")
    assert not live_rows(data).any()
    rows = [each.clone() for each in data["advantages"].unbind()]
    masks = data["response_mask"].unbind()
    rows[1][-1] = 0.5  # the last token is trained
    untrained = next(row for row, mask in enumerate(masks) if row != 1 and not mask.all())
    rows[untrained][masks[untrained] == 0] = 0.5
    data["advantages"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    assert np.flatnonzero(live_rows(data)).tolist() == [1]
    # What only other rows have leaves the tree with them.
    _, engine, _ = update(data, LossCase().function())
    assert engine.tree_counts.num_tree_tokens == len(data["input_ids"][1])
    assert engine.tree_counts.metrics()["tree/live_tokens"] < 1.0


@pytest.mark.parametrize(
    ("options", "tree"),
    [
        ({"use_kl_loss": True, "kl_loss_coef": 0.3}, {}),
        ({"entropy_coeff": 0.2}, {}),
        ({"calculate_entropy": True}, {}),
        ({}, {"shared_tokens": "mean"}),
        ({}, {"compute": "all"}),
    ],
)
def test_what_reads_all_rows_computes_them(options: dict[str, Any], tree: dict[str, Any]) -> None:
    case = LossCase(options=options)
    assert leaves_out(LossCase().function(), TreeConfig())
    assert not leaves_out(case.function(), TreeConfig(**tree))
    data = batch(case, seed=1, estimator="tree_grpo")
    tu.assign_non_tensor(data, calculate_entropy=bool({"entropy_coeff", "calculate_entropy"} & options.keys()))
    _, engine, metrics = update(data, case.function(), **tree)
    assert engine.tree_counts.num_leaves == len(data)
    assert not any("live_rows" in name for name in metrics)


class BalancedEngine(PlainEngine):
    """An engine whose model balances its experts by itself."""

    auxiliary_loss = "moe_aux_loss_coeff=0.01"


def test_gradients_of_the_model_itself_keep_all_rows(caplog: pytest.LogCaptureFixture) -> None:
    data = batch(LossCase(), seed=1, estimator="tree_grpo")
    assert not live_rows(data).all()
    model().set_attn_implementation(ATTENTION_NAME)
    engine = BalancedEngine(model())
    with caplog.at_level(logging.WARNING):
        engine.forward_backward_batch(data.copy(), LossCase().function())
    assert engine.tree_counts.num_leaves == len(data)
    assert "moe_aux_loss_coeff=0.01" in caplog.text


# Rows in DFS order: 1 2 3 ─┬─ (ends)     own tokens 0, counted as 1
#                           ├─ 4 5        2
#                           └─ 6          1
#                    7 8                 2
DRAWN = [[1, 2, 3, 6], [7, 8], [1, 2, 3], [1, 2, 3, 4, 5]]


def mean_tokens(p_S: np.ndarray) -> float:
    """Add up the tree tokens of every subset of the rows, by its probability."""
    total = 0.0
    for kept in product((False, True), repeat=len(DRAWN)):
        rows = [row for row, is_kept in zip(DRAWN, kept, strict=True) if is_kept]
        tokens = {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}
        total += len(tokens) * float(np.where(kept, p_S, 1 - p_S).prod())
    return total


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_rows_are_kept_by_what_they_teach_over_what_they_cost(share: float) -> None:
    sizes = np.array([1.0, 2.0, 1.0, 3.0])
    p_S = probabilities(TokenForest.from_sequences(DRAWN), sizes, share=share)
    assert mean_tokens(p_S) == pytest.approx(share * 8)
    wanted = sizes / np.sqrt([1, 2, 1, 2])
    below = p_S < 1
    assert below.all() if share == 0.25 else (~below).all() if share == 1.0 else below.any()
    assert np.ptp((p_S / wanted)[below]) < 1e-9 if below.any() else True


def test_an_update_of_drawn_rows_is_that_of_their_weighed_advantages() -> None:
    """Beside all rows with the same advantages, of which those that were not drawn have 0."""
    data = batch(LossCase(), seed=0, estimator="tree_grpo")
    before = data["advantages"].values().clone()
    weighed = data.copy()
    kept = choose_rows(weighed, live_rows(data), share=0.5)
    assert 0 < kept.sum() < len(data)
    assert torch.equal(data["advantages"].values(), before)
    drawn, engine, _ = update(data, LossCase().function(), keep_tokens=0.5)
    whole, of_all, _ = update(weighed, LossCase().function(), compute="all")
    assert worst_error(drawn, whole) < TOLERANCE
    assert engine.tree_counts.num_leaves == kept.sum() < of_all.tree_counts.num_leaves == len(data)


def test_the_gradient_of_drawn_rows_is_right_on_average() -> None:
    """The mean weight of each row over many draws is 1; the same rows are drawn alike, and others differently."""
    data = batch(LossCase(), seed=0, estimator="tree_grpo")
    live, total, shares = live_rows(data), torch.zeros(len(data)), []
    whole = TokenForest.from_sequences(sequences_of(0))
    sums = torch.stack([each.sum() for each in data["advantages"].unbind()])  # a row's advantages have one sign
    num_draws = 400
    for draw in range(num_draws):
        other = data.copy()
        # Advantages of another scale are other rows, drawn with the same probabilities.
        scale = 1.0 + draw / num_draws
        values, offsets = data["advantages"].values(), data["advantages"].offsets()
        other["advantages"] = torch.nested.nested_tensor_from_jagged(values * scale, offsets)
        kept = choose_rows(other, live, share=0.5)
        weights = torch.stack([each.sum() for each in other["advantages"].unbind()]) / (scale * sums)
        assert ((weights > 0).numpy() == kept).all()
        total += weights
        rows = [sequences_of(0)[row] for row in np.flatnonzero(kept)]
        shares.append(TokenForest.from_sequences(rows).num_tokens / whole.num_tokens)
    assert np.mean(shares) == pytest.approx(0.5, abs=0.03)
    assert (total / num_draws).tolist() == pytest.approx([1.0] * len(data), abs=0.3)
    assert (choose_rows(data.copy(), live, share=0.5) == choose_rows(data.copy(), live, share=0.5)).all()


def test_rows_are_not_drawn_where_something_else_reads_them() -> None:
    data = batch(LossCase(), seed=1, estimator="tree_grpo")
    for case in (LossCase(options={"use_kl_loss": True, "kl_loss_coef": 0.3}), LossCase("sft")):
        with pytest.raises(
            ValueError, match=r"tree.keep_tokens=0.5: with this loss, something else reads the rows .*; set it to null"
        ):
            update(data, case.function(), keep_tokens=0.5)
    # One that is not finite shows in the loss.
    values = data["advantages"].values().clone()
    values[0] = torch.nan
    data["advantages"] = torch.nested.nested_tensor_from_jagged(values, data["advantages"].offsets())
    assert choose_rows(data, live_rows(data), share=0.5).tolist() == live_rows(data).tolist()
