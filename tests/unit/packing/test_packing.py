"""Packs are a partition within the caps, and cost what the union of their paths costs, whatever the method.

How near the methods come to the optimum is in test_packing_optimum.py.
"""

from functools import partial
from itertools import chain, pairwise

import numpy as np
import pytest
from forest_cases import DEEP, forests
from fuzzing import fuzzed
from hypothesis import example, given
from hypothesis import strategies as st
from tree_cases import union_num_tokens

from verl_tree.packing import METHODS, lower_bound, pack
from verl_tree.packing.bound import least_visits
from verl_tree.packing.heuristic import best_fit_up, deepest_first
from verl_tree.packing.improve import _windows
from verl_tree.packing.problem import Caps, Items
from verl_tree.testing.arrival_packing import RangeMin, arrival_first_fit
from verl_tree.tree import TokenForest


def union_of_paths(sequences):
    return len({tuple(sequence[: end + 1]) for sequence in sequences for end in range(len(sequence))})


PACKINGS = {method: partial(pack, method=method) for method in METHODS} | {"arrival_first_fit": arrival_first_fit}


def one_tree(sequences):
    forest = TokenForest.from_sequences(sequences)
    assert forest.num_roots == 1
    return Items.from_forest(forest, terms=forest.sequence_lens - 1)


def branching(rng, *, num_leaves, num_new):
    """One tree: every trajectory leaves an earlier one somewhere and goes on with `num_new` tokens on average."""
    sequences = [[0, *rng.integers(0, 1000, 2 * num_new)]]
    while len(sequences) < num_leaves:
        start = sequences[rng.integers(len(sequences))]
        new = rng.integers(0, 1000, rng.integers(1, 2 * num_new))
        sequences.append([*start[: rng.integers(1, len(start) + 1)], *new])
    return sequences


def test_by_hand():
    """Order 2 0 3 1 4: [1 2], its extension [1 2 3 4] and the duplicate cost 4; [1 2 5] would make 5."""
    forest = TokenForest.from_sequences([[1, 2, 3, 4], [1, 2, 5], [1, 2], [1, 2, 3, 4], [7]])
    for method in PACKINGS:
        if method == "single_path":
            continue
        packing = PACKINGS[method](forest, capacity=4)
        assert [part.leaves.tolist() for part in packing.packs] == [[2, 0, 3], [1, 4]]
        assert [part.num_tokens for part in packing.packs] == [4, 4]
        assert packing.num_tokens == 8
        assert packing.num_flat_tokens == 14
        assert packing.effective_reuse_ratio == pytest.approx(6 / 14)
        assert packing.compression == pytest.approx(14 / 8)
        assert packing.fill == 1.0

    packing = pack(forest, capacity=5, method="dfs_first_fit")
    assert [part.leaves.tolist() for part in packing.packs] == [[2, 0, 3, 1], [4]]
    assert [part.num_tokens for part in packing.packs] == [5, 1]
    assert packing.fill == 0.6


@pytest.mark.parametrize("method", PACKINGS)
@forests(spare=st.integers(0, 12), spare_terms=st.none() | st.integers(0, 12))
@example(sequences=DEEP, spare=0, spare_terms=None)
@example(sequences=DEEP, spare=3, spare_terms=2)
@example(sequences=[[1]], spare=0, spare_terms=None)
def test_packs_are_a_partition_within_the_caps(method, sequences, spare, spare_terms):
    forest = TokenForest.from_sequences(sequences)
    capacity = max(map(len, sequences)) + spare
    terms = [sum(sequence) for sequence in sequences]
    max_terms = None if spare_terms is None else max(max(terms) + spare_terms, 1)
    packing = PACKINGS[method](forest, capacity=capacity, max_loss_terms=max_terms, loss_terms=terms)
    leaves = [part.leaves.tolist() for part in packing.packs]
    assert sorted(chain.from_iterable(leaves)) == list(range(len(sequences)))
    for part in packing.packs:
        assert (np.diff(forest.dfs_rank[part.leaves]) > 0).all()
        assert part.num_tokens == union_of_paths([sequences[leaf] for leaf in part.leaves])
        assert part.num_tokens <= capacity
        assert max_terms is None or sum(terms[leaf] for leaf in part.leaves) <= max_terms
    bound = lower_bound(forest, capacity=capacity, max_loss_terms=max_terms, loss_terms=terms)
    assert packing.lower_bound == bound
    assert forest.num_tokens <= bound <= packing.num_tokens <= forest.num_flat_tokens
    assert packing.gap == packing.num_tokens / bound - 1
    assert packing.num_tokens == sum(part.num_tokens for part in packing.packs)
    assert packing.num_capacity_tokens == capacity * len(packing.packs)


