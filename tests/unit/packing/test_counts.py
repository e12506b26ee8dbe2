"""Metrics by hand, and ratios of sums instead of means of ratios."""

from dataclasses import replace

import pytest
from tree_cases import counts_of

from verl_tree.packing.counts import ForestCounts, RankTimes


def test_by_hand():
    """14 flat tokens, 6 unique; with 4 tokens a pack, the prefix [1 2] is computed twice: 8."""
    counts = counts_of([[1, 2, 3, 4], [1, 2, 5], [1, 2], [1, 2, 3, 4], [7]], capacity=4)
    assert counts.metrics() == pytest.approx(
        {
            "tree/por": 8 / 14,
            "tree/err": 6 / 14,
            "tree/compression": 14 / 8,
            "tree/tokens": 6,
            "tree/flat_tokens": 14,
            "tree/packed_tokens": 8,
            "tree/nodes": 4,
            "tree/leaves": 5,
            "tree/packs": 2,
            "tree/packs_flat": 0,
            "tree/depth": 2,
            "tree/gap": 0,
            "tree/fill": 1,
        }
    )
    assert all(type(value) is float for value in counts.metrics().values())


def test_ratios_are_of_the_sums():
    """Two ranks, one with 18 of 20 tokens shared, one with 0 of 5: 18/25, not the mean of 0.9 and 0."""
    shared = counts_of([[1, 2]] * 10, capacity=None)
    alone = counts_of([[1, 2, 3], [4, 5]], capacity=3)
    assert shared.metrics()["tree/por"] == pytest.approx(0.9)
    assert alone.metrics()["tree/por"] == 0.0
    total = sum([shared, alone], ForestCounts())
    assert total == ForestCounts(
        num_flat_tokens=25,
        num_tree_tokens=7,
        num_packed_tokens=7,
        num_nodes=3,
        num_leaves=12,
        num_packs=3,
        num_lower_bound_tokens=7,
        num_capacity_tokens=6,
        depth=1,
    )
    assert total.metrics()["tree/por"] == pytest.approx(18 / 25)
    assert total.metrics()["tree/compression"] == pytest.approx(25 / 7)


def test_depth_is_the_deepest():
    deep = counts_of([[1, 2], [1, 3]], capacity=None)
    flat = counts_of([[1, 2]], capacity=None)
    assert (deep + flat).depth == (flat + deep).depth == 2


def test_a_relayed_tree_beside_packs():
    """A prompt of 6 tokens and 3 branches of 4, cut every 8 tokens: sections of 8, 8 and 2, both cuts inside a branch.

    Both contexts are the prompt and 2 tokens of that branch, so the spine has 6 + 2 + 2 tokens. Its own forwards hold 8
    and 2 tokens, and the second gathers the prompt: 8 + 8 + 6 context tokens.
    """
    packs = counts_of([[1, 2, 3, 4], [1, 2, 5], [1, 2], [1, 2, 3, 4], [7]], capacity=4)
    star = ForestCounts(
        num_flat_tokens=30,
        num_tree_tokens=18,
        num_packed_tokens=18,
        num_nodes=4,
        num_leaves=3,
        num_lower_bound_tokens=18,
        num_capacity_tokens=24,
        depth=2,
        num_sections=3,
        num_spine_tokens=10,
        num_context_tokens=22,
        max_store_bytes=3 * 2**29,
    )
    smaller = replace(star, max_store_bytes=2**29)
    metrics = (packs + star + smaller).metrics()
    expected = {
        "tree/por": 1 - 42 / 74,
        "tree/err": 1 - 44 / 74,  # the spine is beside it
        "tree/packed_tokens": 44,
        "tree/packs": 2,
        "tree/gap": 0,
        "tree/fill": 44 / 56,
        "tree/sections": 6,
        "tree/context_tokens": 44,
        "tree/spine_ratio": 20 / 42,
        "tree/store_gib": 1.5,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert (smaller + star).max_store_bytes == (star + smaller).max_store_bytes
    assert not {"tree/sections", "tree/context_tokens", "tree/spine_ratio", "tree/store_gib"} & packs.metrics().keys()


def test_every_mini_batch_waits_for_its_slowest_rank():
    """Maxima 3 and 4 over means 2 and 3: 7/5, although over both mini-batches the ranks did 5 and 5."""
    first = RankTimes.of_ranks(predicted_s=[3, 1], measured_s=[2, 2], packing_s=[0.1, 0.3])
    second = RankTimes.of_ranks(predicted_s=[2, 4], measured_s=[1, 3], packing_s=[0.2, 0.1])
    assert sum([first, second], RankTimes()).metrics() == pytest.approx(
        {"tree/rank_imbalance/predicted": 7 / 5, "tree/rank_imbalance/measured": 5 / 4, "tree/packing_s": 0.5}
    )
    unmeasured = RankTimes.of_ranks(predicted_s=[3, 1], measured_s=[0, 0], packing_s=[0.1, 0.3])
    assert unmeasured.metrics().keys() == {"tree/rank_imbalance/predicted", "tree/packing_s"}


def test_nothing_counted():
    metrics = ForestCounts().metrics(prefix="rollout")
    assert metrics["rollout/por"] == metrics["rollout/err"] == 0.0
    assert metrics["rollout/compression"] == 1.0
    assert "rollout/gap" not in metrics
    assert "rollout/fill" not in metrics
