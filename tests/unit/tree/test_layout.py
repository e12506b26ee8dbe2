"""The layout against a naive twin: the prefixes as tuples, whose sorted order is DFS preorder."""

from dataclasses import asdict
from itertools import pairwise

import numpy as np
import pytest
import torch
from forest_cases import DEEP, forests
from hypothesis import strategies as st
from tree_cases import union_num_tokens

from verl_tree.tree import NodeTable, TokenForest
from verl_tree.tree.layout import TreeLayout

TENSORS = ["token_ids_T", "position_T", "parent_T", "subtree_end_T", "tree_index_F"]
HOST_ARRAYS = ["leaf_offsets", "leaves"]


def naive_layout(sequences, leaves):
    """Every field but the nodes, from the set of prefixes; and the visible mask likewise."""
    passing = [tuple(sequences[leaf][: end + 1]) for leaf in leaves for end in range(len(sequences[leaf]))]
    prefixes = sorted(set(passing))
    index_of = {prefix: index for index, prefix in enumerate(prefixes)}
    fields = {
        "token_ids_T": [prefix[-1] for prefix in prefixes],
        "position_T": [len(prefix) - 1 for prefix in prefixes],
        "parent_T": [index_of.get(prefix[:-1], -1) for prefix in prefixes],
        "subtree_end_T": [
            1 + max(index_of[other] for other in prefixes if other[: len(prefix)] == prefix) for prefix in prefixes
        ],
        "tree_index_F": [index_of[prefix] for prefix in passing],
    }
    visible = [[query[: len(key)] == key for key in prefixes] for query in prefixes]
    return fields, visible


def naive_nodes(layout):
    """(start, end, parent, depth, subtree end) of every node, from the leaves of one token after another."""
    leaves_of = [set() for _ in range(layout.num_tokens)]
    for leaf in range(layout.num_leaves):
        for token in layout.tree_index_F[layout.leaf_offsets[leaf] : layout.leaf_offsets[leaf + 1]].tolist():
            leaves_of[token].add(leaf)
    node_of, nodes = [], []
    for token, parent in enumerate(layout.parent_T.tolist()):
        if parent >= 0 and leaves_of[parent] == leaves_of[token]:
            node_of.append(node_of[parent])
            nodes[node_of[token]][1] = token + 1
        else:
            parent_node = node_of[parent] if parent >= 0 else -1
            depth = nodes[parent_node][3] + 1 if parent >= 0 else 0
            node_of.append(len(nodes))
            nodes.append([token, token + 1, parent_node, depth, int(layout.subtree_end_T[token])])
    return nodes


def check_against_naive(sequences, forest, layout):
    fields, visible = naive_layout(sequences, layout.leaves.tolist())
    actual = {name: value.tolist() for name, value in asdict(layout).items() if name in fields}
    assert actual == fields
    assert layout.materialize().tolist() == visible
    assert layout.leaf_offsets.tolist() == [0, *np.cumsum([len(sequences[leaf]) for leaf in layout.leaves])]
    nodes = NodeTable.from_lcp(forest.sequence_lens[layout.leaves], lcp=forest.subset_lcp(layout.leaves))
    bounds = np.concatenate([[0], np.cumsum(nodes.end - nodes.start)])
    columns = [bounds[:-1], bounds[1:], nodes.parent, nodes.depth, bounds[nodes.subtree_end]]
    assert np.stack(columns, axis=1).tolist() == naive_nodes(layout)
    assert layout.num_nodes == nodes.num_nodes


def test_docstring_example():
    sequences = [[5, 6, 7, 8], [5, 6, 7, 9], [5, 6], [5, 4, 3], [5, 4, 3]]
    layout = TreeLayout.from_forest(TokenForest.from_sequences(sequences))
    assert layout.token_ids_T.tolist() == [5, 4, 3, 6, 7, 8, 9]
    assert layout.position_T.tolist() == [0, 1, 2, 1, 2, 3, 3]
    assert layout.parent_T.tolist() == [-1, 0, 1, 0, 3, 4, 4]
    assert layout.subtree_end_T.tolist() == [7, 3, 3, 7, 7, 6, 7]
    assert layout.leaves.tolist() == [3, 4, 2, 0, 1]
    assert layout.tree_index_F.tolist() == [0, 1, 2, 0, 1, 2, 0, 3, 0, 3, 4, 5, 0, 3, 4, 6]
    assert layout.leaf_offsets.tolist() == [0, 3, 6, 8, 12, 16]
    assert (layout.num_tokens, layout.num_flat_tokens, layout.num_leaves, layout.num_nodes) == (7, 16, 5, 6)


