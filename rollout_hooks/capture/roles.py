"""The role of a leaf: what its branch was for, such as `planner`. The trainer compares the leaves of one role only.

A loop names it in a row's `extra_fields` (`Branch.finish` and the gateway do that). The worker tags the row with it, so
that the driver knows it without reading a column, and what stores or restores a row does it to its role, too.
"""

import re
from collections.abc import Mapping
from typing import Any

ROLE = "leaf_role"
"""Key in a row's `extra_fields`, and tag of the row in TransferQueue. Leaves without a role have neither."""

_NAME = re.compile(r"[A-Za-z0-9_./-]{1,64}")


def is_role(value: Any) -> bool:
    """Return whether a value can name a role."""
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def role_in(named: Mapping[str, Any], *, of: str) -> str | None:
    """Return the role that extra fields or tags name; None where they name none. `of` is whose they are.

    Raises:
        ValueError: What they name is no role.
    """
    return checked_role(named.get(ROLE), of=of)


def checked_role(value: Any, *, of: str) -> str | None:
    """Return a role, or None for none.

    Raises:
        ValueError: It is no role; the message begins with the value and whose it is.
    """
    if value is None or is_role(value):
        return value
    raise ValueError(f"role={value!r} of {of}: give 1 to 64 letters, digits and _ - . /, or None")
