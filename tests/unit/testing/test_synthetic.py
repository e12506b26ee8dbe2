"""Every shape has the numbers that were computed by hand for it, and the order of arrival is not that of the tree."""

import itertools
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_tree.testing.synthetic import (
    SHAPES,
    VOCAB_SIZE,
    caterpillar,
    groups,
    overlap,
    random_forest,
    star,
    tau2,
    tool_fan_out,
    tree_search,
    unbalanced,
)
from verl_tree.tree import TokenForest

seeded = settings(derandomize=True, deadline=None)
GENERATORS = {
    **SHAPES,
    "overlap": partial(overlap, 0.6, num_leaves=32, num_flat_tokens=20_000),
    "random_forest": random_forest,
    "groups": partial(groups, star, num_groups=4),
}


def forest_of(sequences):
    return TokenForest.from_sequences(sequences)


def as_bytes(sequences):
    return [sequence.tobytes() for sequence in sequences]


def node_lens(forest):
    return forest.node_end - forest.node_start


def leaf_depths(forest):
    """Nodes on the path of every leaf, in DFS order."""
    depths = np.zeros(forest.num_leaves, dtype=int)
    for first, last in zip(forest.node_first_leaf, forest.node_last_leaf, strict=True):
        depths[first:last] += 1
    return depths


@pytest.mark.parametrize("name", GENERATORS)
class TestEveryGenerator:
    def test_a_seed_gives_the_same_int32_arrays_and_another_seed_does_not(self, name):
        first, again, other = (GENERATORS[name](seed=seed) for seed in (7, np.random.default_rng(7), 8))
        assert {(row.dtype, row.ndim) for row in first} == {(np.dtype(np.int32), 1)}
        assert as_bytes(first) == as_bytes(again)
        assert as_bytes(first) != as_bytes(other)

    def test_shuffling_changes_only_the_order_and_it_is_not_dfs_order(self, name):
        shuffled, plain = (GENERATORS[name](seed=1, shuffle=shuffle) for shuffle in (True, False))
        assert sorted(as_bytes(shuffled)) == sorted(as_bytes(plain))
        assert as_bytes(shuffled) != as_bytes(plain)
        # In DFS order every rank follows the one before it; in random order one does once.
        steps = np.diff(forest_of(shuffled).dfs_rank)
        assert (steps == 1).mean() < 0.3

    def test_token_ids_are_below_the_vocabulary_and_trajectories_share_no_memory(self, name):
        rows = GENERATORS[name](seed=2, vocab_size=80)
        assert 0 <= min(row.min() for row in rows) <= max(row.max() for row in rows) < 80
        assert not any(np.shares_memory(*pair) for pair in itertools.combinations(rows[:40], 2))

    def test_a_tiny_vocabulary_does_not_merge_branches(self, name):
        # Lengths are drawn before tokens, so the tree is the same whatever the vocabulary.
        small, large = (forest_of(GENERATORS[name](seed=3, vocab_size=size)) for size in (80, VOCAB_SIZE))
        assert (small.num_tokens, small.num_nodes, small.num_roots) == (
            large.num_tokens,
            large.num_nodes,
            large.num_roots,
        )


@pytest.mark.parametrize("ratio", [0.0, 0.2, 0.5, 0.8, 0.92])
@pytest.mark.parametrize(("num_leaves", "num_flat_tokens"), [(16, 20_000), (64, 100_003), (200, 300_001)])
def test_overlap_holds_leaves_and_flat_tokens_while_the_ratio_changes(ratio, num_leaves, num_flat_tokens):
    forest = forest_of(overlap(ratio, num_leaves=num_leaves, num_flat_tokens=num_flat_tokens, vocab_size=256))
    assert (forest.num_leaves, forest.num_flat_tokens) == (num_leaves, num_flat_tokens)
    assert abs(forest.potential_overlap_ratio - ratio) <= num_leaves / num_flat_tokens
    assert forest.depth == (4 if ratio else 1)
    assert set(leaf_depths(forest)) == {forest.depth}


