"""Which measured time belongs to which pack, and what the cost model learns from it."""

import pytest

from verl_tree.cost.fit import CostFitter
from verl_tree.cost.model import CostModel, Work
from verl_tree.engine.costs.pack_times import PackClock, learn_costs


def work(num_tokens: int) -> Work:
    return Work(num_tokens=num_tokens, num_visible_pairs=num_tokens**2, num_scored=1, num_nodes=1, num_packs=1)


def test_the_clock_measures_each_call() -> None:
    clock = PackClock("cpu")
    for num_steps in (10, 300_000):
        with clock.measure():
            sum(range(num_steps))
    short, long = clock.seconds()
    assert 0 < short < long


def test_a_step_lasts_as_long_as_its_dearest_pack() -> None:
    """Two ranks, 2 us a token; rank 1 has a pack less. Every step is explained by the larger pack of the two."""
    cost = CostFitter()
    steps = [[work(1000), work(500)], [work(300), work(800)], [work(900), work(20)], [work(70), Work()]]
    for _ in range(2):
        learn_costs(cost, steps, seconds=[2e-6 * max_tokens for max_tokens in (1000, 800, 900, 70)])
    for num_tokens in (70, 500, 1000):
        assert cost.model.predict(work(num_tokens)) == pytest.approx(2e-6 * num_tokens, rel=1e-6)
    metrics = cost.metrics(prefix="tree/cost_model")
    assert CostModel.from_metrics(metrics, prefix="tree/cost_model") == cost.model
    assert metrics["tree/cost_model/relative_error"] < 1e-6


def test_a_mini_batch_without_packs_teaches_nothing() -> None:
    cost = CostFitter()
    for _ in range(20):
        learn_costs(cost, [[Work(), Work()]], seconds=[0.1])
    assert not cost.is_fitted
    assert cost.model == CostModel.prior()
