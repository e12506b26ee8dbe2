"""Ranks come out even, groups are cut only where it pays and where the cut shares least."""

import time
from dataclasses import fields, replace
from itertools import chain

import numpy as np
import pytest
from fuzzing import fuzzed
from hypothesis import given
from hypothesis import strategies as st

from verl_tree.cost import cuts
from verl_tree.cost.balance import MIN_GAIN, GroupPart, balance
from verl_tree.cost.model import CostModel, WorkProfile
from verl_tree.tree import TokenForest
from verl_tree.tree.shape import ForestShape

# One unit per tree token, so that expected loads are counted by hand.
TOKENS = replace(CostModel.prior(), s_per_pair=0.0)


def group_of(leaves):
    """Profile leaves in DFS order, each given as (tokens shared with the one before, new tokens)."""
    sequences, path = [], []
    for leaf, (shared, num_new) in enumerate(leaves):
        path = path[:shared] + [leaf + 1] * num_new
        sequences.append(path)
    profile = WorkProfile.from_forest(TokenForest.from_sequences(sequences))
    assert profile.order.tolist() == list(range(len(leaves)))
    assert profile.lcp.tolist() == [shared for shared, _ in leaves]
    return profile


def balanced(profiles, *, num_ranks, model=TOKENS, cut_groups=True):
    return balance(
        list(range(len(profiles))),
        profiles=profiles,
        model=model,
        rank_num_rows=[0] * num_ranks,
        cut_groups=cut_groups,
    )


def bounds(result):
    return [[(part.group, part.start, part.end) for part in share] for share in result.shares]


def parts_of(result):
    return sorted(chain.from_iterable(bounds(result)))


def test_example_of_the_module_docstring():
    profiles = [group_of([(0, 6), (1, 5), (5, 1)]), group_of([(0, 4)])]
    whole = balanced(profiles, num_ranks=2, cut_groups=False)
    assert (bounds(whole), whole.loads_s) == ([[(0, 0, 3)], [(1, 0, 1)]], (12, 4))
    result = balanced(profiles, num_ranks=2)
    assert bounds(result) == [[(0, 1, 3)], [(0, 0, 1), (1, 0, 1)]]
    assert result.shares[1][0] == GroupPart(0, start=0, end=1, cost_s=6)
    assert result.loads_s == (7, 10)
    assert result.num_lost_tokens(profiles) == 1
    assert result.num_cut_groups == 1


def test_a_big_group_is_cut_where_it_loses_least_among_the_cuts_that_balance():
    """A long leaf at either end and ten short ones between: 1008 tokens, and 4 on the other rank.

    All cuts between the short leaves balance to a few tokens; the one before leaf 6 shares 2 tokens, the others 30.
    """
    leaves = [(0, 500)] + [(30, 1)] * 5 + [(2, 28)] + [(30, 1)] * 5 + [(30, 470)]
    profiles = [group_of(leaves), group_of([(0, 4)])]
    assert profiles[0].range_work(0, 13).num_tokens == 1008
    result = balanced(profiles, num_ranks=2)
    # leaves 6..12: 30 + 5 + 470 = 505; leaves 0..5: 500 + 5 = 505, with the tiny group 509
    assert bounds(result) == [[(0, 6, 13)], [(0, 0, 6), (1, 0, 1)]]
    assert result.loads_s == (505, 509)
    assert result.num_lost_tokens(profiles) == 2


def test_a_slightly_worse_balance_is_taken_for_fewer_lost_tokens():
    """Four leaves of 100 tokens, two of 7, four of 100: 395 | 397 with 3 tokens lost, or 399 | 391 with 1."""
    leaves = [(0, 100), (3, 97), (3, 97), (3, 97), (3, 4), (3, 4), (1, 99), (3, 97), (3, 97), (3, 97)]
    profile = group_of(leaves)
    even, cheap = 5, 6
    assert [profile.range_work(*ends).num_tokens for ends in ((0, even), (even, 10))] == [395, 397]
    assert [profile.range_work(*ends).num_tokens for ends in ((0, cheap), (cheap, 10))] == [399, 391]
    result = balanced([profile], num_ranks=2)
    assert parts_of(result) == [(0, 0, cheap), (0, cheap, 10)]
    assert result.num_lost_tokens([profile]) == 1


