"""How near the methods come to the optimum: against all partitions, and against HiGHS on the integer programme.

The example of docs/packing.md is here too, so that its numbers stay true.
"""

import time
from itertools import chain

import numpy as np
import pytest

from verl_tree.packing import lower_bound, pack
from verl_tree.packing.bound import least_visits
from verl_tree.packing.exact import Budget, BudgetExceededError, _undominated, exact
from verl_tree.packing.heuristic import best_fit_up
from verl_tree.packing.problem import UNLIMITED, Caps, Items
from verl_tree.testing.packing_reference import brute_force, integer_programme, max_packs
from verl_tree.testing.synthetic import overlap, random_forest, tree_search
from verl_tree.tree import TokenForest

# root (3 tokens) ─┬─ a (1) ─┬─ a1 (1)    C = 11
#                  │         └─ a2 (2)
#                  └─ b (1) ─┬─ b1 (4)
#                            └─ b2 (4)
EXAMPLE = [[0, 0, 0, 1, 11], [0, 0, 0, 1, 12, 12], [0, 0, 0, 2, *[21] * 4], [0, 0, 0, 2, *[22] * 4]]


def one_tree(forest):
    return Items.from_forest(forest, terms=forest.sequence_lens - 1)


def exact_total(forest, *, capacity, loss_terms=None, max_loss_terms=None):
    """Packed tokens of the exact programme where only the flat packing is known: the heuristic cannot help."""
    terms = forest.sequence_lens - 1 if loss_terms is None else np.array(loss_terms)
    caps = Caps(num_tokens=capacity, num_terms=UNLIMITED if max_loss_terms is None else max_loss_terms)
    budget = Budget(max_states=10**6, deadline_s=time.perf_counter() + 60)
    total = 0
    for items in Items.from_forest(forest, terms=terms).trees():
        bins = exact(items, caps=caps, known=[[item] for item in range(len(items))], budget=budget)
        assert sorted(chain.from_iterable(bins)) == list(range(len(items)))
        total += sum(items.union_tokens(members) for members in bins)
    return total


def partitions(members):
    if not members:
        yield []
        return
    for partition in partitions(members[1:]):
        yield [[members[0]], *partition]
        for index, block in enumerate(partition):
            yield [*partition[:index], [members[0], *block], *partition[index + 1 :]]


def states(sequences, *, depth, room):
    """All states of a node that ends at `depth`: loads of every partition of the leaves below it that fits."""
    found = set()
    for partition in partitions(sequences):
        loads = [
            len({tuple(each[:end]) for each in block for end in range(depth + 1, len(each) + 1)}) for block in partition
        ]
        if max(loads) <= room:
            found.add(tuple(sorted(loads, reverse=True)))
    return found


def test_the_states_of_the_example():
    """docs/packing.md, the table of states: at a, b and the root, with the cost at the root."""
    assert states(EXAMPLE[:2], depth=4, room=7) == {(3,), (2, 1)}
    assert states(EXAMPLE[2:], depth=4, room=7) == {(4, 4)}
    at_root = {(5, 5, 4), (8, 7), (8, 5, 2), (7, 5, 3), (5, 5, 3, 2)}
    assert states(EXAMPLE, depth=3, room=8) == at_root
    costs = {state: sum(state) + 3 * len(state) for state in at_root}
    assert costs == {(5, 5, 4): 23, (8, 7): 21, (8, 5, 2): 24, (7, 5, 3): 24, (5, 5, 3, 2): 27}
    # One more leaf below the root: the states of the paragraph on dominance.
    assert states([*EXAMPLE, [0, 0, 0, 3]], depth=3, room=8) >= {(7, 5, 4), (6, 5, 4)}