@pytest.mark.parametrize("depth", [3, 4, 5, 6])
def test_overlap_shares_tokens_on_every_level(depth):
    forest = forest_of(overlap(0.6, num_leaves=64, num_flat_tokens=64_000, depth=depth))
    saved = node_lens(forest) * (forest.node_last_leaf - forest.node_first_leaf - 1)
    per_level = np.bincount(forest.node_depth, weights=saved)
    assert len(per_level) == depth
    assert per_level[-1] == 0
    assert per_level[:-1].min() > 0.5 * per_level.max()
    assert forest.num_roots == 1


def test_overlap_by_hand():
    """Four leaves, depth 3: a root above two nodes above two leaves each. 50 % of 40 tokens are 20 saved.

    Each inner node has one token at first, which saves 3 + 1 + 1 = 5; the other 15 are three more on each level.
    """
    forest = forest_of(overlap(0.5, num_leaves=4, num_flat_tokens=40, depth=3))
    inner = forest.node_last_leaf - forest.node_first_leaf > 1
    assert node_lens(forest)[inner].tolist() == [4, 4, 4]
    assert node_lens(forest)[~inner].sum() == 40 - 4 * 4 - 4 * 4
    assert forest.num_tokens == 20


@seeded
@given(
    ratio=st.floats(0.1, 0.9),
    depth=st.integers(3, 5),
    num_leaves=st.integers(16, 90),
    tokens_per_leaf=st.integers(300, 900),
    seed=st.integers(0, 9),
)
def test_overlap_is_exact_for_any_size(ratio, depth, num_leaves, tokens_per_leaf, seed):
    num_flat_tokens = num_leaves * tokens_per_leaf + seed
    forest = forest_of(
        overlap(ratio, num_leaves=num_leaves, num_flat_tokens=num_flat_tokens, depth=depth, seed=seed, vocab_size=100)
    )
    assert (forest.num_leaves, forest.num_flat_tokens, forest.depth) == (num_leaves, num_flat_tokens, depth)
    assert abs(forest.potential_overlap_ratio - ratio) < 0.01


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"potential_overlap_ratio": 0.9375}, r"0\.9375 is out of reach.*at most 1 - 1/16 = 0\.9375"),
        ({"potential_overlap_ratio": -0.1}, r"potential_overlap_ratio=-0\.1"),
        ({"potential_overlap_ratio": 0.937}, "leaves .* tokens for the own parts.*give more num_flat_tokens"),
        ({"num_flat_tokens": 50, "potential_overlap_ratio": 0.1}, "num_flat_tokens=50 are too few"),
        ({"num_flat_tokens": 15, "potential_overlap_ratio": 0}, "leaves 15 tokens"),
        ({"depth": 2}, "depth=2"),
        ({"depth": 6}, "depth=6 with num_leaves=16"),
        ({"num_leaves": 0}, "num_leaves=0"),
    ],
)
def test_overlap_refuses_what_no_tree_has(arguments, message):
    given_arguments = {"potential_overlap_ratio": 0.5, "num_leaves": 16, "num_flat_tokens": 1000, **arguments}
    with pytest.raises(ValueError, match=message):
        overlap(given_arguments.pop("potential_overlap_ratio"), **given_arguments)


def test_star_by_hand():
    forest = forest_of(star(5, prompt_len=7, branch_len=3))
    assert (forest.num_flat_tokens, forest.num_tokens) == (5 * (7 + 3), 7 + 5 * 3)
    assert (forest.num_nodes, forest.depth) == (1 + 5, 2)


def test_a_length_range_includes_both_ends():
    lens = {len(row) for row in star(200, prompt_len=1, branch_len=(2, 4))}
    assert lens == {3, 4, 5}


