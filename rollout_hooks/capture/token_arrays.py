"""Token ids as numpy arrays."""

import struct
from collections.abc import Sequence

import numpy as np

_GROWTH = 1.25
"""Size of an array that has grown, as a multiple of the entries in use."""


def token_array(token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return token ids as (N,) int32, read-only, so that what is recorded stays as it is."""
    if isinstance(token_ids, list):
        # `struct` takes half the time of numpy for 3,000 ids, and this is most of what recording a call costs.
        try:
            return np.frombuffer(struct.pack(f"{len(token_ids)}i", *token_ids), dtype=np.int32)
        except struct.error:
            pass  # not a flat list of 32-bit ints: numpy takes it or raises
    tokens = np.array(token_ids, dtype=np.int32)
    tokens.setflags(write=False)
    return tokens


def common_prefix_len(a: np.ndarray, b: np.ndarray) -> int:
    """Count the leading tokens that two token arrays share."""
    n = min(len(a), len(b))
    if n == 0:
        return 0
    differs = a[:n] != b[:n]
    first = int(differs.argmax())
    return first if differs[first] else n


def append(values: np.ndarray, more: np.ndarray, *, size: int) -> np.ndarray:
    """Return `values[:size]` followed by `more`, in `values` itself if it has room."""
    num_values = size + len(more)
    if num_values > len(values):
        grown = np.empty(max(num_values, int(_GROWTH * size)), dtype=values.dtype)
        grown[:size] = values[:size]
        values = grown
    values[size:num_values] = more
    return values
