"""Staleness by hand: a call counts once, however many leaves share it."""

import pytest

pytest.importorskip("verl")

from verl_tree.records import CallRun
from verl_tree.trainer.rows.staleness import staleness_metrics


def test_a_shared_call_counts_once_and_ends_are_told_from_beginnings() -> None:
    """Session 0 has two leaves below call 0; session 1 has one call of the current weights.

    version 5 is current::

        a_0: call 0 (10 tokens, version 3) ─┬─ call 1 (20 tokens, versions 3 to 5: resumed)
                                            └─ call 2 (30 tokens, version 5)
        a_1: call 0 (40 tokens, version 5)
    """
    root = CallRun(0, "root", 4, 14, 3, 3)
    calls = {
        "a_0_0": [root, CallRun(1, "continuation", 20, 40, 3, 5)],
        "a_0_1": [root, CallRun(2, "fork", 20, 50, 5, 5)],
        "a_1_0": [CallRun(0, "root", 4, 44, 5, 5)],
    }
    assert staleness_metrics(calls, version=5) == {
        "tree/async/staleness/mean": pytest.approx((10 * 2 + 20 * 2) / 100),
        "tree/async/staleness/max": 2.0,
        "tree/async/staleness/first_call": pytest.approx((2 + 2 + 0) / 3),
        "tree/async/staleness/last_call": pytest.approx((2 + 0 + 0) / 3),
        "tree/async/resumed_calls": 1.0,
        "tree/async/version_span/max": 3.0,
    }


def test_a_call_that_is_cut_on_one_leaf_and_split_on_another_has_its_longest_length() -> None:
    """Healing splits a call into two stretches; a leaf's length limit cuts it."""
    calls = {
        "a_0_0": [CallRun(0, "root", 2, 5, 1, 1)],
        "a_0_1": [CallRun(0, "root", 2, 6, 1, 1), CallRun(0, "root", 7, 9, 1, 1), CallRun(1, "fork", 9, 12, 2, 2)],
    }
    assert staleness_metrics(calls, version=2)["tree/async/staleness/mean"] == pytest.approx(6 * 1 / (6 + 3))


def test_unknown_versions_are_left_out() -> None:
    assert staleness_metrics({"a_0_0": [CallRun(0, "root", 2, 5)], "a_0_1": []}, version=2) == {}
    metrics = staleness_metrics({"a_0_0": [CallRun(0, "root", 2, 5), CallRun(1, "fork", 6, 7, 1, 1)]}, version=2)
    assert metrics["tree/async/staleness/first_call"] == metrics["tree/async/staleness/mean"] == 1.0
