"""verl's row keys, `{uid}_{session}_{leaf}`, and the order of rows that they give."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple


class RowKey(NamedTuple):
    """The parts of verl's row key `{uid}_{session}_{leaf}`."""

    uid: str
    session: int
    leaf: int


def parse_row_key(key: str) -> RowKey:
    """Split a row key; the parts order rows by group, then session, then leaf.

    Raises:
        ValueError: The key has another form than `{uid}_{session}_{leaf}`.
    """
    parts = key.rsplit("_", 2)
    if len(parts) != 3 or not (parts[1].isdecimal() and parts[2].isdecimal()):
        raise ValueError(f"row key {key!r} is not uid_session_leaf: agent loops write rows through verl's key format")
    return RowKey(parts[0], int(parts[1]), int(parts[2]))


def group_rows(keys: Sequence[str]) -> list[list[int]]:
    """Return the rows of each group as indices into `keys`, by session and leaf, whatever the order of the keys.

    The groups are in the order of their uids; the trainer's uids sort in the order of the prompts.
    """
    parsed = [parse_row_key(key) for key in keys]
    order = sorted(range(len(keys)), key=lambda row: parsed[row])
    return [list(rows) for _, rows in groupby(order, key=lambda row: parsed[row].uid)]


def number_sessions(keys: Sequence[str]) -> list[int]:
    """Return the number of each row's session, in the order in which sessions first appear: the same for its rows."""
    numbers: dict[tuple[str, int], int] = {}
    return [numbers.setdefault(parse_row_key(key)[:2], len(numbers)) for key in keys]
