"""Portions without a queue: how rows are cut, what is counted of them, how metrics are joined; numbers by hand."""

import math
from functools import reduce
from operator import add

import numpy as np
import pytest

pytest.importorskip("verl")

from verl_tree.launch.composition import compose_config
from verl_tree.trainer.portion_metrics import join_metrics
from verl_tree.trainer.portions import Counts, Moments, PortionResult, cut_rows, join_untrained


def test_units_are_not_parted_and_tokens_are_even() -> None:
    # Units of 4, 2, 2, 4 and 4 tokens; the middles 2, 5, 7, 10, 14 of 16 lie in the quarters 0, 1, 1, 2, 3.
    lens = [1, 3, 2, 2, 4, 4]
    assert cut_rows([[1, 0], [2], [3], [4], [5]], row_lens=lens, num_portions=4) == [[0, 1], [2, 3], [4], [5]]
    assert cut_rows([[0], [1]], row_lens=[5, 5], num_portions=1) == [[0, 1]]
    # One long row takes the place of several portions.
    assert cut_rows([[0], [1], [2]], row_lens=[1, 90, 1], num_portions=3) == [[0], [1], [2]]
    assert cut_rows([[0], [1], [2]], row_lens=[1, 1, 90], num_portions=3) == [[0, 1], [2]]


def test_a_portion_has_two_trained_tokens() -> None:
    groups = [[0, 1], [2], [3], [4]]
    assert join_untrained(groups, num_trained=[0, 1, 1, 5, 1]) == [[0, 1, 2], [3, 4]]
    assert join_untrained(groups, num_trained=[2, 2, 2, 2, 2]) == groups
    assert join_untrained(groups, num_trained=[0, 0, 1, 0, 0]) == [[0, 1, 2, 3, 4]]


def test_counts() -> None:
    masks = [np.array([0, 1, 1]), np.array([], dtype=int), np.array([0, 0])]
    assert Counts.of(masks) == Counts(
        num_rows=3,
        num_answered_rows=2,
        num_trained_rows=1,
        num_response_tokens=5,
        num_trained_tokens=2,
        longest_response=3,
    )


def test_moments_of_parts_are_those_of_the_whole_even_far_from_zero() -> None:
    pairs = np.random.default_rng(0).normal(size=(9, 2)) + 1e6
    parts = [pairs[:4], pairs[4:4], pairs[4:5], pairs[5:]]
    joined = reduce(add, map(Moments.of, parts))
    assert joined.count == 9
    np.testing.assert_allclose(joined.mean, pairs.mean(axis=0), rtol=1e-14)
    np.testing.assert_allclose(joined.comoment / 8, np.cov(pairs.T), rtol=1e-8)


def result(metrics: dict[str, float], *, num_tokens: int = 1, num_rows: int = 1) -> PortionResult:
    """Return the result of a portion."""
    counts = Counts(num_rows, num_rows, min(1, num_tokens), 10, num_tokens, 10)
    return PortionResult(metrics, counts, None, None)


CONFIG = compose_config(["profile=cpu", "actor_rollout_ref.model.path=unused"])


def test_means_are_weighted_and_a_portion_without_weight_says_nothing() -> None:
    names = ("critic/advantages/mean", "critic/advantages/max", "critic/advantages/min", "response_length/mean")
    parts = [
        result(dict(zip(names, (1.0, 4.0, -2.0, 6.0), strict=True)), num_tokens=3, num_rows=1),
        result(dict(zip(names, (2.0, 3.0, 1.0, 3.0), strict=True)), num_tokens=1, num_rows=2),
        result(dict(zip(names, (math.nan, math.nan, math.nan, 0.0), strict=True)), num_tokens=0, num_rows=3),
    ]
    # (3 + 2) / 4 tokens and (6 + 6 + 0) / 6 rows
    assert list(join_metrics(parts, config=CONFIG).values()) == [1.25, 4.0, -2.0, 2.0]


def test_rows_are_clipped_at_the_longest_of_all_portions() -> None:
    parts = [
        result({"response_length/max": 8.0, "response_length/clip_ratio": 0.5}, num_rows=2),
        result({"response_length/max": 7.0, "response_length/clip_ratio": 1.0}, num_rows=2),
    ]
    assert join_metrics(parts, config=CONFIG) == {"response_length/max": 8.0, "response_length/clip_ratio": 0.25}


def test_a_spread_has_that_between_the_portions() -> None:
    mean, std = "training/rollout_probs_diff_mean", "training/rollout_probs_diff_std"
    # 1 and 3, then 8: mean 4, squares 9 + 1 + 16 = 26, over two.
    parts = [result({mean: 2.0, std: 2**0.5}, num_tokens=2), result({mean: 8.0, std: math.nan}, num_tokens=1)]
    assert join_metrics(parts, config=CONFIG)[std] == pytest.approx(13**0.5)
    assert math.isnan(join_metrics(parts[1:], config=CONFIG)[std])


def test_a_metric_without_a_rule_is_refused() -> None:
    with pytest.raises(AssertionError, match="critic/new"):
        join_metrics([result({"critic/new": 1.0})], config=CONFIG)
