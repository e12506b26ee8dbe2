"""Work is what a trie counts, and a fit finds the coefficients that made the times."""

import math
import subprocess
import sys
from dataclasses import astuple, replace

import numpy as np
import pytest
from forest_cases import DEEP, forests
from fuzzing import fuzzed
from hypothesis import example, given
from hypothesis import strategies as st

from verl_tree.cost.fit import MIN_MEASUREMENTS, CostFitter
from verl_tree.cost.model import CostModel, Work, WorkProfile, runs_faster_flat
from verl_tree.tree import TokenForest

# The example of TokenForest: order 2 0 3 1 4, lens 2 4 4 3 1, lcp 0 2 4 2 0.
SMALL = [[1, 2, 3, 4], [1, 2, 5], [1, 2], [1, 2, 3, 4], [7]]
# Seconds of a mid-sized model; the parts of a pack of 8000 tokens: 80, 40, 20, 10 and 10 ms. A spine of 4000 tokens and
# a context of 16000 add 20 and 8 ms, images of 4000 features 12 ms.
TRUTH = CostModel(
    s_per_token=1e-5,
    s_per_pair=2e-9,
    s_per_scored=5e-6,
    s_per_node=1e-4,
    s_per_pack=1e-2,
    s_per_spine=5e-6,
    s_per_context=5e-7,
    s_per_feature=3e-6,
)
# The same with the prior's proportions: a spine token and a feature are a third of a token, a context token a 300th.
THIRDS = replace(TRUTH, s_per_spine=1e-5 / 3, s_per_context=1e-5 / 300, s_per_feature=1e-5 / 3)


def profile_of(sequences, trained=None):
    return WorkProfile.from_forest(TokenForest.from_sequences(sequences), trained=trained)


def prefixes_of(sequences):
    return {tuple(sequence[: end + 1]) for sequence in sequences for end in range(len(sequence))}


def random_works(rng, num_works):
    """Packs of unlike shape: sizes over two decades, path lengths and fragmentation drawn apart from them."""
    num_tokens = np.exp(rng.uniform(np.log(200), np.log(20_000), num_works)).astype(int)
    path_lens = rng.uniform(0.1, 1.0, num_works) * num_tokens
    num_scored = rng.uniform(0.05, 0.9, num_works) * num_tokens
    num_nodes = rng.integers(1, 300, num_works)
    return [
        Work(int(tokens), int(tokens * path_len / 2), int(scored), int(nodes), 1)
        for tokens, path_len, scored, nodes in zip(num_tokens, path_lens, num_scored, num_nodes, strict=True)
    ]


def relayed(rng, works):
    """Turn packs into trees that are relayed: several sections, a spine, a context a few times as long."""
    num_spine = [int(work.num_tokens * rng.uniform(0.1, 0.8)) for work in works]
    num_context = [int(spine * rng.uniform(1, 8)) for spine in num_spine]
    return [
        replace(work, num_packs=int(rng.integers(2, 9)), num_spine=spine, num_context=context)
        for work, spine, context in zip(works, num_spine, num_context, strict=True)
    ]


def showing(rng, works):
    """Put images into packs or trees: up to nine in ten of their tokens, or none in every third."""
    shares = rng.uniform(0.1, 0.9, len(works)) * (np.arange(len(works)) % 3 > 0)
    return [replace(work, num_features=int(work.num_tokens * share)) for work, share in zip(works, shares, strict=True)]


def fitted(works, times_s):
    fitter = CostFitter()
    for work, time_s in zip(works, times_s, strict=True):
        fitter.add(work, seconds=time_s)
    return fitter.fit(), fitter.relative_error


def prediction_errors(model, works):
    return np.array([abs(model.predict(work) / TRUTH.predict(work) - 1) for work in works])


def test_work_adds_up_from_nothing():
    works = [Work(5, 15, 4, 2, 1, num_features=2), Work(9, 45, 0, 1, 3, num_spine=6, num_context=9, num_features=3)]
    assert sum(works, Work()) == Work(14, 60, 4, 3, 4, num_spine=6, num_context=9, num_features=5)
    assert set(astuple(Work())) == {0}


