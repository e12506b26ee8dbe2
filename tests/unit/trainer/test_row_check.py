"""What a row must have, and how many rows are asked about. TransferQueue is a dictionary of field names."""

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fuzzing import fuzzed, outcome
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("verl")

import transfer_queue as tq
from transfer_queue import KVBatchMeta

from rollout_hooks.capture.leaf_shapes import LEAF_SHAPE_TAG
from verl_tree.trainer.rows.row_check import FIELDS, LOG_PROBS, check_step_rows

TAG = {"seq_len": 3, "min_global_steps": 1, "max_global_steps": 1}
KEYS = [f"{uid}_{session}_{leaf}" for uid in "abc" for session in range(2) for leaf in range(3)]


class Queue:
    """TransferQueue's client: it names the fields that all of the keys have, and counts what it was asked for."""

    def __init__(self, lacking: dict[str, Collection[str]]) -> None:
        self.lacking = lacking
        self.num_asked: list[int] = []

    def kv_retrieve_meta(self, *, keys: list[str], partition_id: str) -> SimpleNamespace:
        assert partition_id == "train"
        self.num_asked.append(len(keys))
        lost = {name for key in keys for name in self.lacking.get(key, ())}
        return SimpleNamespace(field_names=[name for name in FIELDS | LOG_PROBS if name not in lost])


def batch_of(keys: list[str], *, with_shape: bool, **tags: Any) -> KVBatchMeta:
    tag = TAG | tags | ({LEAF_SHAPE_TAG: b""} if with_shape else {})
    return KVBatchMeta(partition_id="train", keys=keys, tags=[dict(tag) for _ in keys])


def ask(monkeypatch: pytest.MonkeyPatch, **lacking: Collection[str]) -> Queue:
    queue = Queue(lacking)
    monkeypatch.setattr(tq, "get_client", lambda: queue)
    return queue


def test_of_our_own_rows_one_of_each_prompt_is_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = ask(monkeypatch)
    ours = batch_of(KEYS, with_shape=True)
    check_step_rows(ours, reads_log_probs=True)
    assert queue.num_asked == [3]
    ours.tags[4].pop(LEAF_SHAPE_TAG)
    ours.tags[5].pop(LEAF_SHAPE_TAG)
    check_step_rows(ours, reads_log_probs=True)
    check_step_rows(batch_of(KEYS, with_shape=False), reads_log_probs=True)
    assert queue.num_asked == [3, 5, len(KEYS)]


@pytest.mark.parametrize("key", KEYS)
def test_the_first_row_without_rewards_is_named_after_few_requests(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    later = KEYS[KEYS.index(key) :]
    queue = ask(monkeypatch, **{each: ["rm_scores"] for each in later})
    with pytest.raises(ValueError, match=rf"^row {key} has no field rm_scores \(the reward .* set a reward function"):
        check_step_rows(batch_of(KEYS, with_shape=False), reads_log_probs=False)
    assert len(queue.num_asked) <= 1 + 5, "18 rows are halved five times"


def test_a_prompt_whose_rows_lack_rewards_is_found_among_rows_with_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    ask(monkeypatch, **{key: ["rm_scores"] for key in KEYS if key.startswith("b")})
    with pytest.raises(ValueError, match="row b_0_0 has no field rm_scores"):
        check_step_rows(batch_of(KEYS, with_shape=True), reads_log_probs=False)


def test_log_probs_are_needed_where_a_step_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ask(monkeypatch, a_0_1=["rollout_log_probs"])
    check_step_rows(batch_of(KEYS, with_shape=False), reads_log_probs=False)
    with pytest.raises(ValueError, match=r"row a_0_1 has no field rollout_log_probs .*calculate_log_probs=false"):
        check_step_rows(batch_of(KEYS, with_shape=False), reads_log_probs=True)


@pytest.mark.parametrize("with_shape", [True, False])
def test_a_tag_that_is_no_integer_is_named(with_shape: bool) -> None:
    batch = batch_of(KEYS, with_shape=with_shape)
    batch.tags[7]["max_global_steps"] = None
    with pytest.raises(ValueError, match=rf"row {KEYS[7]}: the tag max_global_steps is None"):
        check_step_rows(batch, reads_log_probs=False)


@pytest.mark.parametrize("length", [0, -3])
def test_a_row_has_tokens(length: int) -> None:
    with pytest.raises(ValueError, match=rf"row {KEYS[0]}: the tag seq_len is {length} and must be at least 1"):
        check_step_rows(batch_of(KEYS, with_shape=False, seq_len=length), reads_log_probs=False)


JUNK_TAGS = st.sampled_from([None, -1, 0, 3, 2**70, True, 1.5, float("nan"), "3", b"", [], np.int64(4)])
ROWS = st.tuples(
    st.sampled_from([*KEYS, "", "a", "a_0", "a_x_0", "a_0_-1", "_0_0", "a_0_1.5"]) | st.text(max_size=8),
    st.dictionaries(st.sampled_from([*TAG, LEAF_SHAPE_TAG]), JUNK_TAGS, min_size=2),
)


@fuzzed(60)
@given(
    st.lists(ROWS, max_size=4, unique_by=lambda row: row[0]),
    st.booleans(),
    st.sampled_from([*FIELDS, *LOG_PROBS]) | st.none(),
)
def test_rows_of_anybody_pass_or_are_named(rows: list[tuple[str, dict]], reads: bool, lacking: str | None) -> None:
    batch = KVBatchMeta(partition_id="train", keys=[key for key, _ in rows], tags=[{**TAG, **tag} for _, tag in rows])
    with pytest.MonkeyPatch.context() as patch:
        ask(patch, **({batch.keys[-1]: [lacking]} if lacking and rows else {}))
        _, refusal = outcome(lambda: check_step_rows(batch, reads_log_probs=reads))
    if refusal is not None:
        assert refusal.startswith("row ")
        assert "whoever writes rows" in refusal or "verl's key format" in refusal
        return
    for key, tag in zip(batch.keys, batch.tags, strict=True):
        uid, session, leaf = key.rsplit("_", 2)
        assert (int(session), int(leaf)) >= (0, 0)
        assert int(tag["seq_len"]) >= 1
        assert isinstance(uid, str)


def test_no_rows_lack_nothing() -> None:
    check_step_rows(batch_of([], with_shape=False), reads_log_probs=True)
