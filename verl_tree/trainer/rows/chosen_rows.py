"""Which rows of a session are trained (`tree.rows`): all of them, or its longest one alone.

The longest alone is what a trainer of single paths makes of a session that branches: the baseline for training all its
branches. Nothing else of a step differs.
"""

from collections.abc import Sequence

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


def only_longest(batch: KVBatchMeta) -> tuple[KVBatchMeta, list[str]]:
    """Return the batch with the longest row of each session, and the keys of the others."""
    chosen = {batch.keys[row] for row in longest_rows(batch.keys, row_lens=[tag["seq_len"] for tag in batch.tags])}
    others = [key for key in batch.keys if key not in chosen]
    return batch.select_keys([key for key in batch.keys if key in chosen]), others
