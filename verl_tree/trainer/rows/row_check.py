"""What a row in TransferQueue must have, whoever wrote it; checked before a step spends time on a device.

verl's agent loops, ours and other frameworks write the same rows: a key `{uid}_{session}_{leaf}`, a tag and fields
(docs/capture.md). Fields that only our loops write may be missing. What a step reads may not: verl would fail on it
after the log-probs or even after the update.
"""

from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral

import transfer_queue as tq
from transfer_queue import KVBatchMeta

from rollout_hooks.capture.leaf_shapes import LEAF_SHAPE_TAG
from verl_tree.trainer.row_keys import parse_row_key

TAGS = ("seq_len", "min_global_steps", "max_global_steps")
"""Tags that are integers: the length of the row, and the first and last weight version that sampled it."""

FIELDS = {
    "prompts": "the token ids of the prompt",
    "responses": "the token ids after the prompt",
    "input_ids": "prompts and responses in one tensor",
    "position_ids": "0, 1, 2, ... for text",
    "response_mask": "1 where a token of the response is trained",
    "loss_mask": "the same values as response_mask",
    "rm_scores": "the reward of each token of the response; without one, let the loop give a reward or set a reward "
    "function (reward.num_workers, reward.custom_reward_function)",
    "num_turns": "the number of turns of the session",
    "uid": "the uid of the prompt",
}
"""Fields that every step reads, and what they are."""

WRITER_SETS = "whoever writes rows sets it (docs/capture.md, Rows that others make)"

LOG_PROBS = {
    "rollout_log_probs": "the log-prob of each token of the response; without them, set "
    "actor_rollout_ref.rollout.calculate_log_probs=false"
}


def check_step_rows(batch: KVBatchMeta, *, reads_log_probs: bool) -> None:
    """Refuse a batch in which a row lacks a tag or a field; only metadata is read.

    `reads_log_probs` says that the step reads `rollout_log_probs`. Rows with a shape were written by our agent loop
    workers: those of a prompt by one worker, with the same fields. So one row of each prompt is asked about.

    Raises:
        ValueError: With the row, what it lacks, and what that is.
    """
    for key, tag in zip(batch.keys, batch.tags, strict=True):
        for name in TAGS:
            if not isinstance(tag.get(name), Integral):
                raise ValueError(
                    f"row {key}: the tag {name} is {tag.get(name)!r} and must be an integer; {WRITER_SETS}"
                )
        if tag["seq_len"] < 1:
            raise ValueError(f"row {key}: the tag seq_len is {tag['seq_len']} and must be at least 1; {WRITER_SETS}")
    needed = FIELDS | LOG_PROBS if reads_log_probs else FIELDS
    keys = list(_asked_rows(batch))
    if missing := _missing(keys, names=needed, partition_id=batch.partition_id):
        name = missing[0]
        raise ValueError(
            f"row {_first_without(name, keys, partition_id=batch.partition_id)} has no field {name} ({needed[name]}); "
            "whoever writes rows writes it (docs/capture.md, Rows that others make)"
        )


def _asked_rows(batch: KVBatchMeta) -> Iterator[str]:
    """Yield the keys of rows without a shape, and of one row with a shape of each prompt."""
    spoken_for: set[str] = set()
    for key, tag in zip(batch.keys, batch.tags, strict=True):
        uid = parse_row_key(key).uid
        if LEAF_SHAPE_TAG not in tag or uid not in spoken_for:
            yield key
        if LEAF_SHAPE_TAG in tag:
            spoken_for.add(uid)


def _first_without(name: str, keys: Sequence[str], *, partition_id: str | None) -> str:
    """Return the first of the rows that lacks a field, which one of them does."""
    # TransferQueue names the fields that all rows have.
    while len(keys) > 1:
        half = len(keys) // 2
        is_before = bool(_missing(keys[:half], names=[name], partition_id=partition_id))
        keys = keys[:half] if is_before else keys[half:]
    return keys[0]


def _missing(keys: Sequence[str], *, names: Iterable[str], partition_id: str | None) -> list[str]:
    """Return the names that are not fields of all rows."""
    if not keys:
        return []
    known = set(tq.get_client().kv_retrieve_meta(keys=list(keys), partition_id=partition_id).field_names)
    return [name for name in names if name not in known]
