"""Groups stay whole, ranks come out even, and the same rows always land in the same place."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from verl_tree.batching import MiniBatchPlan, RowKey, assign_rows, group_rows, parse_row_key


def test_example_of_the_module_docstring() -> None:
    groups = [[0, 1, 2], [3], [4, 5]]
    result = assign_rows(groups, costs=[30, 10, 20], num_ranks=2, groups_per_mini_batch=2)
    # mini-batch 1 has one group; both ranks are idle, rank 1 has sent fewer rows so far
    assert result.plan == MiniBatchPlan(rows=((3, 1), (1, 3)), num_rows=(4, 2))
    assert result.row_order == (0, 1, 2, 6, 3, 4, 5, 7)
    assert result.num_padding == 2


def test_largest_cost_goes_first_to_the_idle_rank() -> None:
    groups = [[0], [1], [2], [3], [4]]
    result = assign_rows(groups, costs=[3, 3, 2, 2, 2], num_ranks=2, groups_per_mini_batch=5)
    # 3 | 3, then 2 to rank 0 (5), 2 to rank 1 (5), 2 to rank 0: its rows are in the order of the groups
    assert result.row_order == (0, 2, 4, 1, 3, 5)
    assert result.plan == MiniBatchPlan(rows=((3,), (3,)), num_rows=(5,))


def test_one_rank_needs_no_padding() -> None:
    result = assign_rows([[0, 1], [2], [3, 4, 5]], costs=[1, 1, 1], num_ranks=1, groups_per_mini_batch=2)
    assert result.row_order == (0, 1, 2, 3, 4, 5)
    assert result.plan == MiniBatchPlan(rows=((3, 3),), num_rows=(3, 3))
    assert result.num_padding == 0


def test_a_single_leaf_on_many_ranks() -> None:
    result = assign_rows([[0]], costs=[7], num_ranks=4, groups_per_mini_batch=8)
    assert result.row_order == (0, 1, 2, 3)
    assert result.plan == MiniBatchPlan(rows=((1,), (1,), (1,), (1,)), num_rows=(1,))


def test_fewer_groups_than_a_mini_batch_is_one_optimiser_step() -> None:
    result = assign_rows([[0, 1], [2]], costs=[2, 1], num_ranks=2, groups_per_mini_batch=8)
    assert result.plan.num_mini_batches == 1
    assert result.plan.num_rows == (3,)


def test_shuffle_draws_other_mini_batches_and_repeats_with_its_seed() -> None:
    groups = [[row] for row in range(20)]
    ordered, first, again, second = (
        assign_rows(groups, costs=[1] * 20, num_ranks=1, groups_per_mini_batch=5, shuffle_seed=seed).row_order
        for seed in (None, (42, 1), (42, 1), (42, 2))
    )
    assert ordered == tuple(range(20))
    assert first == again
    assert len({ordered, first, second}) == 3


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    group_sizes=st.lists(st.integers(1, 7), min_size=1, max_size=24),
    num_ranks=st.integers(1, 5),
    groups_per_mini_batch=st.integers(1, 9),
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
)
def test_invariants(
    group_sizes: list[int], num_ranks: int, groups_per_mini_batch: int, seed: int, shuffle: bool
) -> None:
    rng = random.Random(seed)
    rows = list(range(sum(group_sizes)))
    rng.shuffle(rows)
    remaining = iter(rows)
    groups = [[next(remaining) for _ in range(size)] for size in group_sizes]
    costs = [rng.randint(1, 100) for _ in groups]
    result = assign_rows(
        groups,
        costs=costs,
        num_ranks=num_ranks,
        groups_per_mini_batch=groups_per_mini_batch,
        shuffle_seed=(seed,) if shuffle else None,
    )
    plan = result.plan
    assert sorted(result.row_order) == list(range(len(rows) + result.num_padding))
    assert len(plan.rows) == num_ranks
    assert {sum(rank_rows) for rank_rows in plan.rows} == {len(result.row_order) // num_ranks}
    assert min(min(rank_rows) for rank_rows in plan.rows) >= 1
    assert plan.num_mini_batches == -(-len(groups) // groups_per_mini_batch)

    group_of = {row: index for index, group in enumerate(groups) for row in group}
    groups_of_mini_batch: list[set[int]] = [set() for _ in plan.num_rows]
    loads = [[0] * num_ranks for _ in plan.num_rows]
    position = 0
    for rank, rank_rows in enumerate(plan.rows):
        for mini_batch, num_rows in enumerate(rank_rows):
            cell = result.row_order[position : position + num_rows]
            position += num_rows
            real = [row for row in cell if row < len(rows)]
            assert list(cell[: len(real)]) == real, "padding comes last"
            members = list(dict.fromkeys(group_of[row] for row in real))
            assert real == [row for group in members for row in groups[group]], "whole groups, in their order"
            groups_of_mini_batch[mini_batch].update(members)
            loads[mini_batch][rank] = sum(costs[group] for group in members)
    for mini_batch, members in enumerate(groups_of_mini_batch):
        assert plan.num_rows[mini_batch] == sum(len(groups[group]) for group in members)
        if not shuffle:
            start = mini_batch * groups_per_mini_batch
            assert members == set(range(start, min(start + groups_per_mini_batch, len(groups))))
        largest = max(costs[group] for group in members)
        assert max(loads[mini_batch]) <= sum(loads[mini_batch]) / num_ranks + largest


def test_nothing_to_train_on_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to train on"):
        assign_rows([], costs=[], num_ranks=2, groups_per_mini_batch=2)
    with pytest.raises(ValueError, match="ppo_mini_batch_size=0"):
        assign_rows([[0]], costs=[1], num_ranks=2, groups_per_mini_batch=0)


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
    with pytest.raises(ValueError, match="TreePPOTrainerSync"):
        MiniBatchPlan.from_batch(TensorDict({"input_ids": rows}, batch_size=3))


def test_lists_arrive_as_the_tuples_of_the_plan() -> None:
    plan = MiniBatchPlan.from_batch({"mini_batch_rows": [[2, 1], [1, 2]], "mini_batch_num_rows": [3, 2]})
    assert plan == MiniBatchPlan(rows=((2, 1), (1, 2)), num_rows=(3, 2))