def test_ranges_by_hand():
    """Paths 1 2 | 3 4 | 5 and 7: positions + 1 are 1 2, 3 4, 3 and 1; nothing scores a first token."""
    profile = profile_of(SMALL)
    assert profile.order.tolist() == [2, 0, 3, 1, 4]
    assert profile.range_work(0, 5) == Work(6, 14, 4, 4, 1)
    assert profile.range_work(0, 4) == Work(5, 13, 4, 3, 1)
    assert profile.range_work(1, 3) == Work(4, 10, 3, 1, 1)  # the duplicate costs nothing
    assert profile.range_work(3, 5) == Work(4, 7, 2, 2, 1)  # 1 2 5 pays its whole path
    assert profile.range_work(4, 5) == Work(1, 1, 0, 1, 1)
    assert profile.lcp.tolist() == [0, 2, 4, 2, 0], "tokens that a cut before a leaf computes twice"


def test_a_range_of_its_own_misses_the_branch_point_of_an_outside_leaf():
    """1 2 3 4 and 1 2 5 are the three nodes 1 2, 3 4 and 5, but the whole tree has its cut after 1 2 from leaf 1 2."""
    profile = profile_of(SMALL)
    assert profile.range_work(1, 4) == Work(5, 13, 4, 2, 1)
    assert TokenForest.from_sequences([SMALL[0], SMALL[3], SMALL[1]]).num_nodes == 3


def test_trained_tokens_are_counted_where_the_run_is():
    trained = [[0, 0, 1, 1], [1, 1, 1], [0, 0], [1, 1, 1, 1], [1]]
    profile = profile_of(SMALL, trained=[np.array(mask, dtype=bool) for mask in trained])
    # In DFS order: nothing of 1 2; 3 4; the duplicate has no run; 5. Token 2 is trained by 3 and 1 only: missed.
    assert profile.range_work(0, 5).num_scored == 3
    assert profile.range_work(2, 5).num_scored == 4  # 2 3 4 of the duplicate's path, then 5; first tokens never
    alone = [profile.range_work(rank, rank + 1).num_scored for rank in range(5)]
    assert alone == [0, 2, 3, 2, 0]  # the trajectories 2 0 3 1 4


@forests(data=st.data())
@example(sequences=DEEP, data=None)
def test_every_range_counts_what_its_trie_counts(sequences, data):
    forest = TokenForest.from_sequences(sequences)
    profile = WorkProfile.from_forest(forest)
    assert profile.range_work(0, len(sequences)).num_tokens == forest.num_tokens
    assert profile.range_work(0, len(sequences)).num_nodes == forest.num_nodes
    ranges = [(start, end) for start in range(len(sequences)) for end in range(start + 1, len(sequences) + 1)]
    if data is not None:
        ranges = [data.draw(st.sampled_from(ranges))]
    for start, end in ranges:
        leaves = [sequences[index] for index in profile.order[start:end]]
        prefixes = prefixes_of(leaves)
        work = profile.range_work(start, end)
        assert work.num_tokens == len(prefixes)
        assert work.num_visible_pairs == sum(map(len, prefixes))
        assert work.num_scored == sum(len(prefix) > 1 for prefix in prefixes)
        assert work.num_packs == 1
        num_nodes = TokenForest.from_sequences(leaves).num_nodes
        num_branch_points = len(prefixes_of([leaves[0]]))
        assert num_nodes - num_branch_points < work.num_nodes <= num_nodes
        if start > 0:
            lost = profile.range_work(0, start).num_tokens + profile.range_work(start, len(sequences)).num_tokens
            assert profile.lcp[start] == lost - forest.num_tokens


