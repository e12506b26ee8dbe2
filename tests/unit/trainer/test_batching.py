"""Groups stay in their mini-batch, ranks come out even, and the same rows always land in the same place."""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from verl_tree.cost.model import CostModel, WorkProfile
from verl_tree.trainer.row_keys import RowKey, group_rows, number_sessions, parse_row_key
from verl_tree.trainer.rows.batching import MiniBatchPlan, RowAssignment, assign_rows
from verl_tree.tree import TokenForest

# One unit per tree token, so that expected times are counted by hand.
TOKENS = replace(CostModel.prior(), s_per_pair=0.0)


def profile_of(sequences: Sequence[Sequence[int]]) -> WorkProfile:
    return WorkProfile.from_forest(TokenForest.from_sequences(sequences))


def duplicates(num_rows: int, num_tokens: int) -> WorkProfile:
    """Profile a group that costs `num_tokens` and is never worth a cut: all its rows are the same."""
    return profile_of([[0] * num_tokens] * num_rows)


def cells_of(result: RowAssignment) -> list[list[list[int]]]:
    """Return the rows of every (rank, mini-batch), padding included."""
    rows = iter(result.row_order)
    return [[[next(rows) for _ in range(num_rows)] for num_rows in rank_rows] for rank_rows in result.plan.rows]


def imbalance(result: RowAssignment) -> float:
    """Divide the predicted time by that of perfectly even ranks, at least 1: mini-batches wait for the slowest rank."""
    mini_batches = list(zip(*result.predicted_s, strict=True))
    mean_s = sum(sum(ranks) / len(ranks) for ranks in mini_batches)
    return sum(max(ranks) for ranks in mini_batches) / mean_s if mean_s else 1.0


def test_example_of_the_module_docstring() -> None:
    groups = [[0, 1, 2], [3], [4, 5]]
    profiles = [duplicates(3, 30), duplicates(1, 10), duplicates(2, 20)]
    result = assign_rows(groups, profiles=profiles, model=TOKENS, num_ranks=2, groups_per_mini_batch=2)
    # mini-batch 1 has one group; both ranks are idle, rank 1 has sent fewer rows so far
    assert result.plan == MiniBatchPlan(rows=((3, 1), (1, 3)), num_rows=(4, 2))
    assert result.row_order == (0, 1, 2, 6, 3, 4, 5, 7)
    assert result.num_padding == 2
    assert result.predicted_s == ((30, 0), (10, 20))
    assert imbalance(result) == pytest.approx((30 + 20) / (20 + 10))
    assert (result.num_cut_groups, result.num_lost_tokens) == (0, 0)

    profiles[2] = profile_of([[1] * 10, [2] * 10])
    result = assign_rows(groups, profiles=profiles, model=TOKENS, num_ranks=2, groups_per_mini_batch=2)
    # the idle rank takes a row of C; rank 0 still has one row more, so rank 1 is padded
    assert cells_of(result) == [[[0, 1, 2], [4]], [[3], [5, 6, 7]]]
    assert result.plan.num_rows == (4, 2)
    assert result.predicted_s == ((30, 10), (10, 10))
    assert (result.num_cut_groups, result.num_lost_tokens) == (1, 0)


def test_a_big_group_is_cut_where_it_shares_least_and_its_rows_keep_their_order() -> None:
    """Rows 0 and 2 share 9 of 10 tokens, so do rows 1 and 3; across they share 2. Row 4 is tiny."""
    first, second = [1, 1] + [2] * 7, [1, 1] + [3] * 7
    big = profile_of([[*first, 4], [*second, 4], [*first, 5], [*second, 5]])
    assert big.order.tolist() == [0, 2, 1, 3]
    groups, profiles = [[0, 1, 2, 3], [4]], [big, profile_of([[9]])]
    result = assign_rows(groups, profiles=profiles, model=TOKENS, num_ranks=2, groups_per_mini_batch=2)
    assert cells_of(result) == [[[1, 3, 5]], [[0, 2, 4]]]
    assert result.predicted_s == ((11,), (12,))
    assert (result.num_cut_groups, result.num_lost_tokens) == (1, 2)
    assert result.plan.num_rows == (5,), "one optimiser step, whatever was cut"

    whole = assign_rows(groups, profiles=profiles, model=TOKENS, num_ranks=2, groups_per_mini_batch=2, cut_groups=False)
    assert whole.predicted_s == ((20,), (1,))
    assert imbalance(whole) == pytest.approx(20 / 10.5)
    assert (whole.num_cut_groups, whole.num_lost_tokens) == (0, 0)


