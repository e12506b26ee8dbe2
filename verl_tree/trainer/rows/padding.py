"""Padding rows: two tokens that no loss reads, so that every rank can have the same number of rows.

verl builds the row (`padding_utils.construct_minimal_padding_template`, verl 0.9.1) and marks it with the tag
`is_padding`. Its 128 tokens are cut to two, because verl's own engines compute them. A tree engine skips rows without
trained tokens altogether.
"""

import uuid
from collections.abc import Mapping
from typing import Any

import torch
import transfer_queue as tq
from tensordict import NonTensorData, NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import construct_minimal_padding_template
from verl.utils import tensordict_utils as tu

from rollout_hooks.capture.leaf_shapes import LEAF_SHAPE_TAG
from rollout_hooks.capture.roles import ROLE

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
    fields = _repeat(row | {"uid": uid}, num_rows=num_rows)
    if "session_id" in row:
        tu.assign_non_tensor_stack(fields, "session_id", list(range(num_rows)))
    tags = [dict(tag) for _ in keys]
    tq.kv_batch_put(keys=keys, partition_id=batch.partition_id, fields=fields, tags=tags)
    return KVBatchMeta(
        keys=batch.keys + keys,
        tags=batch.tags + tags,
        partition_id=batch.partition_id,
        fields=batch.fields,
        extra_info=batch.extra_info,
    )


def shorten(row: dict[str, Any], tag: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Cut verl's padding row to `PADDING_LEN` tokens, its response has one already; it has no shape and no role."""
    short = dict(row)
    short["prompts"] = row["prompts"][:PADDING_PROMPT_LEN]
    short["position_ids"] = row["position_ids"][..., :PADDING_LEN]
    for name in _FIELDS_BY_TOKEN:
        if isinstance(row.get(name), torch.Tensor):
            short[name] = row[name][:PADDING_LEN]
    lens = {"prompt_len": PADDING_PROMPT_LEN, "response_len": PADDING_RESPONSE_LEN, "seq_len": PADDING_LEN}
    return short, {name: value for name, value in tag.items() if name not in (LEAF_SHAPE_TAG, ROLE)} | lens


def _repeat(row: Mapping[str, Any], *, num_rows: int) -> TensorDict:
    """Return the columns of equal rows, which share their values: there may be 100,000 of them."""
    columns = {
        name: torch.stack([value] * num_rows)
        if isinstance(value, torch.Tensor)
        else NonTensorStack.from_list([NonTensorData(value)] * num_rows)
        for name, value in row.items()
    }
    return TensorDict(columns, batch_size=[num_rows])


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
        zeros = _repeat({name: torch.zeros(PADDING_RESPONSE_LEN) for name in names}, num_rows=len(padding))
        tq.kv_batch_put(keys=padding, partition_id=batch.partition_id, fields=zeros)
    return KVBatchMeta(keys=batch.keys, tags=batch.tags, partition_id=batch.partition_id, fields=written.fields)


def _is_padding(tag: dict[str, Any]) -> bool:
    return tag.get("is_padding", False)
