"""Packs are a partition, each within the capacity, and cost what the union of their paths costs."""

from itertools import chain, pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from verl_tree.packing import pack
from verl_tree.tree import TokenForest

# The same draws in every run, and no time limit per draw: the machine may be busy.
seeded = settings(derandomize=True, deadline=None)
SEQUENCES = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=7), min_size=1, max_size=12)
DEEP = [[0, 1, 1, 0, 1], [0, 1, 1, 0, 0], [0, 1], [0, 1, 1, 1], [0, 1, 1, 0, 1], [0], [1, 0]]


def union_of_paths(sequences):
    return len({tuple(sequence[: end + 1]) for sequence in sequences for end in range(len(sequence))})


def test_by_hand():
    """Order 2 0 3 1 4: [1 2], its extension [1 2 3 4] and the duplicate cost 4; [1 2 5] would make 5."""
    forest = TokenForest.from_sequences([[1, 2, 3, 4], [1, 2, 5], [1, 2], [1, 2, 3, 4], [7]])
    packing = pack(forest, capacity=4)
    assert [part.leaves.tolist() for part in packing.packs] == [[2, 0, 3], [1, 4]]
    assert [part.num_tokens for part in packing.packs] == [4, 4]
    assert packing.num_tokens == 8
    assert packing.num_flat_tokens == 14
    assert packing.effective_reuse_ratio == pytest.approx(6 / 14)
    assert packing.compression == pytest.approx(14 / 8)

    packing = pack(forest, capacity=5, method="dfs_first_fit")
    assert [part.leaves.tolist() for part in packing.packs] == [[2, 0, 3, 1], [4]]
    assert [part.num_tokens for part in packing.packs] == [5, 1]


@seeded
@given(sequences=SEQUENCES, spare=st.integers(0, 12))
@example(sequences=DEEP, spare=0)
@example(sequences=DEEP, spare=3)
@example(sequences=[[1]], spare=0)
def test_packs_are_a_partition_within_the_capacity(sequences, spare):
    forest = TokenForest.from_sequences(sequences)
    capacity = max(map(len, sequences)) + spare
    packing = pack(forest, capacity=capacity)
    leaves = [part.leaves.tolist() for part in packing.packs]
    assert list(chain.from_iterable(leaves)) == forest.order.tolist()
    for part in packing.packs:
        assert part.num_tokens == union_of_paths([sequences[leaf] for leaf in part.leaves])
        assert part.num_tokens == forest.pack_num_tokens(part.leaves)
        assert part.num_tokens <= capacity
    for here, following in pairwise(leaves):
        merged = [sequences[leaf] for leaf in [*here, following[0]]]
        assert union_of_paths(merged) > capacity, "a new pack was opened too early"
    assert packing.num_tokens == sum(part.num_tokens for part in packing.packs)
    assert packing.num_flat_tokens == forest.num_flat_tokens


@pytest.mark.parametrize("capacity", [None, 9])
def test_one_pack_reuses_all_that_overlaps(capacity):
    forest = TokenForest.from_sequences(DEEP)
    assert forest.num_tokens == 9
    packing = pack(forest, capacity=capacity)
    assert len(packing.packs) == 1
    assert packing.packs[0].leaves.tolist() == forest.order.tolist()
    assert packing.num_tokens == forest.num_tokens
    assert packing.effective_reuse_ratio == forest.potential_overlap_ratio


def test_default_capacity():
    forest = TokenForest.from_sequences([[index, *range(4000)] for index in range(3)])
    assert [part.num_tokens for part in pack(forest).packs] == [8002, 4001]


def test_too_long_trajectory_is_named_with_the_remedy():
    forest = TokenForest.from_sequences([[1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5]])
    message = (
        r"trajectory 1 has 4 tokens and a pack only 3 \(2 of 3 .* longest has 5\): "
        r"raise tree\.capacity .*actor\.ppo_max_token_len_per_gpu"
    )
    with pytest.raises(ValueError, match=message):
        pack(forest, capacity=3)


def test_capacity_must_be_positive():
    with pytest.raises(ValueError, match=r"capacity is 0: set tree\.capacity to a positive number"):
        pack(TokenForest.from_sequences([]), capacity=0)


def test_unknown_method_lists_what_exists():
    with pytest.raises(ValueError, match=r"'magic' does not exist: use one of \['auto', 'dfs_first_fit'\]"):
        pack(TokenForest.from_sequences([[1]]), method="magic")


def test_empty_forest_has_no_packs():
    packing = pack(TokenForest.from_sequences([]))
    assert packing.packs == ()
    assert (packing.num_tokens, packing.effective_reuse_ratio, packing.compression) == (0, 0.0, 1.0)