def test_no_balance_is_given_up_for_fewer_lost_tokens_beyond_a_near_tie():
    """The cut that shares nothing leaves 197 | 488; those between the other leaves share 3."""
    profile = group_of([(0, 100), (3, 97), (0, 100), (3, 97), (3, 97), (3, 97), (3, 97)])
    result = balanced([profile], num_ranks=2)
    # before leaf 3: 197 + 100 | 100 + 3 * 97
    assert sorted(result.loads_s) == [297, 391]
    assert result.num_lost_tokens([profile]) == 3


def test_equal_groups_are_not_cut():
    profiles = [group_of([(0, 10), (1, 9), (1, 9)])] * 4
    result = balanced(profiles, num_ranks=2)
    assert bounds(result) == [[(0, 0, 3), (2, 0, 3)], [(1, 0, 3), (3, 0, 3)]]
    assert result.num_cut_groups == 0
    assert result.num_lost_tokens(profiles) == 0


def test_largest_group_goes_first_to_the_idle_rank():
    profiles = [group_of([(0, tokens)]) for tokens in (3, 3, 2, 2, 2)]
    result = balanced(profiles, num_ranks=2)
    # 3 | 3, then 2 to rank 0 (5), 2 to rank 1 (5), 2 to rank 0; groups of one row cannot be cut
    assert [[group for group, _, _ in share] for share in bounds(result)] == [[0, 2, 4], [1, 3]]
    assert result.loads_s == (7, 5)


def test_equally_loaded_ranks_are_served_by_their_rows():
    result = balance([0], profiles=[group_of([(0, 5)])], model=TOKENS, rank_num_rows=[4, 2, 3], cut_groups=True)
    assert bounds(result) == [[], [(0, 0, 1)], []]
    result = balance([0], profiles=[group_of([(0, 5), (0, 5)])], model=TOKENS, rank_num_rows=[4, 2, 3], cut_groups=True)
    assert bounds(result) == [[], [(0, 1, 2)], [(0, 0, 1)]]


def test_groups_that_an_update_leaves_out_are_dealt_by_their_rows():
    """Their old log-probs are computed, and the others wait for the rank with most of them."""
    live, other = group_of([(0, 9), (1, 8)]), group_of([(0, 4)])
    idle = replace(live, path_counts=0 * live.path_counts, cumulative_counts=0 * live.cumulative_counts)
    result = balanced([live, idle, other, idle, idle, idle], num_ranks=3, cut_groups=False)
    assert result.loads_s == (17, 4, 0)
    assert [sum(part.end - part.start for part in share) for share in result.shares] == [4, 3, 4]
    assert result.shares[0][0].group == 0


def test_a_cut_that_saves_nothing_is_not_made():
    """Duplicates, and leaves whose shared prompt is nearly all they have: both sides cost as much as the whole."""
    assert balanced([group_of([(0, 9), (9, 0), (9, 0)])], num_ranks=2).num_cut_groups == 0
    assert balanced([group_of([(0, 1000), (999, 1), (999, 1)])], num_ranks=2).num_cut_groups == 0


def test_one_group_fills_many_ranks_with_as_few_cuts_as_it_takes():
    profile = group_of([(0, 10)] * 30)
    result = balanced([profile], num_ranks=3)
    assert parts_of(result) == [(0, 0, 10), (0, 10, 20), (0, 20, 30)]
    assert result.loads_s == (100, 100, 100)


def test_no_rank_is_filled_beyond_the_mean_where_another_can_take_it():
    """52 tokens on three ranks: halves of 26 would leave two ranks too slow, and no cut of either would lower both."""
    profile = group_of([(0, 10), (4, 6), (0, 10), (0, 10), (4, 6), (0, 10)])
    result = balanced([profile], num_ranks=3)
    assert parts_of(result) == [(0, 0, 2), (0, 2, 4), (0, 4, 6)]
    assert sorted(result.loads_s) == [16, 20, 20]


