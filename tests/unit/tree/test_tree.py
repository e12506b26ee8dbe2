"""The forest against a naive twin: the set of all prefixes, as tuples."""

import subprocess
import sys
import time

import numpy as np
import pytest
from forest_cases import DEEP, forests
from hypothesis import example
from hypothesis import strategies as st
from tree_cases import union_num_tokens

from verl_tree.tree import TokenForest


def leaves_of_prefixes(sequences, keys):
    """Build the naive trie: every prefix (led by its merge key) with the set of trajectories through it."""
    leaves_of = {}
    for index, (key, sequence) in enumerate(zip(keys, sequences, strict=True)):
        for length in range(1, len(sequence) + 1):
            leaves_of.setdefault((key, *sequence[:length]), set()).add(index)
    return leaves_of


def naive_nodes(sequences, keys):
    """{leaves of the node: (first position, one past the last, leaves of the parent node)}."""
    leaves_of = leaves_of_prefixes(sequences, keys)
    nodes = {}
    for prefix in sorted(leaves_of):
        leaves, position = frozenset(leaves_of[prefix]), len(prefix) - 2
        if leaves in nodes:
            nodes[leaves] = (nodes[leaves][0], position + 1, nodes[leaves][2])
        else:
            nodes[leaves] = (position, position + 1, frozenset(leaves_of.get(prefix[:-1], ())))
    return nodes


def check_against_naive(sequences, keys):
    forest = TokenForest.from_sequences(sequences, merge_keys=keys)
    key_ids = [list(dict.fromkeys(keys)).index(key) for key in keys]
    leaves_of = leaves_of_prefixes(sequences, key_ids)

    order = sorted(range(len(sequences)), key=lambda index: (key_ids[index], sequences[index], index))
    assert forest.order.tolist() == order
    assert forest.order[forest.dfs_rank].tolist() == list(range(len(sequences)))
    for rank in range(1, len(order)):
        shared = {prefix for prefix, leaves in leaves_of.items() if {order[rank - 1], order[rank]} <= leaves}
        assert forest.lcp[rank] == len(shared)
    assert forest.lcp[0] == 0

    assert forest.num_tokens == len(leaves_of)
    assert forest.num_flat_tokens == sum(map(len, sequences))
    assert forest.num_leaves == len(sequences)
    assert forest.num_roots == sum(len(prefix) == 2 for prefix in leaves_of)
    assert forest.potential_overlap_ratio == pytest.approx(1 - len(leaves_of) / sum(map(len, sequences)))
    assert forest.sequence_lens.tolist() == [len(sequence) for sequence in sequences]

    expected = naive_nodes(sequences, key_ids)
    assert forest.num_nodes == len(expected)
    node_leaves = [
        frozenset(order[first:last]) for first, last in zip(forest.node_first_leaf, forest.node_last_leaf, strict=True)
    ]
    paths = []
    for node, leaves in enumerate(node_leaves):
        start, end, parent_leaves = expected[leaves]
        assert (forest.node_start[node], forest.node_end[node]) == (start, end)
        parent = forest.node_parent[node]
        assert (node_leaves[parent] if parent >= 0 else frozenset()) == parent_leaves
        assert forest.node_sequence[node] in leaves
        sequence = int(forest.node_sequence[node])
        paths.append((key_ids[sequence], *sequences[sequence][:end]))
        assert forest.node_depth[node] == (forest.node_depth[parent] + 1 if parent >= 0 else 0)
    assert paths == sorted(paths), "nodes are not in DFS preorder"
    assert forest.depth == 1 + max(forest.node_depth)