def test_one_rank_needs_no_padding() -> None:
    profiles = [duplicates(2, 1), duplicates(1, 1), duplicates(3, 1)]
    result = assign_rows(
        [[0, 1], [2], [3, 4, 5]], profiles=profiles, model=TOKENS, num_ranks=1, groups_per_mini_batch=2
    )
    assert result.row_order == (0, 1, 2, 3, 4, 5)
    assert result.plan == MiniBatchPlan(rows=((3, 3),), num_rows=(3, 3))
    assert result.num_padding == 0
    assert imbalance(result) == 1


def test_a_single_leaf_on_many_ranks() -> None:
    result = assign_rows([[0]], profiles=[duplicates(1, 7)], model=TOKENS, num_ranks=4, groups_per_mini_batch=8)
    assert result.row_order == (0, 1, 2, 3)
    assert result.plan == MiniBatchPlan(rows=((1,), (1,), (1,), (1,)), num_rows=(1,))
    assert result.predicted_s == ((7,), (0,), (0,), (0,))
    assert imbalance(result) == 4


def test_a_group_is_cut_for_ranks_that_would_idle() -> None:
    sequences = [[row] * 10 for row in range(6)]
    result = assign_rows(
        [list(range(6))], profiles=[profile_of(sequences)], model=TOKENS, num_ranks=3, groups_per_mini_batch=1
    )
    assert sorted(cell for (cell,) in cells_of(result)) == [[0, 1], [2, 3], [4, 5]]
    assert (result.num_cut_groups, result.num_lost_tokens, imbalance(result)) == (1, 0, 1)