def test_the_example():
    forest = TokenForest.from_sequences(EXAMPLE)
    assert (forest.num_flat_tokens, forest.num_tokens) == (27, 16)
    totals = {
        method: pack(forest, capacity=11, method=method).num_tokens
        for method in ("exact", "heuristic", "auto", "dfs_first_fit", "single_path", "deepest_first")
    }
    greedy = {"dfs_first_fit": 23, "single_path": 23, "deepest_first": 24}  # deepest first: b1 | b2 a2 | a1
    assert totals == {"exact": 21, "heuristic": 21, "auto": 21} | greedy
    items = one_tree(forest)
    start = best_fit_up(items, caps=Caps(num_tokens=11))
    assert sum(items.union_tokens(members) for members in start) == 23
    assert [part.num_tokens for part in pack(forest, capacity=11, method="exact").packs] in ([10, 11], [11, 10])
    assert least_visits(items, caps=Caps(num_tokens=11)).tolist() == [2, 1, 1, 1, 2, 1, 1]
    assert lower_bound(forest, capacity=11) == 20
    assert brute_force(EXAMPLE, capacity=11) == 21


def test_dominance_by_hand():
    """A state is dropped for one that is nowhere larger and has no more packs, and for no other."""

    def kept(*loads):
        table = {tuple((load, 0) for load in state): () for state in loads}
        budget = Budget(max_states=1, deadline_s=time.perf_counter() + 60)
        return {tuple(load for load, _ in state) for state in _undominated(table, budget=budget)}

    assert kept((6, 5, 4), (7, 5, 4), (5, 5, 5)) == {(6, 5, 4), (5, 5, 5)}
    assert kept((7,), (7, 0)) == {(7,)}
    assert kept((4, 0), (5,)) == {(4, 0), (5,)}
    assert kept((4, 3), (7,)) == {(4, 3), (7,)}


def test_dominance_counts_loss_terms():
    table = {((4, 9), (3, 1)): (), ((4, 8), (3, 1)): (), ((5, 7), (3, 1)): ()}
    budget = Budget(max_states=1, deadline_s=time.perf_counter() + 60)
    assert set(_undominated(table, budget=budget)) == {((4, 8), (3, 1)), ((5, 7), (3, 1))}


def test_demand_counts_all_that_is_below():
    """Three children of 1 token with two leaves of 2 each: 15 tokens below the root and room for 8, so two visits."""
    sequences = [[0, 0, child, *[10 * child + leaf] * 2] for child in (1, 2, 3) for leaf in (1, 2)]
    items = one_tree(TokenForest.from_sequences(sequences))
    assert least_visits(items, caps=Caps(num_tokens=10)).tolist() == [2] + 9 * [1]
    assert lower_bound(TokenForest.from_sequences(sequences), capacity=10) == 19
    assert brute_force(sequences, capacity=10) == 20


