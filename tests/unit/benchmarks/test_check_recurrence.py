"""The check of recurrent layers on a device: what it counts, what it refuses, and that it sees a wrong rule."""

from functools import partial

import check_recurrence
import numpy as np
import torch

from verl_tree.recurrence.fla import DeltaRuleVariant

VARIANT = DeltaRuleVariant(torch.device("cpu"), torch.bfloat16, num_heads=2, key_dim=16, value_dim=8)
ROWS = [np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5, 6]), np.array([1, 9])]


def test_a_case_on_the_cpu():
    record = check_recurrence._check("torch", VARIANT, check_recurrence.FORESTS["random"])
    assert record["passed"]
    assert record["errors"].keys() == {"output", "dq", "dk", "dv", "dg", "dbeta"}
    assert check_recurrence._check("fla", VARIANT, lambda: ROWS) == {"refused": ["its kernels run on CUDA only"]}


def test_it_sees_a_wrong_rule(monkeypatch):
    right = check_recurrence.tree_gated_delta_rule

    def wrong(*inputs, chunks, **options):
        return right(*inputs, chunks=chunks, **options).roll(1, dims=0)

    monkeypatch.setattr(check_recurrence, "tree_gated_delta_rule", wrong)
    record = check_recurrence._check("torch", VARIANT, check_recurrence.FORESTS["random"])
    assert not record["passed"]


def test_times_count_tree_and_flat_tokens(monkeypatch):
    monkeypatch.setattr(check_recurrence, "REPETITIONS", 1)
    time = partial(check_recurrence._time, "torch", VARIANT, lambda: ROWS)
    tree, flat = time(is_flat=False), time(is_flat=True)
    assert [tree[name] for name in ("tokens", "nodes", "calls")] == [7, 5, 3]
    assert [flat[name] for name in ("tokens", "nodes", "calls")] == [11, 3, 1]
    assert min(tree["forward_ms"], flat["backward_ms"]) > 0
