"""The guard by hand: which rows it compares, when it trusts the engine, and what it says when it does not.

TransferQueue is a dictionary of rows.
"""

import logging
import math
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("verl")

import torch
import transfer_queue as tq
from input_cases import resolved
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from verl_tree.trainer.rows.replay import REPLAYED_TAG
from verl_tree.trainer.told.log_prob_guard import MAX_ROWS, METRIC, LogProbGuard

Row = dict[str, list[float]]

ROW: Row = {"rollout_log_probs": [-1.0, 0.0, -3.0], "old_log_probs": [-1.25, -9.0, -3.5], "response_mask": [1, 0, 1]}
"""Token 1 was read, not sampled. The others are .25 and .5 apart."""

SHORT: Row = {"rollout_log_probs": [-2.0], "old_log_probs": [-1.0], "response_mask": [1]}
"""One token, 1 apart, in the other direction."""


def guard(tolerance: float | None = 10.0) -> LogProbGuard:
    return LogProbGuard(tolerance=tolerance, engine="the engine with the model")


def version(first: int, last: int | None = None, **tag: Any) -> dict[str, Any]:
    return {"min_global_steps": first, "max_global_steps": first if last is None else last, **tag}


class Rows:
    """TransferQueue with the rows of a step, which counts those that are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *rows: tuple[Row, dict[str, Any]]) -> None:
        self.rows = {f"u{number}_0_0": row for number, (row, _) in enumerate(rows)}
        self.batch = KVBatchMeta(partition_id="train", keys=list(self.rows), tags=[tag for _, tag in rows])
        self.num_read = 0
        monkeypatch.setattr(tq, "kv_batch_get", self.read)

    def read(self, *, keys: list[str], partition_id: str, select_fields: Sequence[str]) -> TensorDict:
        assert partition_id == "train"
        self.num_read += len(keys)
        columns = {
            name: torch.nested.as_nested_tensor(
                [torch.tensor(self.rows[key][name]) for key in keys], layout=torch.jagged
            )
            for name in select_fields
        }
        return TensorDict(columns, batch_size=[len(keys)])


def test_the_mean_is_over_trained_tokens_of_both_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(monkeypatch, (ROW, version(3)), (SHORT, version(3)))
    assert guard().compare(rows.batch, version=3) == {METRIC: pytest.approx((0.25 + 0.5 + 1.0) / 3)}


@pytest.mark.parametrize(
    "tag",
    [
        version(2),
        version(2, 3),
        version(3, 4),
        version(3, is_padding=True),
        version(3, **{REPLAYED_TAG: True}),
    ],
    ids=["older", "resumed", "newer", "padding", "replayed"],
)
def test_other_rows_are_not_compared(tag: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(monkeypatch, (SHORT, tag), (ROW, version(3)))
    assert guard().compare(rows.batch, version=3) == {METRIC: pytest.approx(0.75 / 2)}
    alone = Rows(monkeypatch, (SHORT, tag))
    assert guard(1e-9).compare(alone.batch, version=3) == {}
    assert alone.num_read == 0


def test_rows_without_trained_tokens_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(monkeypatch, (SHORT | {"response_mask": [0.0]}, version(0)))
    assert guard(1e-9).compare(rows.batch, version=0) == {}


def test_a_comparison_reads_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(monkeypatch, *[(ROW, version(0))] * (MAX_ROWS + 7))
    guard().compare(rows.batch, version=0)
    assert rows.num_read == MAX_ROWS


def test_the_engine_is_trusted_after_a_later_weight_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that resumes with version 4 compares 4, finds nothing of 5, compares 6, and reads nothing any more."""
    ours = guard()
    for now, is_compared in ((4, True), (4, True), (5, False), (6, True), (6, False), (7, False)):
        rows = Rows(monkeypatch, (ROW, version(4 if now == 5 else now)))
        assert bool(ours.compare(rows.batch, version=now)) == is_compared
        assert rows.num_read == is_compared


def test_a_difference_above_the_tolerance_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(monkeypatch, (ROW, version(1)))
    ours = guard(0.375)
    assert ours.compare(rows.batch, version=1)
    spoilt = Rows(monkeypatch, (ROW | {"old_log_probs": [-1.25, -9.0, -3.502]}, version(2)))
    with pytest.raises(
        ValueError, match=r"the engine with the model does not compute with the trainer's weights"
    ) as no:
        ours.compare(spoilt.batch, version=2)
    message = str(no.value)
    assert "the 2 tokens that it sampled under version 2 have a mean log-prob of -2 there and of -2.38" in message
    assert "0.376 apart a token; tree.log_prob_tolerance=0.375" in message
    assert "set it to null" in message


@pytest.mark.parametrize("column", ["rollout_log_probs", "old_log_probs"])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_what_is_no_number_ends_the_run(column: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(monkeypatch, (ROW | {column: [value, 0.0, -3.0]}, version(0)))
    with pytest.raises(ValueError, match="apart a token"):
        guard().compare(rows.batch, version=0)


@pytest.mark.parametrize(
    "blind",
    [
        "tree.log_prob_tolerance=null",
        "algorithm.rollout_correction.bypass_mode=true",
        "actor_rollout_ref.rollout.calculate_log_probs=false",
    ],
)
def test_without_two_log_probs_it_says_that_it_compares_nothing(
    blind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = Rows(monkeypatch, (ROW, version(0)))
    tolerance = "tree.log_prob_tolerance=0.3"
    with pytest.raises(ValueError, match=r"vllm with .* \(dtype=float32, quantization=None\) does not compute"):
        LogProbGuard.from_config(resolved(tolerance)).compare(rows.batch, version=0)
    with caplog.at_level(logging.WARNING):
        ours = LogProbGuard.from_config(resolved(tolerance, blind))
    assert ours.compare(rows.batch, version=0) == {}
    said = [record.getMessage() for record in caplog.records if "compares nothing" in record.getMessage()]
    assert len(said) == ("null" not in blind)
    assert all(blind in each for each in said)
