"""Token ids as numpy arrays: made from lists, compared, lengthened. What every call of a session does to its tokens."""

import struct
from collections.abc import Sequence

import numpy as np

_GROWTH = 1.25
"""Room that a growing array takes; the rest of its memory is used."""


def token_array(token_ids: Sequence[int]) -> np.ndarray:
    """Token ids as (N,) int32; may be read-only.

    `struct` reads a list of 3,000 ids in half the time that numpy takes, which is most of what recording a call costs.
    """
    if isinstance(token_ids, list):
        try:
            return np.frombuffer(struct.pack(f"{len(token_ids)}i", *token_ids), dtype=np.int32)
        except struct.error:
            pass  # no flat list of 32-bit ints: numpy takes it, or says what is wrong with it
    return np.asarray(token_ids, dtype=np.int32)


def common_prefix_len(a: np.ndarray, b: np.ndarray) -> int:
    """Number of leading tokens that two token arrays share."""
    n = min(len(a), len(b))
    if n == 0:
        return 0
    differs = a[:n] != b[:n]
    first = int(differs.argmax())
    return first if differs[first] else n


def append(values: np.ndarray, more: np.ndarray, *, size: int) -> np.ndarray:
    """`values[:size]` and `more` in one array, which is `values` itself where there is room."""
    num_values = size + len(more)
    if num_values > len(values):
        grown = np.empty(max(num_values, int(_GROWTH * size)), dtype=values.dtype)
        grown[:size] = values[:size]
        values = grown
    values[size:num_values] = more
    return values
