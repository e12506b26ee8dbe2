"""Rows of a prompt as trees in the real queue: every read is that of flat rows, and nothing is lost in silence."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import transfer_queue as tq
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from rollout_hooks.capture.wire_columns import PromptColumns
from rollout_hooks.capture.wire_storage import writing
from verl_tree.testing.synthetic import tool_fan_out

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("queue")]

NUM_SESSIONS, PROMPT_LEN = 2, 20
NAMES = ["input_ids", "prompts", "responses", "position_ids", "response_mask", "rollout_log_probs", "routed_experts"]


def rows_of(session: int) -> list[dict[str, Any]]:
    """Make the rows of a session; sessions share the prompt."""
    rows = []
    for path in tool_fan_out(2, num_calls=3, prompt_len=PROMPT_LEN, plan_len=8, call_len=5, result_len=9, seed=session):
        ids = torch.tensor([*range(100, 100 + PROMPT_LEN), *path[PROMPT_LEN:].tolist()])
        columns = {"input_ids": ids, "prompts": ids[:PROMPT_LEN], "responses": ids[PROMPT_LEN:]}
        columns |= {"position_ids": torch.arange(len(ids)), "response_mask": ids[PROMPT_LEN:] % 3 % 2}
        columns |= {"rollout_log_probs": -columns["responses"] / 7, "routed_experts": (ids % 60)[:, None, None].short()}
        others = {"uid": "p", "raw_prompt": [{"content": "x" * 99}], "extra_fields": {"calls": [(0, len(ids))]}}
        rows.append(columns | others)
    return rows


def write(around: Callable[[], AbstractContextManager[None]], uid: str) -> KVBatchMeta:
    """Write the sessions of a prompt one after the other, and return the batch of their rows."""
    keys, tags = [], []
    for session in range(NUM_SESSIONS):
        rows = rows_of(session)
        own = [f"{uid}_{session}_{leaf}" for leaf in range(len(rows))]
        own_tags = [{"seq_len": len(row["input_ids"])} for row in rows]
        with around():
            tq.kv_batch_put(keys=own, partition_id="train", fields=list_of_dict_to_tensordict(rows), tags=own_tags)
        keys, tags = keys + own, tags + own_tags
    return KVBatchMeta(partition_id="train", keys=keys, tags=tags)


@pytest.fixture
def sides() -> list[KVBatchMeta]:
    """Write the same rows flat and as trees."""
    prompt = PromptColumns()
    return [write(nullcontext, "flat"), write(lambda: writing(prompt), "trees")]


def read(batch: KVBatchMeta, keys: slice, names: list[str] | None = None) -> TensorDict:
    return tq.kv_batch_get(keys=batch.keys[keys], partition_id="train", select_fields=names)


def assert_same(left: TensorDict, right: TensorDict) -> None:
    """Check that two reads are the same: names, types, shapes and bits."""
    assert set(left.keys()) == set(right.keys())
    for name in left.keys():  # noqa: SIM118 (a TensorDict has no iterator over names)
        one, other = left[name], right[name]
        if isinstance(left.get(name), NonTensorStack):
            assert (type(left.get(name)), list(one)) == (type(right.get(name)), list(other)), name
            continue
        assert (one.dtype, one.layout, one.is_nested) == (other.dtype, other.layout, other.is_nested), name
        assert all(map(torch.equal, one.unbind(), other.unbind())), name


@pytest.mark.parametrize("names", [None, NAMES[:1], NAMES[1:3], NAMES[4:], ["raw_prompt"]], ids=str)
@pytest.mark.parametrize("keys", [slice(None), slice(9, 11), slice(-1, None)], ids=["all", "two", "last"])
def test_rows_are_read_as_flat_ones_are(sides: list[KVBatchMeta], names: list[str] | None, keys: slice) -> None:
    assert_same(*(read(batch, keys, names) for batch in sides))


def test_flat_columns_and_rows_lie_beside_trees(sides: list[KVBatchMeta]) -> None:
    """Padding rows are flat; ranks write log-probs, and rollout correction masks, of all rows."""
    for batch in sides:
        source = tq.kv_batch_get(keys=batch.keys[-1:], partition_id="train")
        batch.keys.append(f"{batch.keys[0][:4]}_pad")
        tq.kv_batch_put(keys=batch.keys[-1:], partition_id="train", fields=source, tags=[{}])
        masks = [mask * 0 for mask in read(batch, slice(None))["response_mask"].unbind()]
        written = {"response_mask": torch.nested.as_nested_tensor(masks, layout=torch.jagged)}
        tq.kv_batch_put(keys=batch.keys, partition_id="train", fields=TensorDict(written, batch_size=len(masks)))
    assert_same(*(read(batch, slice(None)) for batch in sides))
    assert not read(sides[1], slice(None))["response_mask"].values().any()


def test_sessions_that_write_at_the_same_time_share_what_is_there() -> None:
    """The second of three writes fails, as it has fewer keys than rows; the others have nothing of it."""
    prompt = PromptColumns()
    batches = {0: list_of_dict_to_tensordict(rows_of(0)), 1: list_of_dict_to_tensordict(rows_of(1))}
    keys = {session: [f"at_once_{session}_{leaf}" for leaf in range(len(rows))] for session, rows in batches.items()}

    async def put(session: int, own: list[str]) -> None:
        with writing(prompt):
            await tq.async_kv_batch_put(
                keys=own, partition_id="train", fields=batches[session], tags=[{}] * len(batches[session])
            )

    async def put_all() -> list[Any]:
        calls = put(0, keys[0]), put(1, keys[1][:1]), put(1, keys[1])
        return await asyncio.gather(*calls, return_exceptions=True)

    results = asyncio.run(put_all())
    assert [isinstance(each, Exception) for each in results] == [False, True, False]
    trees = KVBatchMeta(partition_id="train", keys=[*keys[0], *keys[1]], tags=[{}] * sum(map(len, keys.values())))
    assert_same(read(trees, slice(None)), read(write(nullcontext, "flat"), slice(None)))


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_row_whose_tokens_are_gone_is_an_error(sides: list[KVBatchMeta], is_taken: bool) -> None:
    """A row that gets a cleared one's place in the queue is not taken for it."""
    tq.kv_clear(keys=sides[1].keys[:-1], partition_id="train")
    if is_taken:
        write(lambda: writing(PromptColumns()), "other")
    with pytest.raises(RuntimeError, match="written again or cleared"):
        read(sides[1], slice(-1, None), ["input_ids"])