@forests(spare=st.integers(0, 12))
def test_first_fit_opens_no_pack_too_early(sequences, spare):
    forest = TokenForest.from_sequences(sequences)
    capacity = max(map(len, sequences)) + spare
    leaves = [part.leaves.tolist() for part in pack(forest, capacity=capacity, method="dfs_first_fit").packs]
    for here, following in pairwise(leaves):
        assert union_of_paths([sequences[leaf] for leaf in [*here, following[0]]]) > capacity


@forests(spare=st.integers(0, 8), seed=st.integers(0, 100))
def test_the_order_of_the_input_does_not_change_the_optimum(sequences, spare, seed):
    capacity = max(map(len, sequences)) + spare
    shuffled = [sequences[i] for i in np.random.default_rng(seed).permutation(len(sequences))]
    totals = {
        pack(TokenForest.from_sequences(each), capacity=capacity, method="exact").num_tokens
        for each in (sequences, shuffled)
    }
    assert len(totals) == 1


@forests(spare=st.integers(0, 8))
def test_more_capacity_never_costs_the_optimum_tokens_and_at_last_reuses_all(sequences, spare):
    forest = TokenForest.from_sequences(sequences)
    capacities = [max(map(len, sequences)) + spare, 2 * max(map(len, sequences)) + spare, forest.num_flat_tokens]
    totals = [pack(forest, capacity=capacity, method="exact").num_tokens for capacity in capacities]
    assert totals == sorted(totals, reverse=True)
    for method in PACKINGS:
        packing = PACKINGS[method](forest, capacity=capacities[-1])
        if method != "single_path":  # its packs share one prefix each, so prefixes inside of them count
            assert packing.num_tokens == forest.num_tokens
            assert packing.effective_reuse_ratio == forest.potential_overlap_ratio


