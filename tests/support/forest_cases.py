"""Small forests of every kind, drawn by hypothesis, for tests of what is made of trees."""

from collections.abc import Callable
from typing import Any

from fuzzing import fuzzed
from hypothesis import example, given
from hypothesis import strategies as st

SEQUENCES = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=7), min_size=1, max_size=12)
"""Two token ids and short lengths: most draws branch several times and hold strict prefixes and duplicates."""

DEEP = [[0, 1, 1, 0, 1], [0, 1, 1, 0, 0], [0, 1], [0, 1, 1, 1], [0, 1, 1, 0, 1], [0], [1, 0]]
"""Five nodes deep; strict prefixes 2 and 5, duplicates 0 and 4, one token in 5, a second root in 6."""

SMALLEST = ([[3]], [[3], [3], [3]], [[3, 1], [3]])


def forests(**others: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that hands a test `sequences`, and what it draws besides.

    A test that draws nothing else always gets the deep forest and the smallest ones, too.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        for sequences in () if others else (DEEP, *SMALLEST):
            test = example(sequences=sequences)(test)
        return fuzzed()(given(sequences=SEQUENCES, **others)(test))

    return decorate
