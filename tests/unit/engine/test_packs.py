"""Rows of a mini-batch as packs: expected values by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from verl_tree.config import TreeConfig
from verl_tree.cost.model import CostModel, Work
from verl_tree.engine.rows.packs import TreeBatch, split_into_packs
from verl_tree.tree.row_keys import row_keys, value_numbers
from verl_tree.tree.rows import trained_tokens

ROWS = [[5, 6, 7, 8], [1, 1], [5, 6, 9], [5, 6, 7, 8]]
"""A row, a padding row, a sibling, a duplicate."""

TOKENS = np.concatenate(ROWS)
OFFSETS = np.array([0, 4, 6, 9, 13])


def split(
    masks: list[list[int]],
    *,
    capacity: int = 100,
    cost_model: CostModel | None = None,
    values: list | None = None,
    **options,
) -> TreeBatch:
    mask_lens = np.array([len(mask) for mask in masks])
    return split_into_packs(
        TOKENS,
        offsets=OFFSETS,
        trained=trained_tokens(np.concatenate(masks), mask_lens=mask_lens, row_lens=np.diff(OFFSETS)),
        capacity=capacity,
        config=TreeConfig(**options),
        cost_model=CostModel.prior() if cost_model is None else cost_model,
        keys=None if values is None else row_keys(TOKENS, value_numbers(OFFSETS, values=values)),
    )


def test_rows_without_trained_tokens_cost_nothing() -> None:
    batch = split([[1, 1], [0], [1], [0, 1]])
    (micro,) = batch.micro_batches
    assert sorted(micro.rows.tolist()) == [0, 2, 3]
    assert batch.counts.num_packed_tokens == 5
    assert batch.counts.num_flat_tokens == 11
    assert micro.layout.token_ids_T.tolist() == [5, 6, 7, 8, 9]
    # 7 and 8 are trained by row 0, 9 by row 2; nobody trains the prompt.
    assert micro.wanted_T.tolist() == [False, False, True, True, True]


def test_results_find_their_rows() -> None:
    batch = split([[1, 1], [0], [1], [0, 1]], capacity=4, relay="never")
    assert [sorted(micro.rows.tolist()) for micro in batch.micro_batches] == [[0, 3], [2]]
    flat = np.zeros(len(TOKENS), dtype=np.int64)
    for micro in batch.micro_batches:
        flat[micro.flat_index_F.numpy()] = micro.layout.token_ids_T[micro.layout.tree_index_F].numpy()
    assert flat.tolist() == [5, 6, 7, 8, 0, 0, 5, 6, 9, 5, 6, 7, 8]


@pytest.mark.parametrize("shared_tokens", ["sum", "mean", "once"])
def test_no_trained_row_gives_no_pack(shared_tokens: str) -> None:
    batch = split([[0, 0], [0], [0], [0, 0]], shared_tokens=shared_tokens)
    assert batch.micro_batches == ()
    assert batch.counts.num_flat_tokens == 0


@pytest.mark.parametrize("capacity", [100, 4])
def test_shared_tokens_are_weighed_over_all_packs(capacity: int) -> None:
    # Token 8 is trained by the rows 0 and 3, token 7 by row 0 alone.
    masks = [[1, 1], [0], [1], [0, 1]]
    for mode, weight_of_8 in (("mean", [0.5, 0.5]), ("once", [1.0, 0.0])):
        flat = torch.zeros(len(TOKENS))
        for micro in split(masks, shared_tokens=mode, capacity=capacity).micro_batches:
            flat[micro.flat_index_F] = micro.gradient_weight_F
        assert flat[[2, 8]].tolist() == [1.0, 1.0]
        assert flat[[3, 12]].tolist() == weight_of_8


def test_rows_with_different_values_share_nothing() -> None:
    batch = split([[1, 1], [1], [1], [1, 1]], values=[1.0, 1.0, 0.5, 1.0])
    assert batch.counts.num_packed_tokens == 4 + 2 + 3


def test_the_work_of_a_pack() -> None:
    """5 6 7 8 9 at positions 0 1 2 3 2: 1 + 2 + 3 + 4 + 3 pairs; 7, 8, 9 are scored; 5 6, 7 8 and 9 are nodes."""
    (micro,) = split([[1, 1], [0], [1], [0, 1]]).micro_batches
    assert micro.work == Work(num_tokens=5, num_visible_pairs=13, num_scored=3, num_nodes=3, num_packs=1)


def test_packs_run_dearest_first() -> None:
    batch = split([[1, 1], [1], [1], [0, 1]], capacity=5, values=[0, 0, 1, 0])
    # The rows 0 and 3 are one tree of 4 tokens, row 2 one of 3, the padding row one of 2: 4 and 3 + 2.
    assert [micro.work.num_tokens for micro in batch.micro_batches] == [5, 4]


@pytest.mark.parametrize(("capacity", "lens"), [(100, [[4, 3, 4]]), (8, [[4, 4], [3]]), (4, [[4], [4], [3]])])
def test_a_pack_that_runs_flat_shares_nothing_and_keeps_the_capacity(capacity: int, lens: list[list[int]]) -> None:
    batch = split([[1, 1], [0], [1], [0, 1]], capacity=capacity, gate="always")
    rows = [np.diff(OFFSETS)[micro.rows].tolist() for micro in batch.micro_batches]
    assert sorted(sorted(each) for each in rows) == sorted(sorted(each) for each in lens)
    for micro in batch.micro_batches:
        assert micro.layout.num_tokens == micro.layout.num_flat_tokens <= capacity
        assert (micro.layout.parent_T < 0).sum() == len(micro.rows)
        assert micro.work.num_nodes == len(micro.rows)
    flat = np.zeros(len(TOKENS), dtype=np.int64)
    for micro in batch.micro_batches:
        flat[micro.flat_index_F.numpy()] = micro.layout.token_ids_T[micro.layout.tree_index_F].numpy()
    assert flat.tolist() == [5, 6, 7, 8, 0, 0, 5, 6, 9, 5, 6, 7, 8]
    assert batch.counts.num_packed_tokens == 11
    assert batch.counts.num_flat_packs == batch.counts.num_packs == len(lens)


def test_the_gate_opens_where_the_model_says_so() -> None:
    """5 tokens in 3 nodes as a tree, 11 tokens in 3 nodes and one pack flat."""
    masks = [[1, 1], [0], [1], [0, 1]]
    linear = replace(CostModel.prior(), s_per_pair=0.0)
    assert split(masks, cost_model=linear).counts.num_flat_packs == 0
    # Without sharing there are fewer nodes: rows 0 and 2 alone are 5 6 | 7 8 | 9 as a tree and two rows flat.
    masks = [[1, 1], [0], [1], [0, 0]]
    for s_per_node, is_flat in ((1.9, False), (2.1, True)):
        model = replace(linear, s_per_node=s_per_node)
        batch = split(masks, cost_model=model)  # tree: 5 tokens, 3 nodes; flat: 7 tokens, 2 nodes
        assert batch.counts.num_flat_packs == int(is_flat)
        assert batch.counts.num_packed_tokens == (7 if is_flat else 5)
        assert split(masks, cost_model=model, gate="never").counts.num_flat_packs == 0
    assert split(masks).counts.num_flat_packs == 0, "nothing was measured yet"


def test_caps_reach_the_packing() -> None:
    masks = [[1, 1], [0], [1], [1, 1]]
    assert split(masks).counts.num_packs == 1
    assert split(masks, max_loss_terms=4).counts.num_packs == 2
    with pytest.raises(ValueError, match=r"tree\.max_path_len"):
        split(masks, max_path_len=3)
    with pytest.raises(ValueError, match="must be one of auto, heuristic, exact"):
        split(masks, packing="magic")