@forests()
def test_flat_work_is_that_of_the_trajectories_one_by_one(sequences):
    profile = profile_of(sequences)
    alone = [profile.range_work(rank, rank + 1) for rank in range(len(sequences))]
    lens = [len(sequences[index]) for index in profile.order]
    assert alone == [Work(length, length * (length + 1) // 2, length - 1, 1, 1) for length in lens]
    total = sum(alone, Work())
    flat = Work.flat(np.array(lens), num_scored=total.num_scored, num_packs=len(lens))
    assert flat == total


def test_many_ranges_at_once_are_the_ranges_one_by_one():
    profile = profile_of(DEEP)
    starts, ends = np.triu_indices(len(DEEP))
    counts = profile.range_counts(starts, ends + 1)
    expected = [profile.range_work(start, end + 1) for start, end in zip(starts, ends, strict=True)]
    assert [Work(*row) for row in counts.tolist()] == expected
    assert TRUTH.predict_counts(counts).tolist() == pytest.approx([TRUTH.predict(work) for work in expected])


def test_masks_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="one mask per trajectory"):
        profile_of([[1, 2]], trained=[np.ones(3, dtype=bool)])
    with pytest.raises(ValueError, match="one mask per trajectory"):
        profile_of([[1, 2], [1]], trained=[np.ones(2, dtype=bool)])


def test_an_empty_forest_has_no_work():
    profile = profile_of([])
    assert profile.num_leaves == 0
    assert Work.flat(np.array([], dtype=np.int64), num_scored=0, num_packs=0) == Work()


def test_prediction_by_hand():
    model = CostModel(
        s_per_token=2.0,
        s_per_pair=0.5,
        s_per_scored=3.0,
        s_per_node=10.0,
        s_per_pack=100.0,
        s_per_spine=0.25,
        s_per_context=0.125,
        s_per_feature=1.5,
    )
    assert model.predict(Work(7, 4, 5, 2, 1)) == 14 + 2 + 15 + 20 + 100
    assert model.predict(Work(7, 4, 5, 2, 3, num_spine=4, num_context=16)) == 14 + 2 + 15 + 20 + 300 + 1 + 2
    assert model.predict(Work(7, 4, 5, 2, 1, num_features=6)) == 14 + 2 + 15 + 20 + 100 + 9
    assert model.predict(Work()) == 0


def test_prior_takes_all_for_a_part_of_a_token():
    """A pair is a 20,000th, a spine token a third, a context token a 300th; scored tokens, nodes and packs are free."""
    assert CostModel.prior().predict(Work(100, 40_000, 90, 3, 1, num_features=60)) == pytest.approx(122)
    assert CostModel.prior().predict(Work(100, 40_000, 90, 3, 1)) == pytest.approx(102)
    assert CostModel.prior().predict(Work(100, 40_000, 90, 3, 4, num_spine=60, num_context=900)) == pytest.approx(125)


def test_metrics_give_the_model_back():
    metrics = TRUTH.as_metrics("tree/cost")
    assert metrics["tree/cost/s_per_pair"] == 2e-9
    assert metrics["tree/cost/s_per_segment"] == TRUTH.s_per_node
    assert CostModel.from_metrics({"loss": 1.0, **metrics}, prefix="tree/cost") == TRUTH
    assert CostModel.from_metrics(TRUTH.as_metrics()) == TRUTH
    with pytest.raises(ValueError, match="cost_model/s_per_token"):
        CostModel.from_metrics(metrics)


@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf])
def test_coefficients_are_times(value):
    with pytest.raises(ValueError, match=r"s_per_pair=.* is not a time"):
        replace(CostModel.prior(), s_per_pair=value)


def test_exact_times_give_exact_predictions():
    rng = np.random.default_rng(0)
    works = showing(rng, [*random_works(rng, 20), *relayed(rng, random_works(rng, 20))])
    model, error = fitted(works, [TRUTH.predict(work) for work in works])
    assert prediction_errors(model, showing(rng, relayed(rng, random_works(rng, 200)))).max() < 1e-6
    assert error < 1e-6
    assert astuple(model) == pytest.approx(astuple(TRUTH), rel=1e-4)


def test_noise_averages_out_and_outliers_are_left_out():
    """5 % noise on 400 packs; the first 20 are 10 times slower, as while kernels compile."""
    rng = np.random.default_rng(1)
    works = random_works(rng, 400)
    times_s = np.array([TRUTH.predict(work) for work in works]) * rng.normal(1.0, 0.05, len(works))
    times_s[:20] *= 10
    model, error = fitted(works, times_s.tolist())
    errors = prediction_errors(model, random_works(rng, 200))
    assert np.median(errors) < 0.01
    assert errors.max() < 0.05
    assert 0.02 < error < 0.05  # the median of a normal error of 5 % is 3.4 %


def test_one_slow_first_pack_does_not_bend_the_fit():
    rng = np.random.default_rng(2)
    works = random_works(rng, 30)
    times_s = [TRUTH.predict(work) for work in works]
    model, _ = fitted(works, [times_s[0] * 50, *times_s[1:]])
    assert prediction_errors(model, works).max() < 1e-6


@fuzzed()
@given(seed=st.integers(0, 10_000), num_works=st.integers(MIN_MEASUREMENTS, 30))
def test_coefficients_are_never_negative(seed, num_works):
    """Times that have nothing to do with the work: plain least squares goes negative here."""
    rng = np.random.default_rng(seed)
    model, error = fitted(random_works(rng, num_works), rng.uniform(0.01, 1.0, num_works).tolist())
    assert min(astuple(model)) >= 0
    assert error >= 0


