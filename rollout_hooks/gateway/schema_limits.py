"""How large the JSON schemas of a prescribed form may be, so that vLLM's engine compiles the form in seconds."""

import json
import re
from collections.abc import Sequence
from typing import Any

from rollout_hooks.gateway import limits
from rollout_hooks.gateway.errors import refused
from rollout_hooks.gateway.json_values import walk

# An escape or a class of characters, which hold no repeats, or a repeat and whether it repeats a group.
_REPEAT = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|(?P<group>\))?\{(?P<least>\d+)(?:,(?P<most>\d*))?\}", re.DOTALL)


def check_size(schemas: Sequence[Any], *, param: str) -> None:
    """Raise ApiError (400) if some schemas are together larger than `limits` allows."""
    values = list(walk(list(schemas)))
    objects = [each for _, each in values if isinstance(each, dict)]
    patterns = [each["pattern"] for each in objects if isinstance(each.get("pattern"), str)]
    named = [each["patternProperties"] for each in objects if isinstance(each.get("patternProperties"), dict)]
    patterns += [pattern for each in named for pattern in each]
    sizes = [
        ("characters", len(json.dumps(schemas)), limits.MAX_SCHEMA_LEN),
        ("levels", max(depth for depth, _ in values) - 1, limits.MAX_NESTING),
        ("properties in one object", _longest(objects, "properties", dict), limits.MAX_PROPERTIES),
        ("values in enumerations", sum(_longest([each], "enum", list) for each in objects), limits.MAX_ENUM),
        ("optional repeats in patterns", sum(map(num_repeats, patterns)), limits.MAX_REPEATS),
    ]
    for what, size, limit in sizes:
        if size > limit:
            message = f"{param}: the JSON schema has {size} {what}, and {limit} are the most"
            raise refused(f"{message}; simplify it, or leave the constraint out", param=param)


def num_repeats(pattern: str) -> int:
    """Return how often a pattern may repeat something beyond what it must.

    `a{2,5}` has 3; `a{5}` and `a*` have none. `a{5,}` is written out, so it has 5. A counted group may hold the other
    repeats, so its count multiplies their sum.
    """
    num_optional, factor = 0, 1
    for match in _REPEAT.finditer(pattern):
        if match["least"] is None:
            continue
        least, most = _number(match["least"]), _number(match["most"] or match["least"])
        if match["most"] is not None:
            num_optional += most - least if match["most"] else least
        if match["group"]:
            factor *= max(1, most)
    return num_optional * factor


def _number(digits: str) -> int:
    # Python reads no number of more than 4,300 digits.
    return int(digits[:9])


def _longest(objects: Sequence[dict[str, Any]], key: str, kind: type) -> int:
    return max((len(each[key]) for each in objects if isinstance(each.get(key), kind)), default=0)
