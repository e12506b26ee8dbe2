"""Ranges and masks of rows, by hand."""

import numpy as np
import pytest

from verl_tree.tree.rows import ranges, trained_tokens


def trained_of(masks: list[list[int]], row_lens: list[int]) -> list[bool]:
    mask_lens = np.array([len(mask) for mask in masks])
    return trained_tokens(np.concatenate(masks), mask_lens=mask_lens, row_lens=np.array(row_lens)).tolist()


def test_ranges_stand_one_after_another() -> None:
    assert ranges(np.array([7, 0, 2]), np.array([2, 0, 3])).tolist() == [7, 8, 2, 3, 4]
    assert ranges(np.array([], dtype=np.int64), np.array([], dtype=np.int64)).tolist() == []


def test_a_mask_covers_the_end_of_its_row() -> None:
    assert trained_of([[1, 0], [1]], [4, 2]) == [False, False, True, False, False, True]


def test_a_mask_may_cover_the_whole_row_but_first_tokens_are_never_scored() -> None:
    assert trained_of([[1, 1, 0], [1, 1]], [3, 2]) == [False, True, False, False, True]


def test_a_mask_longer_than_its_row_is_refused() -> None:
    with pytest.raises(ValueError, match="row 1 has 3 entries"):
        trained_of([[1, 1], [1, 1, 1]], [2, 2])
