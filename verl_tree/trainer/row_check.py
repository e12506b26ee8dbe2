"""What a row in TransferQueue must have, whoever wrote it; checked before a step spends time on a device.

verl's agent loops, ours and other frameworks write the same rows: a key `{uid}_{session}_{leaf}`, a tag and fields
(docs/capture.md). Fields that only our loops write may be missing. What a step reads may not: verl would fail on it
after the log-probs or even after the update.
"""

from numbers import Integral

import transfer_queue as tq
from transfer_queue import KVBatchMeta

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

LOG_PROBS = {
    "rollout_log_probs": "the log-prob of each token of the response; without them, set "
    "actor_rollout_ref.rollout.calculate_log_probs=false"
}


def check_step_rows(batch: KVBatchMeta, *, reads_log_probs: bool) -> None:
    """Refuse a batch in which a row lacks a tag or a field; only metadata is read.

    `reads_log_probs` says that the step reads `rollout_log_probs`.

    Raises:
        ValueError: With the row, what it lacks, and what that is.
    """
    for key, tag in zip(batch.keys, batch.tags, strict=True):
        for name in TAGS:
            if not isinstance(tag.get(name), Integral):
                raise ValueError(
                    f"row {key}: the tag {name} is {tag.get(name)!r} and must be an integer; whoever writes rows sets "
                    "it (docs/capture.md, Rows that others make)"
                )
    needed = FIELDS | LOG_PROBS if reads_log_probs else FIELDS
    if missing := _missing(batch.keys, names=needed, partition_id=batch.partition_id):
        # TransferQueue names the fields that all rows have. So the row is looked for one by one.
        lacking = next(
            key for key in batch.keys if missing[0] in _missing([key], names=needed, partition_id=batch.partition_id)
        )
        raise ValueError(
            f"row {lacking} has no field {missing[0]} ({needed[missing[0]]}); whoever writes rows writes it "
            "(docs/capture.md, Rows that others make)"
        )


def _missing(keys: list[str], *, names: dict[str, str], partition_id: str | None) -> list[str]:
    """Return the names that are not fields of all rows."""
    if not keys:
        return []
    known = tq.get_client().kv_retrieve_meta(keys=keys, partition_id=partition_id).field_names
    return [name for name in names if name not in known]