def small_cases(*, has_max_terms):
    for number in range(60):
        rng = np.random.default_rng([number, has_max_terms])
        sequences = random_forest(rng, num_leaves=int(rng.integers(3, 9)), mean_len=float(rng.choice([3, 12])))
        forest = TokenForest.from_sequences(sequences)
        longest = int(forest.sequence_lens.max())
        caps = {"capacity": int(rng.integers(longest, max(forest.num_tokens, longest + 1)))}
        if has_max_terms:
            terms = [int(number) for number in rng.integers(0, forest.sequence_lens)]
            caps |= {"loss_terms": terms, "max_loss_terms": max(max(terms), sum(terms) // int(rng.integers(2, 4)), 1)}
        yield sequences, forest, caps


@pytest.mark.parametrize("has_max_terms", [False, True])
def test_exact_is_the_best_of_all_partitions(has_max_terms):
    gaps, num_tight, num_cut = [], 0, 0
    for sequences, forest, caps in small_cases(has_max_terms=has_max_terms):
        optimum = brute_force(sequences, **caps)
        packing = pack(forest, method="exact", **caps)
        assert packing.num_tokens == exact_total(forest, **caps) == optimum
        assert packing.lower_bound <= optimum
        gaps.append(pack(forest, method="heuristic", **caps).num_tokens / optimum - 1)
        assert pack(forest, method="auto", **caps).num_tokens <= (gaps[-1] + 1) * optimum + 1e-6
        num_cut += optimum > forest.num_tokens
        num_tight += packing.lower_bound == optimum
    assert num_cut >= 40
    assert num_tight >= 40  # also the bound is the optimum in most cases
    assert 0 <= min(gaps) <= max(gaps) <= 0.05
    assert np.mean(gaps) <= 0.005


def test_two_references_agree():
    """The integer programme, knowing only the flat packing, finds what all partitions give."""
    num_capped = 0
    for number in range(20):
        rng = np.random.default_rng(number)
        sequences = random_forest(rng, num_leaves=7, mean_len=5, root_probability=0)
        forest = TokenForest.from_sequences(sequences)
        longest = int(forest.sequence_lens.max())
        capacity = int(rng.integers(longest, max(forest.num_tokens, longest + 1)))
        max_terms = 2 * (longest - 1) if number % 2 else None
        items = one_tree(forest)
        num_capped += max_terms is not None and items.terms.sum() > max_terms
        caps = Caps(num_tokens=capacity, num_terms=max_terms or UNLIMITED)
        result = integer_programme(items, caps=caps, known_tokens=forest.num_flat_tokens, time_limit_s=60)
        assert result.is_optimal
        assert result.num_tokens == brute_force(sequences, capacity=capacity, max_loss_terms=max_terms)
    assert num_capped >= 5


# Trees that depth-first order packs worse than the optimum, and whose optimum is above our bound; C in longest paths.
MEDIUM = {
    "random": (lambda: random_forest(3, num_leaves=18, mean_len=20, root_probability=0, vocab_size=10_000), 1.05),
    "tree_search, small C": (lambda: tree_search(2, num_expansions=3, seed=1), 1.3),
    "tree_search": (lambda: tree_search(2, num_expansions=3, seed=1), 1.8),
    "overlap": (lambda: overlap(0.5, num_leaves=16, num_flat_tokens=16_000, seed=0), 1.05),
}


@pytest.mark.parametrize("name", MEDIUM)
def test_exact_is_the_optimum_of_the_integer_programme(name):
    draw, multiple = MEDIUM[name]
    forest = TokenForest.from_sequences(draw())
    capacity = int(multiple * forest.sequence_lens.max())
    greedy = pack(forest, capacity=capacity, method="dfs_first_fit").num_tokens
    best = pack(forest, capacity=capacity, method="exact")
    result = integer_programme(one_tree(forest), caps=Caps(num_tokens=capacity), known_tokens=greedy, time_limit_s=60)
    assert result.is_optimal
    assert best.lower_bound < best.num_tokens == result.num_tokens < greedy
    assert pack(forest, capacity=capacity, method="heuristic").num_tokens <= 1.02 * best.num_tokens


def test_max_packs_by_hand():
    """Root of 3, bound 17 below it, 23 tokens known: 6 / 3 packs. And two packs hold more than 11 + 3 tokens."""
    items = one_tree(TokenForest.from_sequences(EXAMPLE))
    own, visits = np.array([3, 1, 1, 2, 1, 4, 4]), np.array([2, 1, 1, 1, 2, 1, 1])
    caps = Caps(num_tokens=11)
    assert max_packs(items, own=own, visits=visits, caps=caps, known_tokens=23) == 3  # (23 - 14) / 3, and 46 / 14
    assert max_packs(items, own=own, visits=visits, caps=caps, known_tokens=27) == 3  # 54 / 14
    capped = Caps(num_tokens=11, num_terms=7)
    assert max_packs(items, own=own, visits=visits, caps=capped, known_tokens=27) == 4  # (27 - 14) / 3


def test_exact_looks_at_the_clock_where_it_makes_few_states():
    """Merging two large tables can take minutes without one new state."""
    items = one_tree(TokenForest.from_sequences(EXAMPLE))
    budget = Budget(max_states=1000, deadline_s=time.perf_counter() - 1)
    with pytest.raises(BudgetExceededError):
        exact(items, caps=Caps(num_tokens=11), known=[[0], [1], [2], [3]], budget=budget)
    assert budget.num_states < 10


def test_no_partition_of_what_does_not_fit():
    with pytest.raises(ValueError, match="exceeds capacity=3 or max_loss_terms=None"):
        brute_force([[1, 2, 3, 4]], capacity=3)