def test_docstring_example():
    forest = TokenForest.from_sequences([[1, 2, 3, 4], [1, 2, 5], [1, 2], [1, 2, 3, 4], [7]])
    assert forest.tokens.tolist() == [1, 2, 3, 4, 1, 2, 5, 1, 2, 1, 2, 3, 4, 7]
    assert forest.sequence_offsets.tolist() == [0, 4, 7, 9, 13, 14]
    assert forest.sequence_lens.tolist() == [4, 3, 2, 4, 1]
    assert forest.order.tolist() == [2, 0, 3, 1, 4]
    assert forest.dfs_rank.tolist() == [1, 3, 0, 2, 4]
    assert forest.lcp.tolist() == [0, 2, 4, 2, 0]
    assert forest.node_parent.tolist() == [-1, 0, 0, -1]
    assert forest.node_start.tolist() == [0, 2, 2, 0]
    assert forest.node_end.tolist() == [2, 4, 3, 1]
    assert forest.node_first_leaf.tolist() == [0, 1, 3, 4]
    assert forest.node_last_leaf.tolist() == [4, 3, 4, 5]
    assert forest.node_sequence.tolist() == [2, 0, 1, 4]
    assert forest.node_depth.tolist() == [0, 1, 1, 0]
    assert forest.num_tokens == 6
    assert forest.num_flat_tokens == 14
    assert forest.num_nodes == 4
    assert forest.num_leaves == 5
    assert forest.num_roots == 2
    assert forest.depth == 2
    assert forest.potential_overlap_ratio == pytest.approx(8 / 14)
    assert forest.sequence(1).tolist() == [1, 2, 5]


def test_deep_example_is_deep():
    """Guards the examples below: the tree that they all include really has every special case."""
    forest = TokenForest.from_sequences(DEEP)
    assert forest.depth == 5
    assert forest.num_roots == 2
    assert (forest.lcp == forest.sequence_lens[forest.order]).sum() == 1  # the duplicate


@forests()
def test_equals_naive_twin(sequences):
    check_against_naive(sequences, [None] * len(sequences))


@forests(data=st.data())
@example(sequences=DEEP, data=None)
def test_equals_naive_twin_with_merge_keys(sequences, data):
    if data is None:
        keys = ["image", "text", "text", "image", "image", "text", "image"]
    else:
        keys = data.draw(st.lists(st.sampled_from("abc"), min_size=len(sequences), max_size=len(sequences)))
    check_against_naive(sequences, keys)


@pytest.mark.parametrize("seed", range(5))
def test_equals_naive_twin_on_long_runs(seed):
    """Nodes of many tokens, as agents make them: each trajectory leaves an earlier one somewhere."""
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(50_000, size=30).tolist()]
    for _ in range(25):
        start = sequences[rng.integers(len(sequences))]
        shared = int(rng.integers(1, len(start) + 1))
        sequences.append(start[:shared] + rng.integers(50_000, size=rng.integers(0, 20)).tolist())
    check_against_naive(sequences, [None] * len(sequences))


def test_different_merge_keys_share_nothing():
    forest = TokenForest.from_sequences([[1, 2], [1, 2], [1, 2]], merge_keys=[("lora", 1), ("lora", 0), ("lora", 1)])
    assert forest.order.tolist() == [0, 2, 1]
    assert forest.lcp.tolist() == [0, 2, 0]
    assert forest.num_tokens == 4
    assert forest.num_roots == 2


@forests(data=st.data())
def test_order_of_input_does_not_matter(sequences, data):
    permutation = data.draw(st.permutations(range(len(sequences))))
    forest = TokenForest.from_sequences(sequences)
    permuted = TokenForest.from_sequences([sequences[index] for index in permutation])
    assert forest.lcp.tolist() == permuted.lcp.tolist()
    for rank in range(len(sequences)):
        expected = forest.sequence(forest.order[rank]).tolist()
        assert permuted.sequence(permuted.order[rank]).tolist() == expected


@forests(data=st.data())
@example(sequences=DEEP, data=None)
def test_the_tokens_of_leaves_are_the_union_of_their_paths(sequences, data):
    forest = TokenForest.from_sequences(sequences)
    kept = [True] * len(sequences) if data is None else [data.draw(st.booleans()) for _ in sequences]
    leaves = forest.order[kept]
    chosen = [sequences[index] for index in leaves]
    assert union_num_tokens(forest, leaves) == len(leaves_of_prefixes(chosen, [0] * len(chosen)))
    if chosen:
        assert forest.subset_lcp(leaves).tolist() == TokenForest.from_sequences(chosen).lcp.tolist()


