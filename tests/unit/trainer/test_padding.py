"""Padding rows: what is written for each of them. TransferQueue is a dictionary of rows."""

from typing import Any

import pytest

pytest.importorskip("verl")

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import index_select_tensor_dict, list_of_dict_to_tensordict

from rollout_hooks.capture.leaf_shapes import LEAF_SHAPE_TAG
from verl_tree.trainer.rows.padding import append_padding_rows, fill_padding_rows, real_rows

EXTRA = {"recorded_calls": [(0, "root", 2, 4, 1, 1)]}
ROW = {
    "prompts": torch.tensor([1, 2]),
    "responses": torch.tensor([3, 4]),
    "input_ids": torch.tensor([1, 2, 3, 4]),
    "position_ids": torch.arange(4).expand(4, -1),
    "response_mask": torch.ones(2, dtype=torch.int64),
    "loss_mask": torch.ones(2, dtype=torch.int64),
    "rm_scores": torch.tensor([0.0, 1.0]),
    "num_turns": 2,
    "uid": "u",
    "session_id": 5,
    "extra_fields": EXTRA,
    "data_source": "tests",
}
TAG = {"seq_len": 4, "min_global_steps": 1, "max_global_steps": 1, LEAF_SHAPE_TAG: b"of another row"}
EOS = 7


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> dict[str, TensorDict]:
    """Keep the rows that are put, by key."""
    rows: dict[str, TensorDict] = {}

    def put(
        *, keys: list[str], partition_id: str, fields: TensorDict, tags: list[dict[str, Any]] | None = None
    ) -> None:
        assert partition_id == "train"
        assert tags is None or len(tags) == len(keys)
        for index, key in enumerate(keys):
            rows.setdefault(key, TensorDict({}, batch_size=[])).update(index_select_tensor_dict(fields, [index])[0])

    monkeypatch.setattr(tq, "kv_batch_get", lambda **_: list_of_dict_to_tensordict([ROW]))
    monkeypatch.setattr(tq, "kv_batch_put", put)
    return rows


def batch() -> KVBatchMeta:
    return KVBatchMeta(partition_id="train", keys=["u_5_0"], tags=[TAG], extra_info={"temperature": 1.0})


def test_padding_rows_are_equal_but_for_their_sessions(written: dict[str, TensorDict]) -> None:
    padded = append_padding_rows(batch(), num_rows=3, eos_token_id=EOS)
    assert real_rows(padded).keys == ["u_5_0"]
    assert padded.extra_info == {"temperature": 1.0}
    assert padded.keys[1:] == list(written)
    uids = {key.rsplit("_", 2)[0] for key in written}
    assert len(uids) == 1
    for session, (key, row) in enumerate(written.items()):
        assert key.endswith(f"_{session}_0")
        assert (row["session_id"], {row["uid"]}) == (session, uids)
        assert (row["num_turns"], row["extra_fields"], row["data_source"]) == (0, EXTRA, "tests")
        assert row["input_ids"].tolist() == [EOS, EOS]
        assert [row[name].tolist() for name in ("prompts", "responses")] == [[EOS], [EOS]]
        assert [row[name].tolist() for name in ("response_mask", "loss_mask", "rm_scores")] == [[0], [0], [0.0]]
        assert row["position_ids"].tolist() == [[0, 1]] * 4
    tag = {"seq_len": 2, "prompt_len": 1, "response_len": 1, "is_padding": True}
    assert padded.tags[1:] == [{"min_global_steps": 1, "max_global_steps": 1} | tag] * 3
    padded.tags[1]["seq_len"] = 9
    assert padded.tags[2]["seq_len"] == 2, "a tag of its own for each row"


def test_padding_rows_get_zeros_for_what_was_written_to_the_others(written: dict[str, TensorDict]) -> None:
    padded = append_padding_rows(batch(), num_rows=2, eos_token_id=EOS)
    result = KVBatchMeta(partition_id="train", keys=["u_5_0"], tags=[TAG], fields=["advantages", "returns", "uid"])
    filled = fill_padding_rows(padded, written=result)
    assert (filled.keys, filled.fields) == (padded.keys, result.fields)
    for row in written.values():
        assert (row["advantages"].tolist(), row["returns"].tolist()) == ([0.0], [0.0])
        assert "token_level_rewards" not in row


def test_nothing_is_written_where_no_padding_is_needed(written: dict[str, TensorDict]) -> None:
    unpadded = batch()
    assert append_padding_rows(unpadded, num_rows=0, eos_token_id=EOS) is unpadded
    fill_padding_rows(unpadded, written=unpadded)
    assert written == {}
