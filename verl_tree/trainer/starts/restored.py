"""What a checkpoint puts back into TransferQueue, and what of it a resumed run must know (asynchronous modes)."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import transfer_queue as tq

from verl_tree.trainer.row_keys import parse_row_key

_NUMBERED_UID = re.compile(r"(\d{9,})-")


def numbered_uid(number: int, uid: str) -> str:
    """Return a uid that sorts by the number of its prompt; it has no underscore, at which verl cuts row keys."""
    return f"{number:09d}-{uid}"


def take_over_restored(partition_id: str) -> int:
    """Clear the restored rows that are trained already, and return the number of the next prompt."""
    tags = (tq.kv_list(partition_id) or {}).get(partition_id, {})
    if keys := trained_rows(tags):
        tq.kv_clear(keys=keys, partition_id=partition_id)
    return next_prompt_number(tags)


def next_prompt_number(keys: Iterable[str]) -> int:
    """Return the number after the largest in the keys of prompts and rows; 0 if there is none."""
    matches = (_NUMBERED_UID.match(key) for key in keys)
    return max((int(match[1]) + 1 for match in matches if match), default=0)


def trained_rows(tags: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the keys of rows whose prompt is gone, given all tags of a partition.

    verl saves a checkpoint after it has sampled and trained a step's prompts and before it clears their rows, which
    nothing clears after a resume.
    """
    prompts = {key for key, tag in tags.items() if tag.get("is_prompt", False)}
    return [key for key in tags if key not in prompts and parse_row_key(key).uid not in prompts]
