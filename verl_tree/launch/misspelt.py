"""A misspelt option of a command line: what Hydra says of it, in our words and with what was meant.

Hydra's own advice is to add the option with a `+`. A misspelt one is then accepted, and read by nobody.
"""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from hydra.errors import HydraException

_REFUSED = re.compile(r"Could not override '(?P<key>[^']+)'")


def misspelt_option(error: HydraException, values: Mapping[str, Any]) -> str | None:
    """Return the refusal of an option that is not there, or None if the error is another one.

    Args:
        error: What Hydra raised when it composed the configuration.
        values: The options that there are, nested as in a config file.
    """
    found = _REFUSED.match(str(error))
    if found is None or "is not in struct" not in str(error.__cause__):
        return None
    key = found["key"]
    meant = _close_to(key.split("."), values)
    question = f"; did you mean {meant}?" if meant else "."
    return f"{key}: no such option{question} One that your own code reads is added with a plus: +{key}=VALUE"


def _close_to(names: list[str], values: Mapping[str, Any]) -> str | None:
    """Return the key that is like the given one in the first name that is not there, if one is."""
    for number, name in enumerate(names):
        if name not in values:
            close = get_close_matches(name, list(values), n=1)
            return ".".join([*names[:number], *close, *names[number + 1 :]]) if close else None
        if not isinstance(values[name], Mapping):
            return None
        values = values[name]
    return None
