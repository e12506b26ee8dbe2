"""Which rows of a session are trained (`tree.rows`): all of them, or its longest one alone.

The longest alone is what a trainer of single paths makes of a session that branches: the baseline for training all its
branches. Nothing else of a step differs.
"""

from collections.abc import Sequence

import transfer_queue as tq
from transfer_queue import KVBatchMeta

from verl_tree.trainer.row_keys import parse_row_key


def longest_rows(keys: Sequence[str], *, row_lens: Sequence[int]) -> list[int]:
    """Return the longest row of each session as ascending indices into `keys`; of equally long ones the last leaf."""
    longest: dict[tuple[str, int], tuple[int, int, int]] = {}
    for row, (key, row_len) in enumerate(zip(keys, row_lens, strict=True)):
        place = parse_row_key(key)
        candidate = (row_len, place.leaf, row)
        longest[place[:2]] = max(candidate, longest.get(place[:2], candidate))
    return sorted(row for _, _, row in longest.values())


def drop_all_but_longest(batch: KVBatchMeta) -> KVBatchMeta:
    """Return the batch with the longest row of each session, and clear the others from TransferQueue."""
    assert batch.partition_id is not None
    kept = {batch.keys[row] for row in longest_rows(batch.keys, row_lens=[tag["seq_len"] for tag in batch.tags])}
    chosen = batch.select_keys([key for key in batch.keys if key in kept])
    if dropped := [key for key in batch.keys if key not in kept]:
        # As flat rows, which have nothing from those that are cleared. verl clears these at the end of the step.
        rows = tq.kv_batch_get(keys=chosen.keys, partition_id=batch.partition_id)
        tq.kv_batch_put(keys=chosen.keys, partition_id=batch.partition_id, fields=rows)
        tq.kv_clear(keys=dropped, partition_id=batch.partition_id)
    return chosen