def test_another_rank_receives_where_the_least_loaded_cannot():
    """The least loaded rank holds a range of the group that the slowest one's does not continue."""
    profile = group_of([(0, 10), (0, 10), (4, 6), (2, 8), (4, 6), (0, 10)])
    result = balanced([profile], num_ranks=3)
    assert parts_of(result) == [(0, 0, 2), (0, 2, 4), (0, 4, 6)]
    assert sorted(result.loads_s) == [18, 20, 20]


def test_shifting_a_cut_gives_back_what_it_had_lost():
    """In the end 28 | 28 | 21 with 1 token lost; were the old cut not given back, 28 | 28 | 24 with 4 would win."""
    profiles = [
        group_of([(0, 10), (0, 8), (3, 9), (4, 11)]),
        group_of([(0, 8), (4, 9), (1, 5), (4, 6), (1, 5), (0, 5)]),
    ]
    result = balanced(profiles, num_ranks=3)
    assert sorted(result.loads_s) == [21, 28, 28]
    assert result.num_lost_tokens(profiles) == 1


def test_two_equal_groups_on_four_ranks_are_both_cut():
    """The first cut does not lower the makespan, the other group is as large: cuts are tried ahead."""
    profiles = [group_of([(0, 10)] * 10)] * 2
    result = balanced(profiles, num_ranks=4)
    assert result.loads_s == (50, 50, 50, 50)
    assert result.num_cut_groups == 2


def test_cuts_that_never_pay_are_taken_back():
    """Two groups as long as a single row that cannot be cut: whatever is done to them, 100 stays the makespan."""
    profiles = [group_of([(0, 10)] * 10), group_of([(0, 10)] * 10), group_of([(0, 100)])]
    result = balanced(profiles, num_ranks=4)
    assert result.loads_s == (100, 100, 100, 0)
    assert result.num_cut_groups == 0


def test_more_ranks_than_rows():
    result = balanced([group_of([(0, 10), (0, 10)])], num_ranks=5)
    assert sorted(result.loads_s) == [0, 0, 0, 10, 10]
    assert parts_of(result) == [(0, 0, 1), (0, 1, 2)]


def test_no_rank_is_left_out_of_a_hundred():
    """One cut gains less than 1 % of the makespan here, but a whole fair share."""
    result = balanced([group_of([(0, 10)] * 300)], num_ranks=100)
    assert set(result.loads_s) == {30}


def test_fixed_cost_per_pack_can_make_a_cut_not_worth_it():
    profiles = [group_of([(0, 10), (0, 10)])]
    assert balanced(profiles, num_ranks=2).num_cut_groups == 1
    assert balanced(profiles, num_ranks=2, model=replace(TOKENS, s_per_pack=5000.0)).num_cut_groups == 0


def test_work_that_costs_nothing_is_not_cut():
    free = replace(TOKENS, s_per_token=0.0)
    result = balance([0], profiles=[group_of([(0, 5), (0, 5)])], model=free, rank_num_rows=[4, 2], cut_groups=True)
    assert bounds(result) == [[], [(0, 0, 2)]]


