"""Settings of tests with random input: a few examples in CI, the same each time, and 1,000 new ones when asked for.

    python -m pytest --hypothesis-profile=fuzz --timeout=0 FILE

Input that once broke something stays in the test as an `@example`.
"""

from collections.abc import Callable
from typing import Any

from hypothesis import settings


def fuzzed(num_examples: int = 100) -> settings:
    """Return the settings of a test that takes so many examples, unless the profile `fuzz` (tests/conftest.py) does."""
    if settings.get_current_profile_name() == "fuzz":
        return settings(deadline=None)
    return settings(max_examples=num_examples, derandomize=True, deadline=None)


def outcome(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return what a call returns, or the message of its ValueError; any other error fails the test."""
    try:
        return call(), None
    except ValueError as error:
        return None, str(error)
