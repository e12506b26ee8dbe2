"""Portions without a queue: how rows are cut, what is counted of them, how metrics are joined; numbers by hand."""

import math
from functools import reduce
from operator import add

import numpy as np
import pytest

pytest.importorskip("verl")

import torch
from omegaconf import OmegaConf
from typing_extensions import override

from verl_tree.launch.command.composition import compose_config
from verl_tree.trainer.advantages import Rows, announce_rows
from verl_tree.trainer.portions.beside_rows import BesideRows
from verl_tree.trainer.portions.portion import Counts, Moments, PortionResult, cut_rows, join_untrained
from verl_tree.trainer.portions.portion_metrics import join_metrics
from verl_tree.trainer.portions.whitening import UNWHITENED, whitening
from verl_tree.tree.shape import ForestShape


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


def test_weights_of_portions_are_joined() -> None:
    # Weights 1 and 2, then 3 and 4 and 5: mean 3, mean square 11, so the variance is 2.
    names = [f"rollout_corr/rollout_is_{name}" for name in ("mean", "std", "eff_sample_size", "seq_max_deviation")]
    parts = [
        result(dict(zip(names, (1.5, 0.5, 0.9, 1.0), strict=True)), num_tokens=2),
        result(dict(zip(names, (4.0, (2 / 3) ** 0.5, 0.96, 4.0), strict=True)), num_tokens=3),
    ]
    joined = join_metrics(parts, config=CONFIG)
    assert [joined[name] for name in names] == pytest.approx([3.0, 2**0.5, 9 / 11, 4.0])


def test_a_metric_without_a_rule_is_refused() -> None:
    with pytest.raises(AssertionError, match="critic/new"):
        join_metrics([result({"critic/new": 1.0})], config=CONFIG)


def test_gae_keeps_advantages_that_are_small_beside_the_values() -> None:
    # Backwards: 2^-13, then 0 + 2^-7 * 2^-13. Single precision has steps of 2^-14 at 1000.
    rewards, values = torch.tensor([[0.0, 1000 + 2**-13]]), torch.full((1, 2), 1000.0)
    shape = ForestShape(order=np.arange(1), sequence_lens=np.array([3]), lcp=np.array([0]))
    with announce_rows(Rows(["u_0_0"], shape, [2], values=values)):
        advantages, returns = UNWHITENED["gae"](rewards, torch.ones(1, 2), config={"gamma": 1.0, "lam": 2**-7})
    assert advantages.tolist() == [[2**-20, 2**-13]]
    assert returns.tolist() == [[1000.0, 1000 + 2**-13]]


def test_one_token_is_not_whitened() -> None:
    with pytest.raises(ValueError, match="1 trained tokens"):
        whitening(count=1, mean=0.5, squares=0.0)


@pytest.mark.parametrize(
    ("options", "in_portions"),
    [
        ({"adv_estimator": "tree_grpo"}, True),
        ({"adv_estimator": "unknown"}, False),
        ({"adv_estimator": "tree_grpo", "use_pf_ppo": True}, False),
        ({"rollout_correction": {"rollout_rs": "token"}}, False),
        ({"rollout_correction": {"rollout_rs": "token", "bypass_mode": True}}, True),
        ({"rollout_correction": {"rollout_is_batch_normalize": True}}, False),
        ({"rollout_correction": {"rollout_is": "token", "rollout_is_threshold": 2.0}}, True),
        ({"rollout_correction": {"rollout_is": "token", "rollout_is_threshold": "0.5_2"}}, False),
        ({"rollout_correction": {"rollout_is": None, "rollout_is_threshold": "0.5_2"}}, True),
    ],
)
def test_what_depends_on_all_prompts_is_not_estimated_in_portions(options: dict, in_portions: bool) -> None:
    class Trainer(BesideRows):
        @override
        def on_sample_end(self) -> None: ...

        @override
        def on_step_end(self) -> None: ...

    trainer = object.__new__(Trainer)
    trainer.config = OmegaConf.create({"algorithm": {"adv_estimator": "tree_grpo", **options}})
    assert trainer._estimates_in_portions is in_portions