def planned(num_ranks, *, group_size=16):
    """Balance groups, of which a rank has 24 leaves; each leaf shares up to nine tenths with the one before it."""
    rng = np.random.default_rng(0)
    sizes = [group_size] * (16 * num_ranks * 3 // 2 // group_size)
    shared = rng.integers(0, 9, size=sum(sizes)) * 1000
    shared[::group_size] = 0
    lens = shared + rng.integers(9000, 10000, size=sum(sizes))
    shape = ForestShape(np.arange(sum(sizes)), sequence_lens=lens, lcp=shared)
    started_s = time.process_time()
    profiles = WorkProfile.from_shape(shape, path_scored=lens // 2, new_scored=(lens - shared) // 2).split(sizes)
    result = balanced(profiles, num_ranks=num_ranks, model=CostModel.prior())
    return result, time.process_time() - started_s


def test_the_time_of_planning_is_about_linear_in_the_ranks():
    """From 512 ranks to 4,096; comparing a cut with every rank would take 64 times as long."""
    _, few_s = min((planned(512) for _ in range(3)), key=lambda each: each[1])
    result, many_s = planned(4096)
    assert many_s < 8 * 4 * few_s
    assert sum(part.end - part.start for share in result.shares for part in share) == 16 * 6144
    assert result.num_cut_groups > 1000
    # Dealt whole, a rank with two groups takes 1.3 times the mean.
    makespan_s, mean_s = result.makespan_s, sum(result.loads_s) / 4096
    assert makespan_s < 1.1 * mean_s


def test_one_group_of_all_leaves_is_planned_as_fast_as_many_groups():
    """It would take far longer if each of its thousands of cuts were compared with all that are possible."""
    num_ranks = 2048
    _, many_s = min((planned(num_ranks) for _ in range(3)), key=lambda each: each[1])
    result, one_s = planned(num_ranks, group_size=24 * num_ranks)
    assert one_s < 4 * many_s
    assert len(parts_of(result)) > num_ranks / 2


def test_cuts_that_are_not_compared_would_not_have_been_made(monkeypatch):
    few, _ = planned(256, group_size=24 * 256)
    monkeypatch.setattr(cuts, "MAX_CUTS", 1 << 30)
    every, _ = planned(256, group_size=24 * 256)
    assert few == every
    assert every.num_cut_groups == 1


LEAVES = st.lists(st.tuples(st.integers(0, 8), st.integers(1, 9)), min_size=1, max_size=12)


@fuzzed(200)
@given(
    groups=st.lists(LEAVES, min_size=1, max_size=8),
    num_ranks=st.integers(1, 6),
    coefficients=st.tuples(*[st.sampled_from([0.0, 0.01, 1.0, 5.0])] * len(fields(CostModel))),
)
def test_invariants(groups, num_ranks, coefficients):
    profiles = []
    for leaves in groups:
        path, sequences = [], []
        for leaf, (shared, num_new) in enumerate(leaves):
            path = path[:shared] + [leaf] * num_new
            sequences.append(path)
        profiles.append(WorkProfile.from_forest(TokenForest.from_sequences(sequences)))
    model = CostModel(*coefficients)
    whole = balanced(profiles, num_ranks=num_ranks, model=model, cut_groups=False)
    result = balanced(profiles, num_ranks=num_ranks, model=model)

    parts = parts_of(result)
    assert parts_of(whole) == [(g, 0, profile.num_leaves) for g, profile in enumerate(profiles)]
    for group, profile in enumerate(profiles):
        own = [(start, end) for other, start, end in parts if other == group]
        leaves = np.concatenate([np.arange(start, end) for start, end in own])
        assert leaves.tolist() == list(range(profile.num_leaves)), "every leaf once, in ranges"
    for share, load_s in zip(result.shares, result.loads_s, strict=True):
        assert len({part.group for part in share}) == len(share), "one range of a group on a rank"
        costs = [model.predict(profiles[part.group].range_work(part.start, part.end)) for part in share]
        assert load_s == pytest.approx(sum(costs))
    mean_s = sum(whole.loads_s) / num_ranks
    largest_s = max(part.cost_s for share in whole.shares for part in share)
    assert whole.makespan_s <= (mean_s + largest_s) * (1 + 1e-9)
    if result.num_cut_groups:
        assert result.makespan_s < whole.makespan_s - MIN_GAIN * mean_s
    else:
        assert bounds(result) == bounds(whole)
    num_computed = sum(profiles[group].range_work(start, end).num_tokens for group, start, end in parts)
    num_tokens = sum(profile.range_work(0, profile.num_leaves).num_tokens for profile in profiles)
    assert result.num_lost_tokens(profiles) == num_computed - num_tokens
    if coefficients[3] == 0:  # a cut can save nodes: the mean falls, and with it the makespan that it may have
        assert result.makespan_s * sum(whole.loads_s) <= whole.makespan_s * sum(result.loads_s) * (1 + 1e-9)
    assert balanced(profiles, num_ranks=num_ranks, model=model) == result