@pytest.mark.parametrize("leaves", [[1, 0], [0, 0]])
def test_subset_out_of_order_is_refused(leaves):
    forest = TokenForest.from_sequences([[1], [2]])
    with pytest.raises(ValueError, match="in DFS order"):
        union_num_tokens(forest, leaves)


@pytest.mark.parametrize(
    ("sequences", "expected_order"),
    [
        ([[256], [255], [1]], [2, 1, 0]),  # little-endian bytes would put 256 first
        ([[0], [-1], [-(2**40)], [2**40]], [2, 1, 0, 3]),
        ([[2**32], [2**32 - 1], [0]], [2, 1, 0]),
        ([[2**63 - 1], [-(2**63)], [0]], [1, 2, 0]),
    ],
)
def test_order_is_numeric(sequences, expected_order):
    forest = TokenForest.from_sequences(sequences)
    assert forest.order.tolist() == expected_order
    assert forest.lcp.tolist() == [0] * len(sequences)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (["int32", "int32"], np.int32),
        (["int64", "int32"], np.int64),
        (["uint8", "int16"], np.int32),
        (["uint32", "int32"], np.int64),
    ],
)
def test_dtype_of_tokens(dtypes, expected):
    sequences = [np.array([3, 100, 7], dtype=dtype) for dtype in dtypes]
    forest = TokenForest.from_sequences(sequences)
    assert forest.tokens.dtype == expected
    assert forest.lcp.tolist() == [0, 3]


def test_int32_negative_ids():
    forest = TokenForest.from_sequences([np.array([0, 5], np.int32), np.array([-1, 5], np.int32)])
    assert forest.order.tolist() == [1, 0]


def test_input_is_copied():
    sequence = np.array([1, 2, 3])
    forest = TokenForest.from_sequences([sequence])
    sequence[0] = 9
    assert forest.tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "sequence 1 is empty"),
        ([[1, 2]], r"sequence 1 has shape \(1, 2\)"),
        (3, r"sequence 1 has shape \(\)"),
        ([1.0], "sequence 1 has dtype float64"),
        ([True], "sequence 1 has dtype bool"),
        (np.array([1], dtype=np.uint64), "sequence 1 has dtype uint64"),
    ],
)
def test_bad_sequence_is_named(bad, message):
    with pytest.raises(ValueError, match=message):
        TokenForest.from_sequences([[1], bad, [2]])


def test_wrong_number_of_merge_keys_is_refused():
    with pytest.raises(ValueError, match="merge_keys has 1 entries for 2 sequences"):
        TokenForest.from_sequences([[1], [2]], merge_keys=["a"])


def test_empty_forest():
    forest = TokenForest.from_sequences([])
    assert (forest.num_tokens, forest.num_flat_tokens, forest.num_nodes, forest.num_leaves) == (0, 0, 0, 0)
    assert (forest.num_roots, forest.depth, forest.potential_overlap_ratio) == (0, 0, 0.0)
    assert union_num_tokens(forest, []) == 0


def test_4096_trajectories_of_8192_tokens_in_3_seconds():
    """Groups of 8 share their first half; a loop over tokens in Python would take over ten seconds."""
    tokens = np.random.default_rng(0).integers(150_000, size=(4096, 8192), dtype=np.int32)
    tokens[:, 0] = np.arange(4096) // 8
    tokens[:, 1:4096] = tokens[::8, 1:4096].repeat(8, axis=0)
    tokens[:, 4096] = np.arange(4096) % 8
    start_s = time.perf_counter()
    forest = TokenForest.from_sequences(list(tokens))
    duration_s = time.perf_counter() - start_s
    assert forest.num_tokens == 512 * 4096 + 4096 * 4096
    assert forest.num_nodes == 512 + 4096
    assert duration_s < 3


def test_structure_code_does_not_import_torch():
    code = (
        "import sys, verl_tree.packing.counts, verl_tree.packing, verl_tree.tree\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'verl', 'ray')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
