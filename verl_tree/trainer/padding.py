"""Padding rows: two tokens that no loss reads, so that every rank can have the same number of rows.

verl builds the row (`padding_utils.construct_minimal_padding_template`, verl 0.9.1) and marks it with the tag
`is_padding`. Its 128 tokens are cut to two, because verl's own engines compute them. A tree engine skips rows without
trained tokens altogether.
"""

import copy
import uuid
from typing import Any

import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import construct_minimal_padding_template
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

PADDING_PROMPT_LEN = 1
PADDING_RESPONSE_LEN = 1
PADDING_LEN = PADDING_PROMPT_LEN + PADDING_RESPONSE_LEN

_FIELDS_BY_TOKEN = ("input_ids", "attention_mask", "routed_experts", "teacher_ids", "teacher_logprobs")
_FIELDS_OF_ADVANTAGES = ("advantages", "returns", "token_level_rewards", "rollout_is_weights")


def append_padding_rows(batch: KVBatchMeta, *, num_rows: int, eos_token_id: int) -> KVBatchMeta:
    """Write padding rows to TransferQueue and append them to the batch.

    They imitate the fields and tags of the batch's first row and consist of the token `eos_token_id`. They are a group
    of their own, one session each.
    """
    if num_rows == 0:
        return batch
    assert batch.partition_id is not None
    source = tq.kv_batch_get(keys=batch.keys[:1], partition_id=batch.partition_id)[0]
    row, tag = shorten(*construct_minimal_padding_template(source, batch.tags[0], eos_token_id))
    uid = f"pad{uuid.uuid4().hex}"
    keys = [f"{uid}_{session}_0" for session in range(num_rows)]
    rows = [copy.deepcopy(row) | {"uid": uid} for _ in keys]
    if "session_id" in row:
        for session, each in enumerate(rows):
            each["session_id"] = session
    tags = [copy.deepcopy(tag) for _ in keys]
    tq.kv_batch_put(keys=keys, partition_id=batch.partition_id, fields=list_of_dict_to_tensordict(rows), tags=tags)
    return KVBatchMeta(
        keys=batch.keys + keys,
        tags=batch.tags + tags,
        partition_id=batch.partition_id,
        fields=batch.fields,
        extra_info=batch.extra_info,
    )


def shorten(row: dict[str, Any], tag: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Cut verl's padding row to `PADDING_LEN` tokens; its response has one token already."""
    short = dict(row)
    short["prompts"] = row["prompts"][:PADDING_PROMPT_LEN]
    short["position_ids"] = row["position_ids"][..., :PADDING_LEN]
    for name in _FIELDS_BY_TOKEN:
        if isinstance(row.get(name), torch.Tensor):
            short[name] = row[name][:PADDING_LEN]
    lens = {"prompt_len": PADDING_PROMPT_LEN, "response_len": PADDING_RESPONSE_LEN, "seq_len": PADDING_LEN}
    return short, tag | lens


def real_rows(batch: KVBatchMeta) -> KVBatchMeta:
    """Return the batch without its padding rows, in the same order."""
    return batch.select_keys([key for key, tag in zip(batch.keys, batch.tags, strict=True) if not _is_padding(tag)])


def fill_padding_rows(batch: KVBatchMeta, *, written: KVBatchMeta) -> KVBatchMeta:
    """Write zeros to padding rows for what was computed for the real rows only: a field must exist in every row.

    `written` is what TransferQueue returned when the real rows were written. The result has all rows with its fields.
    """
    padding = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if _is_padding(tag)]
    names = [name for name in _FIELDS_OF_ADVANTAGES if name in (written.fields or ())]
    if padding:
        assert batch.partition_id is not None
        rows = [{name: torch.zeros(PADDING_RESPONSE_LEN) for name in names} for _ in padding]
        tq.kv_batch_put(keys=padding, partition_id=batch.partition_id, fields=list_of_dict_to_tensordict(rows))
    return KVBatchMeta(keys=batch.keys, tags=batch.tags, partition_id=batch.partition_id, fields=written.fields)


def _is_padding(tag: dict[str, Any]) -> bool:
    return tag.get("is_padding", False)