def test_large_trees_are_packed_by_subtrees_within_the_caps():
    """1,500 leaves are joined to fewer items first; packs must still hold whole leaves within both caps."""
    rng = np.random.default_rng(0)
    forest = TokenForest.from_sequences(branching(rng, num_leaves=1500, num_new=20))
    capacity, max_terms = 8 * int(forest.sequence_lens.max()), 16 * int(forest.sequence_lens.max())
    items = Items.from_forest(forest, terms=forest.sequence_lens - 1)
    coarse = items.coarsened(caps=Caps(num_tokens=capacity // 16, num_terms=max_terms // 16))
    assert len(coarse) < 1100
    assert coarse.num_tokens == forest.num_tokens
    assert coarse.union_tokens(range(0, len(coarse), 2)) == union_num_tokens(
        forest, forest.order[coarse.leaves(range(0, len(coarse), 2))]
    )
    greedy = pack(forest, capacity=capacity, method="dfs_first_fit", max_loss_terms=max_terms)
    better = pack(forest, capacity=capacity, method="heuristic", max_loss_terms=max_terms)
    assert sorted(chain.from_iterable(part.leaves.tolist() for part in better.packs)) == list(range(1500))
    for part in better.packs:
        assert part.num_tokens == union_num_tokens(forest, part.leaves) <= capacity
        assert (forest.sequence_lens[part.leaves] - 1).sum() <= max_terms
    assert better.lower_bound <= better.num_tokens < greedy.num_tokens


def test_large_trees_with_prefixes_and_duplicates_are_packed_whole():
    """Prefixes are joined to what extends them, and subtrees to items: no leaf may be lost in between."""
    rng = np.random.default_rng(0)
    sequences = branching(rng, num_leaves=700, num_new=20)
    for end in rng.integers(1, 20, size=300):
        sequences.append(sequences[rng.integers(len(sequences))][:end])
    sequences += sequences[:50]
    forest = TokenForest.from_sequences(sequences)
    packing = pack(forest, capacity=8 * int(forest.sequence_lens.max()), method="heuristic")
    assert sorted(chain.from_iterable(part.leaves.tolist() for part in packing.packs)) == list(range(1050))
    assert all(part.num_tokens == union_num_tokens(forest, part.leaves) for part in packing.packs)
    assert packing.lower_bound <= packing.num_tokens <= 1.2 * packing.lower_bound


def test_the_heuristic_repeats_itself_and_its_seed_matters():
    rng = np.random.default_rng(1)
    forest = TokenForest.from_sequences(branching(rng, num_leaves=60, num_new=12))
    capacity = int(1.5 * forest.sequence_lens.max())

    def packs(seed):
        packing = pack(forest, capacity=capacity, method="heuristic", seed=seed)
        return [part.leaves.tolist() for part in packing.packs]

    assert packs(0) == packs(0)
    assert any(packs(seed) != packs(0) for seed in range(1, 6))


def test_the_second_pass_of_improvement_shifts_its_windows():
    bins = [[0, 1], [2, 3], [4], [5, 6, 7, 8, 9], [10], [11, 12]]
    assert _windows(bins, max_items=4, is_shifted=False) == [bins[:2], bins[2:3], bins[3:4], bins[4:]]
    assert _windows(bins, max_items=4, is_shifted=True) == [bins[:1], bins[1:3], bins[3:4], bins[4:]]


def test_the_papers_rules():
    """The child with the deepest leaf comes first, with it what is of similar depth: [0 1 ..] before [0 2], [0 3]."""
    items = one_tree([[0, 2], [0, 3], [0, 1, 5, 5, 5], [0, 1, 6, 6]])  # DFS order: 01555 0166 02 03
    bins = deepest_first(items, caps=Caps(num_tokens=5))
    assert bins == [[0], [1, 2], [3]]
    items = one_tree([[0, 1], [0, 2, 4], [0, 2, 5, 5], [0, 3, 3, 3, 3]])  # deepest first: 03333 0255 024 01
    bins = deepest_first(items, caps=Caps(num_tokens=5))
    assert bins == [[3], [1, 2], [0]]


def test_best_fit_merges_at_every_node():
    """Below the root token, children of 3, 2, 2 and 1 tokens and room for 4: 3 + 1 and 2 + 2."""
    items = one_tree([[0, 1, 1, 1], [0, 2, 2], [0, 3, 3], [0, 4]])
    assert sorted(best_fit_up(items, caps=Caps(num_tokens=5))) == [[0, 3], [1, 2]]
    # Node [0 1 1] has two bins, of 2 + 1 and 2 tokens; at the root the short leaf enters the one with room.
    items = one_tree([[0, 1, 1, 2, 2], [0, 1, 1, 3, 3], [0, 1, 1, 4], [0, 5]])
    assert sorted(best_fit_up(items, caps=Caps(num_tokens=6))) == [[0, 3], [1, 2]]


def test_single_path_by_hand():
    """The paper's figure 3: u has v1 (two leaves), v2 (one) and v3 (two), every segment 10 tokens, C = 60.

    Sharing r-u among all five leaves needs 20 + 50 + ... more than 60 tokens flat; v1 and v3 are feasible alone.
    """
    sequences = [[*range(20), 100 + v, *range(9), 200 + leaf, *range(9)] for v in (1, 3) for leaf in (1, 2)]
    sequences.append([*range(20), 102, *range(9)])
    forest = TokenForest.from_sequences(sequences)
    packing = pack(forest, capacity=60, method="single_path")
    assert sorted(sorted(part.leaves.tolist()) for part in packing.packs) == [[0, 1], [2, 3], [4]]
    assert packing.num_tokens == 50 + 50 + 30
    assert pack(forest, capacity=60, method="exact").num_tokens == 50 + 60


def test_lower_bound_by_hand():
    """Below the root's 4 tokens and in room for 6: three leaves of 4 do not pair, and two of 2 fit to them."""
    items = one_tree([[9, 9, 9, 9, leaf, *[0] * (size - 1)] for leaf, size in enumerate((4, 4, 4, 2, 2))])
    caps = Caps(num_tokens=10)
    assert least_visits(items, caps=caps)[0] == 3
    # One more leaf of 2 fills the third pack, another opens a fourth: by demand (18 + 2) / 6.
    items = one_tree([[9, 9, 9, 9, leaf, *[0] * (size - 1)] for leaf, size in enumerate((4, 4, 4, 2, 2, 2, 2))])
    assert least_visits(items, caps=caps)[0] == 4
    # Loss terms count too: five leaves of 7, 7, 7, 5, 5 trained tokens, at most 8 in a pack.
    items = one_tree([[9, 9, 9, 9, leaf, *[0] * (size - 1)] for leaf, size in enumerate((4, 4, 4, 2, 2))])
    assert least_visits(items, caps=Caps(num_tokens=100, num_terms=8))[0] == 4


@fuzzed()
@given(values=st.lists(st.integers(0, 9), min_size=1, max_size=20), data=st.data())
def test_range_minimum(values, data):
    start = data.draw(st.integers(0, len(values) - 1))
    end = data.draw(st.integers(start + 1, len(values)))
    assert RangeMin(np.array(values))(start, end) == min(values[start:end])


@pytest.mark.parametrize("capacity", [None, 9])
@pytest.mark.parametrize("method", sorted(PACKINGS.keys() - {"single_path"}))
def test_one_pack_reuses_all_that_overlaps(method, capacity):
    forest = TokenForest.from_sequences(DEEP)
    assert forest.num_tokens == 9
    packing = PACKINGS[method](forest, capacity=capacity)
    assert len(packing.packs) == 1
    assert packing.packs[0].leaves.tolist() == forest.order.tolist()
    assert packing.num_tokens == packing.lower_bound == forest.num_tokens
    assert packing.effective_reuse_ratio == forest.potential_overlap_ratio
    assert packing.fill == 1.0


def test_trees_share_packs_only_where_they_fit():
    """Trees of 5, 4, 3 and 2 tokens and C = 7: 5 + 2 and 4 + 3."""
    forest = TokenForest.from_sequences([[1] * 5, [2] * 4, [3] * 3, [4] * 2])
    packing = pack(forest, capacity=7, method="heuristic")
    assert [part.leaves.tolist() for part in packing.packs] == [[0, 3], [1, 2]]
    capped = pack(forest, capacity=7, method="heuristic", max_loss_terms=4)
    assert [part.leaves.tolist() for part in capped.packs] == [[0], [1, 3], [2]]


def test_default_capacity():
    forest = TokenForest.from_sequences([[index, *range(4000)] for index in range(3)])
    assert [part.num_tokens for part in pack(forest).packs] == [8002, 4001]


def test_too_long_trajectory_is_named_with_the_remedy():
    forest = TokenForest.from_sequences([[1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5]])
    message = (
        r"trajectory 1 has 4 tokens and a pack only 3 \(2 of 3 .* longest has 5\): "
        r"raise tree\.capacity .*actor\.ppo_max_token_len_per_gpu.* or shorten .*, or set tree\.relay=auto"
    )
    with pytest.raises(ValueError, match=message):
        pack(forest, capacity=3)
    with pytest.raises(ValueError, match=r"trajectory 2 has 5 tokens and a path only 4 .* raise tree\.max_path_len"):
        pack(forest, capacity=9, max_path_len=4)
    with pytest.raises(ValueError, match=r"trajectory 1 has 3 loss terms and a pack only 2 .*tree\.max_loss_terms"):
        pack(forest, capacity=9, max_loss_terms=2)


def test_exact_says_what_it_could_not_do():
    forest = TokenForest.from_sequences(branching(np.random.default_rng(2), num_leaves=30, num_new=9))
    with pytest.raises(ValueError, match=r"30 leaves and \d+ nodes .*max_states=50.*method=\"heuristic\""):
        pack(forest, capacity=int(1.5 * forest.sequence_lens.max()), method="exact", max_states=50)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 0}, r"capacity is 0: set tree\.capacity .*to a positive number"),
        ({"max_loss_terms": 0}, r"max_loss_terms is 0: set tree\.max_loss_terms to a positive number"),
        ({"max_path_len": -1}, r"max_path_len is -1: set tree\.max_path_len to a positive number"),
        ({"loss_terms": [1, 2]}, r"loss_terms has 2 entries.*each of the 1 trajectories"),
        ({"loss_terms": [-1]}, r"the least is -1"),
        ({"method": "magic"}, r"'magic' does not exist: use one of \['auto', 'heuristic'"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        pack(TokenForest.from_sequences([[1]]), **options)


@pytest.mark.parametrize("method", PACKINGS)
def test_empty_forest_has_no_packs(method):
    packing = PACKINGS[method](TokenForest.from_sequences([]))
    assert packing.packs == ()
    assert (packing.num_tokens, packing.effective_reuse_ratio, packing.compression) == (0, 0.0, 1.0)
    assert (packing.lower_bound, packing.gap, packing.fill) == (0, 0.0, 1.0)
