"""Updates without the rows that teach nothing, beside updates of all rows, in float64.

All policy losses of verl 0.9.1 meet all aggregations; the 24 forests, the estimators and the capacities go round, and in
`--long` all meet all. A forest has three prompts, of which none, some or all have equal rewards.
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
from verl_tree.engine.losses.session_weights import weigh_sessions
from verl_tree.trainer.advantages import ESTIMATORS, Call, announce_rows

TOLERANCE = 1e-12
ALL_ESTIMATORS = [*ESTIMATORS, "grpo", "rloo"]
CASES = list(product(POLICY_LOSSES, AGGREGATIONS))
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
    is_exact = name in POLICY_LOSSES_OF_ADVANTAGES and aggregation != ("seq-mean-token-sum-norm", {})
    assert num_left_out == (int((~live_rows(data)).sum()) if is_exact else 0)
    named = {key.replace("actor/live_rows/", "actor/"): key for key in metrics}
    assert named.keys() == all_metrics.keys()
    assert {key for key in metrics if "live_rows" in key} == (metrics.keys() - {"actor/pg_loss"} if is_exact else set())
    return num_left_out


@pytest.mark.parametrize(
    ("number", "name", "aggregation"),
    [(number, *case) for number, case in enumerate(CASES)],
    ids=[f"{name}-{mode}-{'-'.join(options) or 'plain'}" for name, (mode, options) in CASES],
)
def test_an_update_without_rows_that_teach_nothing_is_the_same(
    number: int, name: str, aggregation: tuple[str, dict[str, Any]]
) -> None:
    # The six aggregations of a loss meet six forests, and each of them meets another one with the next loss.
    seed, estimator = (number + number // 6) % NUM_FORESTS, ALL_ESTIMATORS[number % len(ALL_ESTIMATORS)]
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


def test_what_is_not_the_policy_loss_is_left_alone() -> None:
    assert not leaves_out(LossCase("value").function(), TreeConfig())
    assert not leaves_out(LossCase("sft").function(), TreeConfig())
    assert not leaves_out(None, TreeConfig())
