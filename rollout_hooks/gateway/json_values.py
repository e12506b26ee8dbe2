"""JSON values that clients and models wrote, looked through without recursion."""

import math
from collections.abc import Iterator
from typing import Any

from rollout_hooks.gateway.limits import MAX_NESTING


def walk(value: Any) -> Iterator[tuple[int, Any]]:
    """Yield a JSON value and all values in it, each with its depth: 0 for the value itself, 1 for what it holds."""
    rest = [(0, value)]
    while rest:
        depth, each = rest.pop()
        yield depth, each
        if isinstance(each, dict | list):
            inner = each.values() if isinstance(each, dict) else each
            rest += [(depth + 1, child) for child in inner]


def strings(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, names of fields included."""
    for _, each in walk(value):
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            yield from each


def num_characters(value: Any) -> int:
    """Return the characters of all strings in a JSON value, names of fields included."""
    return sum(map(len, strings(value)))


def is_finite(value: Any) -> bool:
    """Return whether no number in a JSON value is NaN or infinite, which JSON has no words for."""
    return all(math.isfinite(each) for _, each in walk(value) if isinstance(each, float))


def is_nested_too_deeply(value: Any) -> bool:
    """Return whether a JSON value has more levels than `MAX_NESTING`."""
    return any(depth > MAX_NESTING for depth, _ in walk(value))