def test_dtypes():
    layout = TreeLayout.from_forest(TokenForest.from_sequences([np.array([1, 2], np.int32)]))
    dtypes = {name: asdict(layout)[name].dtype for name in TENSORS + HOST_ARRAYS}
    int32_names = {"subtree_end_T"}
    assert {name for name, dtype in dtypes.items() if dtype == torch.int32} == int32_names
    assert {name for name, dtype in dtypes.items() if dtype == torch.int64} == set(TENSORS) - int32_names
    assert {name for name, dtype in dtypes.items() if dtype == np.int64} == set(HOST_ARRAYS)


@forests()
def test_equals_naive_twin(sequences):
    forest = TokenForest.from_sequences(sequences)
    check_against_naive(sequences, forest, TreeLayout.from_forest(forest))


@forests(data=st.data())
def test_some_leaves_equal_naive_twin(sequences, data):
    """Nodes that only the missing leaves cut are whole in a pack without them."""
    forest = TokenForest.from_sequences(sequences)
    leaves = forest.order[[data.draw(st.booleans()) for _ in sequences]]
    layout = TreeLayout.from_forest(forest, leaves)
    assert layout.leaves.tolist() == leaves.tolist()
    assert layout.num_tokens == union_num_tokens(forest, leaves)
    if len(leaves):
        check_against_naive(sequences, forest, layout)


def test_a_node_is_whole_without_the_leaf_that_cut_it():
    forest = TokenForest.from_sequences([[1, 2, 3], [1, 2, 4], [1, 2]])
    assert TreeLayout.from_forest(forest).num_nodes == 3
    layout = TreeLayout.from_forest(forest, [1])
    assert layout.token_ids_T.tolist() == [1, 2, 4]
    assert layout.num_nodes == 1


@pytest.mark.parametrize("seed", range(5))
def test_gather_gives_the_trajectories_back(seed):
    """With ids over the whole vocabulary and nodes of many tokens."""
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(50_000, size=200)]
    for _ in range(30):
        start = sequences[rng.integers(len(sequences))]
        tail = rng.integers(50_000, size=rng.integers(0, 100))
        sequences.append(np.concatenate([start[: rng.integers(1, len(start) + 1)], tail]))
    layout = TreeLayout.from_forest(TokenForest.from_sequences(sequences))
    assert layout.num_tokens < layout.num_flat_tokens
    tokens_F = layout.token_ids_T[layout.tree_index_F].numpy()
    positions_F = layout.position_T[layout.tree_index_F].numpy()
    for leaf, (start, end) in zip(layout.leaves, pairwise(layout.leaf_offsets), strict=True):
        assert np.array_equal(tokens_F[start:end], sequences[leaf])
        assert np.array_equal(positions_F[start:end], np.arange(len(sequences[leaf])))


def test_merge_keys_keep_equal_tokens_apart():
    forest = TokenForest.from_sequences([[1, 2], [1, 2]], merge_keys=["a", "b"])
    layout = TreeLayout.from_forest(forest)
    assert layout.token_ids_T.tolist() == [1, 2, 1, 2]
    assert layout.subtree_end_T.tolist() == [2, 2, 4, 4]
    assert layout.parent_T.tolist() == [-1, 0, -1, 2]


def test_no_leaves_give_an_empty_layout():
    layout = TreeLayout.from_forest(TokenForest.from_sequences([[1, 2]]), [])
    assert all(asdict(layout)[name].shape == (0,) for name in TENSORS)
    assert layout.leaf_offsets.tolist() == [0]
    assert layout.materialize().shape == (0, 0)


@pytest.mark.parametrize("leaves", [[1, 0], [0, 0]])
def test_leaves_out_of_order_are_refused(leaves):
    with pytest.raises(ValueError, match="DFS order"):
        TreeLayout.from_forest(TokenForest.from_sequences([[1], [2]]), leaves)


def test_devices():
    forest = TokenForest.from_sequences(DEEP)
    layout = TreeLayout.from_forest(forest)
    for moved in (layout.to("meta"), TreeLayout.from_forest(forest, device="meta")):
        assert {asdict(moved)[name].device.type for name in TENSORS} == {"meta"}
        assert all(np.array_equal(asdict(moved)[name], asdict(layout)[name]) for name in HOST_ARRAYS)
