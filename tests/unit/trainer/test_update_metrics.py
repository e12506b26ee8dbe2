"""The metrics of a step with several updates are those of all its updates together."""

from typing import Any, cast

import pytest

pytest.importorskip("verl")

from tree_cases import counts_of
from verl.trainer.ppo.v1.utils import MetricsAggregator
from verl.utils.metric import reduce_metrics

from verl_tree.packing.counts import ForestCounts, RankTimes
from verl_tree.trainer.told.update_metrics import as_numbers, step_metrics, take_tree_metrics

# A tree with much to share and a single row: the mean of their PORs is not that of both.
SHARED = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 7]]
ALONE = [[9, 8, 7, 6, 5, 4, 3, 2]]


def reported(counts: ForestCounts, times: RankTimes, *, role: str, **others: float) -> dict[str, Any]:
    """Return what verl's `_update_actor` or `_update_critic` makes of a worker's metrics."""
    metrics: dict[str, Any] = as_numbers(counts, times) | {f"tree/{name}": value for name, value in others.items()}
    return reduce_metrics({f"{role}/{name}": value for name, value in metrics.items()})


def test_two_updates_give_the_metrics_of_their_union() -> None:
    rows = [SHARED, ALONE]
    times = [RankTimes(3.0, 1.0, 0.0, 0.0, 0.25), RankTimes(1.0, 1.0, 0.0, 0.0, 0.5)]
    others = [
        {"micro_batches": 2, "cost_model/s_per_token": 0.5},
        {"micro_batches": 3, "cost_model/s_per_token": 0.7},
    ]
    aggregator, updates = MetricsAggregator(), []
    for each, time, other in zip(rows, times, others, strict=True):
        metrics = {"tree/cut_groups": 1.0, "actor/loss": 2.0} | reported(counts_of(each), time, role="actor", **other)
        updates.append(take_tree_metrics(metrics))
        assert metrics == {"actor/loss": 2.0}
        aggregator.add_step_metrics(metrics, sample_count=len(each))
    assert aggregator.get_aggregated_metrics() == {"actor/loss": 2.0}

    metrics = step_metrics(updates)
    assert metrics == sum(map(counts_of, rows), ForestCounts()).metrics() | {
        "tree/packing_s": 0.75,
        "tree/rank_imbalance/predicted": 2.0,  # 4 s / 2 s, where a mean of ratios would be the same, and of rows not
        "tree/micro_batches": 5.0,
        "tree/cut_groups": 2.0,
        "tree/cost_model/s_per_token": 0.7,
    }
    # By hand: 4 + 3 + 8 tree tokens of 15 + 8 flat ones in 4 leaves.
    assert (metrics["tree/tokens"], metrics["tree/flat_tokens"], metrics["tree/leaves"]) == (15, 23, 4)
    assert metrics["tree/por"] == pytest.approx(8 / 23)


def test_the_critics_metrics_keep_their_prefix() -> None:
    metrics = reported(counts_of(SHARED), RankTimes(), role="critic") | reported(
        counts_of(ALONE), RankTimes(), role="actor"
    )
    merged = step_metrics([take_tree_metrics(metrics)])
    assert metrics == {}
    assert (merged["tree/tokens"], merged["critic/tree/tokens"]) == (8, 7)
    assert (merged["tree/por"], merged["critic/tree/por"]) == (0.0, pytest.approx(8 / 15))


def test_a_flat_run_counts_without_times() -> None:
    metrics: dict[str, float] = as_numbers(counts_of(SHARED))
    merged = step_metrics([take_tree_metrics(metrics)] * 2)
    assert merged == sum([counts_of(SHARED)] * 2, ForestCounts()).metrics()


def test_a_step_without_an_update_has_no_tree_metrics() -> None:
    assert step_metrics([{"tree/cut_groups": 0.0}]) == {"tree/cut_groups": 0.0}
    assert step_metrics([]) == {}


def test_every_counter_survives() -> None:
    counts = ForestCounts(*range(1, 15))
    times = RankTimes(1.5, 2.5, 3.5, 4.5, 5.5)
    metrics = reduce_metrics(cast(Any, as_numbers(counts, times)))
    assert step_metrics([take_tree_metrics(metrics)]) == counts.metrics() | times.metrics()