def test_packs_of_one_shape_are_still_predicted():
    """Not one coefficient can be told from another, and a column of zeros holds no information."""
    works = [Work(1000, 400_000, 0, 7, 1)] * MIN_MEASUREMENTS
    model, _ = fitted(works, [0.25] * MIN_MEASUREMENTS)
    assert model.predict(works[0]) == pytest.approx(0.25)
    assert model.s_per_scored == 0


@fuzzed()
@given(seed=st.integers(0, 10_000), num_works=st.integers(MIN_MEASUREMENTS, 30), noise=st.sampled_from([0.05, 0.2]))
def test_packs_that_are_nearly_alike_do_not_seem_free_to_cut(seed, num_works, noise):
    """Sizes that differ by less than the noise do not tell tokens from packs: half a pack still costs about half."""
    rng = np.random.default_rng(seed)
    works = [
        Work(int(tokens), int(tokens * tokens / 8), int(tokens * 0.6), int(tokens / 50), 1)
        for tokens in rng.normal(1000, 10, num_works)
    ]
    times_s = np.maximum(0.1 * rng.normal(1.0, noise, num_works), 0.01)
    model, _ = fitted(works, times_s.tolist())
    assert model.predict(Work(500, 500 * 500 // 8, 300, 10, 1)) < 0.7 * model.predict(Work(1000, 125_000, 600, 20, 1))


def test_overhead_is_still_found():
    """A pack costs 50 ms and its tokens 10 ms or so: the pull towards tokens must give way to 64 measurements."""
    rng = np.random.default_rng(5)
    works = [
        Work(int(tokens), int(tokens * 100), int(tokens * 0.6), 20, 1) for tokens in rng.uniform(300, 1500, 64).tolist()
    ]
    truth = replace(TRUTH, s_per_pair=0.0, s_per_scored=0.0, s_per_node=0.0, s_per_pack=5e-2)
    times_s = [truth.predict(work) * rng.normal(1.0, 0.05) for work in works]
    model, _ = fitted(works, times_s)
    empty = model.predict(Work(0, 0, 0, 20, 1))
    assert empty == pytest.approx(5e-2, rel=0.1)


def test_packs_alone_do_not_make_the_relay_free():
    """No pack has a spine or a context: a spine token costs a third of a token's 10 us, a context token a 300th."""
    works = random_works(np.random.default_rng(6), 40)
    model, _ = fitted(works, [TRUTH.predict(work) for work in works])
    assert model.s_per_spine == pytest.approx(1e-5 / 3, rel=1e-4)
    assert model.s_per_context == pytest.approx(1e-5 / 300, rel=1e-4)


def test_packs_with_and_without_images_are_predicted_and_text_tokens_alone_would_be_wrong():
    """A tower that costs three tokens a feature, 5 % noise; without features, a token pays the mean of both kinds."""
    rng = np.random.default_rng(10)
    truth = replace(TRUTH, s_per_feature=3e-5)
    works = showing(rng, random_works(rng, 120))
    times_s = [truth.predict(work) * rng.normal(1.0, 0.05) for work in works]
    new = showing(rng, random_works(rng, 90))
    model, _ = fitted(works, times_s)
    blind, _ = fitted([replace(work, num_features=0) for work in works], times_s)
    wanted = np.array([truth.predict(work) for work in new])
    errors = abs(np.array([model.predict(work) for work in new]) / wanted - 1)
    of_blind = abs(np.array([blind.predict(replace(work, num_features=0)) for work in new]) / wanted - 1)
    has_images = np.array([work.num_features > 0 for work in new])
    for kind in (has_images, ~has_images):
        assert np.median(errors[kind]) < 0.02
        assert errors[kind].max() < 0.1
        assert np.median(of_blind[kind]) > 0.1


def test_packs_of_text_alone_do_not_make_images_free():
    works = random_works(np.random.default_rng(11), 40)
    model, _ = fitted(works, [TRUTH.predict(work) for work in works])
    assert model.s_per_feature == pytest.approx(1e-5 / 3, rel=1e-4)


def test_one_relayed_tree_does_not_price_the_spine():
    """It is 10 times slower, as while kernels compile. If the spine were taken for that, no tree would be relayed."""
    rng = np.random.default_rng(7)
    packs, trees = random_works(rng, 40), relayed(rng, random_works(rng, 1))
    model, _ = fitted(packs + trees, [TRUTH.predict(work) for work in packs] + [10 * TRUTH.predict(trees[0])])
    assert astuple(model) == pytest.approx(astuple(THIRDS), rel=1e-4)


def test_few_relayed_trees_count_as_more_tokens():
    """Too few for the spine, most of what was measured: their spine counts as a third of as many tokens."""
    rng = np.random.default_rng(8)
    works = [*random_works(rng, 3), *relayed(rng, random_works(rng, MIN_MEASUREMENTS - 1))]
    model, error = fitted(works, [THIRDS.predict(work) for work in works])
    assert astuple(model) == pytest.approx(astuple(THIRDS), rel=1e-4)
    assert error < 1e-6


def test_a_spine_in_proportion_to_the_tokens_costs_a_third_of_them():
    """In every tree the spine is half of the tokens and the context twice as many: the times do not tell them apart."""
    works = [
        replace(work, num_spine=work.num_tokens, num_tokens=2 * work.num_tokens, num_context=4 * work.num_tokens)
        for work in random_works(np.random.default_rng(9), 40)
    ]
    model, _ = fitted(works, [THIRDS.predict(work) for work in works])
    assert astuple(model) == pytest.approx(astuple(THIRDS), rel=1e-4)


@fuzzed()
@given(seed=st.integers(0, 10_000), num_works=st.integers(MIN_MEASUREMENTS, 30), noise=st.sampled_from([0.05, 0.2]))
def test_relayed_trees_that_are_nearly_alike_do_not_make_packs_free(seed, num_works, noise):
    """Spine and context in proportion to the tokens: a pack of the same tokens costs a little less, not nothing."""
    rng = np.random.default_rng(seed)
    works = [
        Work(int(tokens), int(tokens * tokens / 8), int(tokens * 0.6), 20, 4, int(tokens * 0.3), int(tokens * 0.9))
        for tokens in rng.normal(1000, 10, num_works)
    ]
    times_s = np.maximum(0.1 * rng.normal(1.0, noise, num_works), 0.01)
    model, _ = fitted(works, times_s.tolist())
    assert model.predict(Work(1000, 125_000, 600, 20, 4)) > 0.8 * model.predict(
        Work(1000, 125_000, 600, 20, 4, num_spine=300, num_context=900)
    )


def test_too_few_measurements_leave_the_prior():
    works = random_works(np.random.default_rng(3), MIN_MEASUREMENTS)
    fitter = CostFitter()
    for work in works[1:]:
        fitter.add(work, seconds=0.1)
    assert fitter.fit() == CostModel.prior()
    assert not fitter.is_fitted
    assert math.isnan(fitter.relative_error)
    assert fitter.metrics(prefix="cost") == {}
    fitter.add(works[0], seconds=0.1)
    assert fitter.fit() == fitter.model != CostModel.prior()
    assert fitter.is_fitted
    assert math.isfinite(fitter.relative_error)


def test_the_window_forgets():
    works = random_works(np.random.default_rng(4), 20)
    fitter = CostFitter(window=20)
    for factor in (3, 1):
        for work in works:
            fitter.add(work, seconds=factor * TRUTH.predict(work))
    assert prediction_errors(fitter.fit(), works).max() < 1e-6


@pytest.mark.parametrize("seconds", [0.0, -0.1, math.nan, math.inf])
def test_only_times_are_measurements(seconds):
    with pytest.raises(ValueError, match=r"seconds=.* is no measured time"):
        CostFitter().add(Work(1, 1, 1, 1, 1), seconds=seconds)


def test_a_fragmented_tree_with_dear_nodes_runs_faster_flat():
    model = replace(CostModel.prior(), s_per_node=5.0)
    tree, flat = Work(100, 0, 0, 20, 1), Work(150, 0, 0, 9, 1)
    assert runs_faster_flat(model, tree=tree, flat=flat)  # 195 < 200
    assert not runs_faster_flat(model, tree=tree, flat=flat + Work(num_nodes=1))  # a tie goes to the tree
    assert not runs_faster_flat(CostModel.prior(), tree=tree, flat=flat)


def test_neither_torch_nor_verl_nor_ray_is_imported():
    code = "import sys, verl_tree.cost.model; print(*{'torch', 'verl', 'ray'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == ""
