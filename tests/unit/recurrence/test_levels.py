"""The level order: by hand, and the delta rule by levels against the one on tree chunks."""

import numpy as np
import pytest
import torch
from delta_rule_cases import inputs_of, on_tree, varlen_gated_delta_rule
from float64_mode import Float64
from hybrid_cases import chain_of_one_token_nodes
from tree_cases import DEEP, layout_of, random_sequences, relative_error

from verl_tree.attention import AttentionPlan
from verl_tree.recurrence.levels import TreeLevels, rule_by_levels

# Nodes 0-1 | 2-4 | 5 | 6 | 7-8, and 9 by itself: 2-4 and 7-8 are below 0-1, and 5 and 6 below 2-4.
SUBTREE_END = np.array([9, 9, 7, 7, 7, 6, 7, 9, 9, 10])


def test_the_example():
    levels = TreeLevels.from_subtree_end(SUBTREE_END, chunk_size=2)
    assert levels.token_T.tolist() == [0, 1, 2, 3, 4, 9, 7, 8, 5, 6]
    assert levels.place_T.tolist() == [0, 1, 2, 3, 4, 8, 9, 6, 7, 5]
    assert (levels.num_nodes, levels.num_root_leaves) == (6, 1)
    first, second = levels.inner
    assert (first.num_tokens, second.num_tokens, levels.leaves.num_tokens) == (2, 3, 5)
    assert first.cu_seqlens_N.tolist() == [0, 2]
    assert second.cu_seqlens_N.tolist() == [0, 3]
    assert levels.leaves.cu_seqlens_N.tolist() == [0, 1, 3, 4, 5]
    assert second.chunk_indices_M2.tolist() == [[0, 0], [0, 1]]
    assert levels.leaves.chunk_indices_M2.tolist() == [[0, 0], [1, 0], [2, 0], [3, 0]]
    assert (first.parent_N.tolist(), second.parent_N.tolist(), levels.leaves.parent_N.tolist()) == ([], [0], [])
    assert (first.leaf_parent_L.tolist(), second.leaf_parent_L.tolist()) == ([0], [0, 0])


def test_trees_of_one_node_are_one_call():
    levels = TreeLevels.from_subtree_end(np.array([2, 2, 3, 5, 5]), chunk_size=64)
    assert levels.inner == ()
    assert levels.leaves.cu_seqlens_N.tolist() == [0, 2, 3, 5]
    assert levels.num_root_leaves == 3


def by_levels(inputs, layout):
    q, k, v, g, beta = inputs
    levels = AttentionPlan.from_layout(layout).levels(64)
    return rule_by_levels(varlen_gated_delta_rule, q, k, v, g_TH=g, beta_TH=beta, levels=levels, normalizes=True)


LONG = [*range(50)] * 3
FORESTS = {
    "deep": DEEP,
    "chain": chain_of_one_token_nodes(20),
    "one token": [[3]],
    "long": [LONG, [*LONG[:100], 7], [*LONG[:100], 8, *LONG], [5, 5], LONG[:70]],
    **{
        f"random {seed}": random_sequences(np.random.default_rng(seed), num_sequences=15, mean_len=1 + 4 * seed)
        for seed in range(4)
    },
}


@pytest.mark.parametrize("name", FORESTS)
def test_levels_equal_the_chunks_of_the_tree(name):
    layout = layout_of(FORESTS[name])
    inputs = inputs_of(layout.num_tokens)
    with Float64():
        got, want = by_levels(inputs, layout), on_tree(inputs, layout, size=16)
        assert relative_error(got, want) < 1e-10
        weight = torch.randn(got.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        gradients = [torch.autograd.grad((weight * out).sum(), inputs) for out in (got, want)]
    for got_one, want_one in zip(*gradients, strict=True):
        assert relative_error(got_one, want_one) < 1e-10


def test_no_branch_sees_another_bit_for_bit():
    layout = layout_of(FORESTS["random 3"])
    inputs = [each.detach() for each in inputs_of(layout.num_tokens, dtype=torch.float32)]
    before, is_on_path = by_levels(inputs, layout), layout.materialize()
    for token in range(0, layout.num_tokens, 11):
        changed = [each.clone() for each in inputs]
        for each in changed:
            each[token] = 0.5 * each[token] - 0.25
        after, sees = by_levels(changed, layout), is_on_path[:, token]
        assert torch.equal(after[~sees], before[~sees])
        assert not torch.equal(after[sees], before[sees])