def test_caterpillar_by_hand():
    """Turn t's trajectory: the system prompt, t - 1 questions and answers, question, thinking, answer."""
    rows = caterpillar(3, system_len=5, question_len=2, thinking_len=3, answer_len=4, shuffle=False)
    assert [len(row) for row in rows] == [5 + 2 + 3 + 4, 5 + 6 + 2 + 3 + 4, 5 + 12 + 2 + 3 + 4]
    first, second, third = (row.tolist() for row in rows)
    assert first[:7] == second[:7] == third[:7]
    assert first[7] != second[7], "thinking and answer part at once"
    assert first[10:] == second[7:11] == third[7:11], "the first answer, after its thinking and in the history"
    assert second[:13] == third[:13]
    assert second[16:] == third[13:17], "the second answer"
    forest = forest_of(rows)
    # Trunk: system and question 1, answer 1 and question 2, answer 2 and all of turn 3; beside it two turns.
    assert sorted(node_lens(forest)) == sorted([7, 6, 4 + 2 + 3 + 4, 7, 7])
    assert (forest.num_tokens, forest.depth) == (40, 3)


def test_tool_fan_out_by_hand():
    rows = tool_fan_out(2, num_calls=3, prompt_len=10, plan_len=4, call_len=2, result_len=3, shuffle=False)
    # Before the calls of turn 1 are 14 tokens, before those of turn 2 there are 14 + 9 + 4.
    assert [len(row) for row in rows] == [14 + 5] * 3 + [27 + 5] * 3 + [27 + 9 + 4]
    for turn_start, branches in ((14, rows[:3]), (27, rows[3:6])):
        results = [branch[-3:].tolist() for branch in branches]
        assert rows[-1][turn_start : turn_start + 9].tolist() == list(itertools.chain(*results)), (
            "the main branch has all results"
        )
    forest = forest_of(rows)
    assert forest.num_tokens == 14 + 3 * 5 + 9 + 4 + 3 * 5 + 9 + 4
    assert (forest.num_nodes, forest.depth) == (1 + 4 + 4, 3)


def test_tree_search_by_hand():
    forest = forest_of(
        tree_search(2, num_expansions=3, num_rounds=2, num_steps=4, prompt_len=8, step_len=5, vocab_size=50)
    )
    assert forest.num_leaves == 2 * (1 + 3 * 2)
    assert set(forest.sequence_lens) == {8 + 4 * 5}
    assert (forest.num_roots, node_lens(forest)[0]) == (1, 8)
    samples = forest.node_parent == 0
    assert (forest.node_last_leaf - forest.node_first_leaf)[samples].tolist() == [7, 7]
    assert set(node_lens(forest)[1:] % 5) == {0}
    with pytest.raises(ValueError, match="num_steps=1"):
        tree_search(num_steps=1)


@pytest.mark.parametrize("seed", range(3))
def test_tau2_has_one_long_system_prompt_and_the_compression_that_areal_reports(seed):
    forest = forest_of(tau2(seed=seed))
    assert forest.num_leaves == 8 * 4 * 12
    assert (forest.num_roots, node_lens(forest)[0]) == (1, 4800)
    assert (forest.node_parent == 0).sum() == 8
    assert forest.num_flat_tokens / forest.num_tokens == pytest.approx(9.4, rel=0.1)


def test_unbalanced_is_deep_in_few_places_and_heavy_tailed():
    forests = [forest_of(unbalanced(seed=seed)) for seed in range(20)]
    assert {forest.num_leaves for forest in forests} == {64}
    ratios = [forest.potential_overlap_ratio for forest in forests]
    assert 0.28 < min(ratios) < max(ratios) < 0.9
    assert max(ratios) - min(ratios) > 0.15
    relative_depths = [np.median(leaf_depths(forest)) / forest.depth for forest in forests]
    assert np.mean(relative_depths) < 0.6
    lens = [node_lens(forest) for forest in forests]
    assert np.median([row.max() / np.median(row) for row in lens]) > 6
    arities = [np.bincount(forest.node_parent[1:]) for forest in forests]
    assert np.median([row.max() / np.median(row[row > 0]) for row in arities]) > 4


