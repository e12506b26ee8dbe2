"""Rows of a mini-batch as packs: expected values by hand."""

import numpy as np
import pytest
import torch

from verl_tree.engine.tree_batch import split_into_packs, trained_tokens


def jagged(rows: list[list[int]]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


ROWS = [[5, 6, 7, 8], [1, 1], [5, 6, 9], [5, 6, 7, 8]]
"""A row, a padding row, a sibling, a duplicate."""

TOKENS = np.concatenate(ROWS)
OFFSETS = np.array([0, 4, 6, 9, 13])


def split(masks: list[list[int]], **options):
    lens = np.diff(OFFSETS)
    settings = {"capacity": 100, "method": "auto", "shared_tokens": "sum"} | options
    return split_into_packs(
        TOKENS, offsets=OFFSETS, trained=trained_tokens(jagged(masks), sequence_lens=lens), **settings
    )


def test_a_mask_covers_the_end_of_its_row() -> None:
    trained = trained_tokens(jagged([[1, 0], [1]]), sequence_lens=np.array([4, 2]))
    assert trained.tolist() == [False, False, True, False, False, True]


def test_a_mask_may_cover_the_whole_row_but_first_tokens_are_never_scored() -> None:
    trained = trained_tokens(jagged([[1, 1, 0], [1, 1]]), sequence_lens=np.array([3, 2]))
    assert trained.tolist() == [False, True, False, False, True]


def test_a_mask_longer_than_its_row_is_refused() -> None:
    with pytest.raises(ValueError, match="row 1 has 3 entries"):
        trained_tokens(jagged([[1, 1], [1, 1, 1]]), sequence_lens=np.array([2, 2]))


def test_rows_without_trained_tokens_cost_nothing() -> None:
    batch = split([[1, 1], [0], [1], [0, 1]])
    (micro,) = batch.micro_batches
    assert sorted(micro.rows.tolist()) == [0, 2, 3]
    assert batch.counts.num_packed_tokens == 5 and batch.counts.num_flat_tokens == 11
    assert micro.layout.token_ids_T.tolist() == [5, 6, 7, 8, 9]
    # 7 and 8 are trained by row 0, 9 by row 2; nobody trains the prompt.
    assert micro.wanted_T.tolist() == [False, False, True, True, True]


def test_results_find_their_rows() -> None:
    batch = split([[1, 1], [0], [1], [0, 1]], capacity=4)
    assert [sorted(micro.rows.tolist()) for micro in batch.micro_batches] == [[0, 3], [2]]
    flat = np.zeros(len(TOKENS), dtype=np.int64)
    for micro in batch.micro_batches:
        flat[micro.flat_index_F.numpy()] = micro.layout.token_ids_T[micro.layout.tree_index_F].numpy()
    assert flat.tolist() == [5, 6, 7, 8, 0, 0, 5, 6, 9, 5, 6, 7, 8]


def test_no_trained_row_gives_no_pack() -> None:
    batch = split([[0, 0], [0], [0], [0, 0]])
    assert batch.micro_batches == () and batch.counts.num_flat_tokens == 0


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


def test_rows_with_different_merge_keys_share_nothing() -> None:
    batch = split([[1, 1], [1], [1], [1, 1]], merge_keys=[1.0, 1.0, 0.5, 1.0])
    assert batch.counts.num_packed_tokens == 4 + 2 + 3
