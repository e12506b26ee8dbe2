"""Which row of a session is the longest. What becomes of the others in TransferQueue is in tests/e2e/test_replay.py."""

import pytest

pytest.importorskip("verl")

from transfer_queue import KVBatchMeta

from verl_tree.trainer.rows.chosen_rows import longest_rows, only_longest

# Row keys are uid_session_leaf, in the order in which rows happen to arrive.
ROW_LENS = {
    "b_0_0": 5,
    "a_1_0": 9,  # the first leaf of its session, and longer than the last
    "a_0_1": 7,
    "a_1_1": 8,
    "a_0_2": 7,  # as long as leaf 1: the later leaf stays
    "a_0_0": 4,
    "b_10_0": 3,  # session 10 is not session 1
    "b_1_0": 6,
}


def test_each_session_keeps_its_longest_row_and_the_last_of_equally_long_ones() -> None:
    keys = list(ROW_LENS)
    kept = longest_rows(keys, row_lens=list(ROW_LENS.values()))
    assert [keys[row] for row in kept] == ["b_0_0", "a_1_0", "a_0_2", "b_10_0", "b_1_0"]


def test_the_order_in_which_rows_arrive_does_not_matter() -> None:
    keys = list(ROW_LENS)[::-1]
    kept = longest_rows(keys, row_lens=[ROW_LENS[key] for key in keys])
    assert [keys[row] for row in kept] == ["b_1_0", "b_10_0", "a_0_2", "a_1_0", "b_0_0"]


def test_no_rows_are_no_rows() -> None:
    assert longest_rows([], row_lens=[]) == []


def test_the_other_rows_are_told() -> None:
    keys = ["a_0_0", "a_0_1", "a_1_0"]
    batch = KVBatchMeta(partition_id="train", keys=keys, tags=[{"seq_len": 3}, {"seq_len": 4}, {"seq_len": 1}])
    chosen, others = only_longest(batch)
    assert (chosen.keys, others) == (["a_0_1", "a_1_0"], ["a_0_0"])
