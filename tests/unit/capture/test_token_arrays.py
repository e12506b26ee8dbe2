"""Token ids as arrays: what `struct` reads is what numpy reads, and what it refuses goes to numpy."""

import numpy as np
import pytest

from rollout_hooks.capture.token_arrays import append, common_prefix_len, token_array


@pytest.mark.parametrize("token_ids", [[], [7], [0, 2**31 - 1, -1], list(range(3000)), [np.int64(3), True], (4, 5)])
def test_a_list_is_read_as_numpy_reads_it(token_ids):
    tokens = token_array(token_ids)
    assert tokens.dtype == np.int32
    assert tokens.tolist() == np.array(token_ids, dtype=np.int32).tolist()


def test_what_is_no_flat_list_of_ids_keeps_its_shape_or_is_refused():
    assert token_array([[1, 2], [3, 4]]).shape == (2, 2)
    with pytest.raises(OverflowError):
        token_array([2**31])


def test_an_array_is_copied():
    given = np.array([1, 2], dtype=np.int32)
    tokens = token_array(given)
    given[0] = 9
    assert tokens.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 9


def test_common_prefix_and_growth():
    a, b = token_array([1, 2, 3]), token_array([1, 2, 4, 5])
    assert [common_prefix_len(a, b), common_prefix_len(a, a), common_prefix_len(a, a[:0])] == [2, 3, 0]
    values = append(a, b, size=2)
    assert values[:6].tolist() == [1, 2, 1, 2, 4, 5]
    room = np.zeros(8, dtype=np.int32)
    assert append(room, b, size=1) is room
    assert room.tolist() == [0, 1, 2, 4, 5, 0, 0, 0]