def test_unbalanced_refuses_fewer_leaves_than_deep_branches():
    with pytest.raises(ValueError, match="num_leaves=2 are fewer than num_deep=3"):
        unbalanced(2)


@seeded
@given(seed=st.integers(0, 10**6), num_leaves=st.integers(1, 20), max_depth=st.integers(1, 5))
def test_random_forest_has_the_leaves_and_at_most_the_depth_asked_for(seed, num_leaves, max_depth):
    forest = forest_of(random_forest(seed, num_leaves=num_leaves, mean_len=1.5, max_depth=max_depth))
    assert forest.num_leaves == num_leaves
    assert 1 <= forest.depth <= max_depth


def special_cases(rows):
    """Which special cases the trajectories hold."""
    tuples = [tuple(row.tolist()) for row in rows]
    return {
        "duplicate": len(set(tuples)) < len(tuples),
        "strict prefix": any(a != b and a == b[: len(a)] for a, b in itertools.permutations(tuples, 2)),
        "several roots": len({row[0] for row in tuples}) > 1,
        "one token": min(map(len, tuples)) == 1,
        "depth >= 3": forest_of(rows).depth >= 3,
    }


def test_random_forest_holds_every_special_case_sometimes():
    cases = [special_cases(random_forest(seed)) for seed in range(100)]
    shares = {name: np.mean([case[name] for case in cases]) for name in cases[0]}
    assert shares.pop("depth >= 3") > 0.8
    assert all(0.02 < share < 0.9 for share in shares.values()), shares


def test_random_forest_leaves_out_what_has_probability_zero():
    none = partial(random_forest, root_probability=0, prefix_probability=0, duplicate_probability=0)
    for seed in range(30):
        cases = special_cases(none(seed))
        assert not any(cases[name] for name in ("duplicate", "strict prefix", "several roots"))


def test_groups_have_different_roots_where_chance_would_merge_them():
    """Eight groups and eight token ids: were the roots left to chance, all would differ in 1 of 416 draws."""
    shape = partial(star, 4, prompt_len=6, branch_len=2)
    forest = forest_of(groups(shape, num_groups=8, vocab_size=8))
    assert (forest.num_roots, forest.num_leaves) == (8, 32)
    assert forest.num_tokens == 8 * (6 + 4 * 2)
    with pytest.raises(ValueError, match="vocab_size=8 cannot tell 9 roots apart: give at least 9"):
        groups(shape, num_groups=9, vocab_size=8)


def test_groups_keep_the_roots_of_a_group_apart_and_are_independent_draws():
    shape = partial(random_forest, root_probability=0.4)
    rows = groups(shape, num_groups=3, seed=5, shuffle=False)
    drawn = [forest_of(rows[start : start + 10]) for start in (0, 10, 20)]
    assert sum(forest.num_roots for forest in drawn) == forest_of(rows).num_roots > 3
    assert len({forest.num_tokens for forest in drawn}) > 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(star, 9, vocab_size=8), "vocab_size=8 cannot tell 9 siblings apart"),
        (partial(star, 0), "num_branches=0"),
        (partial(star, branch_len=(4, 3)), r"branch_len=\(4, 3\)"),
        (partial(caterpillar, thinking_len=0), "thinking_len=0"),
        (partial(random_forest, root_probability=0.9, prefix_probability=0.2), "a sum <= 1"),
        (partial(random_forest, mean_len=0.5), r"mean_len=0\.5"),
        (partial(groups, star, num_groups=0), "num_groups=0"),
    ],
)
def test_arguments_that_make_no_forest_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_module_imports_numpy_only():
    code = (
        "import sys; import verl_tree.testing.synthetic; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'verl', 'ray')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