def test_shuffle_draws_other_mini_batches_and_repeats_with_its_seed() -> None:
    groups = [[row] for row in range(20)]
    ordered, first, again, second = (
        cells_of(
            assign_rows(
                groups,
                profiles=[duplicates(1, 1)] * 20,
                model=TOKENS,
                num_ranks=1,
                groups_per_mini_batch=5,
                shuffle_seed=seed,
            )
        )[0]
        for seed in (None, (42, 1), (42, 1), (42, 2))
    )
    assert ordered == [list(range(start, start + 5)) for start in range(0, 20, 5)]
    assert first == again
    assert first != second
    assert sorted(row for cell in first for row in cell) == list(range(20))
    assert first != ordered


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    group_sizes=st.lists(st.integers(1, 7), min_size=1, max_size=24),
    num_ranks=st.integers(1, 5),
    groups_per_mini_batch=st.integers(1, 9),
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
    cut_groups=st.booleans(),
)
def test_invariants(
    group_sizes: list[int], num_ranks: int, groups_per_mini_batch: int, seed: int, shuffle: bool, cut_groups: bool
) -> None:
    rng = random.Random(seed)
    rows = list(range(sum(group_sizes)))
    rng.shuffle(rows)
    remaining = iter(rows)
    groups = [[next(remaining) for _ in range(size)] for size in group_sizes]
    profiles = [profile_of([[rng.randint(0, 1) for _ in range(rng.randint(1, 30))] for _ in group]) for group in groups]
    arguments = {
        "profiles": profiles,
        "model": CostModel.prior(),
        "num_ranks": num_ranks,
        "groups_per_mini_batch": groups_per_mini_batch,
        "shuffle_seed": (seed,) if shuffle else None,
    }
    result = assign_rows(groups, cut_groups=cut_groups, **arguments)
    plan = result.plan
    assert sorted(result.row_order) == list(range(len(rows) + result.num_padding))
    assert len(plan.rows) == num_ranks
    assert {sum(rank_rows) for rank_rows in plan.rows} == {len(result.row_order) // num_ranks}
    assert min(min(rank_rows) for rank_rows in plan.rows) >= 1
    assert len(plan.num_rows) == -(-len(groups) // groups_per_mini_batch)

    group_of = {row: index for index, group in enumerate(groups) for row in group}
    groups_of_mini_batch: list[set[int]] = [set() for _ in plan.num_rows]
    ranks_of_group: dict[int, int] = dict.fromkeys(range(len(groups)), 0)
    num_computed = 0
    for rank, rank_cells in enumerate(cells_of(result)):
        for mini_batch, cell in enumerate(rank_cells):
            real = [row for row in cell if row < len(rows)]
            assert cell[: len(real)] == real, "padding comes last"
            members = list(dict.fromkeys(group_of[row] for row in real))
            groups_of_mini_batch[mini_batch].update(members)
            cost_s = 0.0
            for group in members:
                ranks_of_group[group] += 1
                own = [row for row in real if group_of[row] == group]
                assert own == [row for row in groups[group] if row in own], "in the order of the group"
                ranks = np.sort(np.argsort(profiles[group].order)[[groups[group].index(row) for row in own]])
                assert ranks.tolist() == list(range(ranks[0], ranks[0] + len(own))), "one range of the DFS order"
                work = profiles[group].range_work(int(ranks[0]), int(ranks[-1]) + 1)
                num_computed += work.num_tokens
                cost_s += arguments["model"].predict(work)
            assert real == [row for group in members for row in real if group_of[row] == group], "groups in one piece"
            assert result.predicted_s[rank][mini_batch] == pytest.approx(cost_s)
    for mini_batch, members in enumerate(groups_of_mini_batch):
        assert plan.num_rows[mini_batch] == sum(len(groups[group]) for group in members)
        if not shuffle:
            start = mini_batch * groups_per_mini_batch
            assert members == set(range(start, min(start + groups_per_mini_batch, len(groups))))
    assert sum(map(len, groups_of_mini_batch)) == len(groups), "a group is in one mini-batch"

    assert result.num_cut_groups == sum(num_ranks > 1 for num_ranks in ranks_of_group.values())
    assert cut_groups or result.num_cut_groups == 0
    num_tokens = sum(profile.range_work(0, profile.num_leaves).num_tokens for profile in profiles)
    assert result.num_lost_tokens == num_computed - num_tokens
    whole = assign_rows(groups, cut_groups=False, **arguments)
    assert 1 <= imbalance(result) * (1 + 1e-9) <= imbalance(whole) * (1 + 2e-9)
    for cut_s, whole_s in zip(zip(*result.predicted_s, strict=True), zip(*whole.predicted_s, strict=True), strict=True):
        assert max(cut_s) <= max(whole_s) * (1 + 1e-9)
    assert assign_rows(groups, cut_groups=cut_groups, **arguments) == result


def test_nothing_to_train_on_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to train on"):
        assign_rows([], profiles=[], model=TOKENS, num_ranks=2, groups_per_mini_batch=2)
    with pytest.raises(ValueError, match="ppo_mini_batch_size=0"):
        assign_rows([[0]], profiles=[duplicates(1, 1)], model=TOKENS, num_ranks=2, groups_per_mini_batch=0)


def test_rows_are_grouped_by_uid_session_and_leaf_whatever_order_they_arrive_in() -> None:
    keys = ["b_0_0", "a_10_0", "a_2_1", "b_0_2", "a_2_0", "b_0_1"]
    assert group_rows(keys) == [[4, 2, 1], [0, 5, 3]]  # session 10 after session 2: numbers, not text
    assert group_rows([]) == []


def test_row_keys() -> None:
    assert parse_row_key("000000001-ab-cd_3_12") == RowKey("000000001-ab-cd", 3, 12)
    for key in ("ab", "ab_1", "ab_x_0", "ab_0_-1"):
        with pytest.raises(ValueError, match="uid_session_leaf"):
            parse_row_key(key)


def test_plan_survives_the_tensordict_of_a_worker() -> None:
    tu = pytest.importorskip("verl.utils.tensordict_utils")
    rows = torch.nested.as_nested_tensor([torch.arange(3), torch.arange(2), torch.arange(4)], layout=torch.jagged)
    data = TensorDict({"input_ids": rows}, batch_size=3)
    plan = MiniBatchPlan(rows=((2, 1), (1, 2)), num_rows=(3, 2))
    for key, value in plan.to_extra_info().items():  # what verl's bridge does with extra_info
        tu.assign_non_tensor_data(data, key, value)
    assert MiniBatchPlan.from_batch(data) == plan
    assert MiniBatchPlan.from_batch(tu.index_select_tensor_dict(data, [0, 2])) == plan
    with pytest.raises(ValueError, match=r"verl_tree\.main_ppo"):
        MiniBatchPlan.from_batch(TensorDict({"input_ids": rows}, batch_size=3))


def test_the_sessions_of_rows_follow_their_order_and_padding_has_none() -> None:
    keys = ["v_0_0", "u_1_0", "u_0_0", "u_0_1"]
    assert number_sessions(keys) == [0, 1, 2, 2]
    plan = MiniBatchPlan(rows=((2, 1), (1, 2)), num_rows=(3, 1)).with_sessions(
        number_sessions(keys), row_order=[2, 3, 0, 1, 4, 5]
    )
    assert plan.sessions == ((2, 2, 0), (1, -1, -1))
    assert MiniBatchPlan.from_batch(plan.to_extra_info()) == plan
    data = TensorDict({"rows": torch.arange(3)}, batch_size=3)
    for key, value in plan.to_extra_info().items():
        pytest.importorskip("verl.utils.tensordict_utils").assign_non_tensor_data(data, key, value)
    assert MiniBatchPlan.from_batch(data) == plan


def test_lists_arrive_as_the_tuples_of_the_plan() -> None:
    plan = MiniBatchPlan.from_batch({"mini_batch_rows": [[2, 1], [1, 2]], "mini_batch_num_rows": [3, 2]})
    assert plan == MiniBatchPlan(rows=((2, 1), (1, 2)), num_rows=(3, 2))
