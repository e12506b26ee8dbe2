"""How large the JSON schemas of a prescribed form may be, so that vLLM's engine compiles the form in seconds."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from rollout_hooks.gateway import limits
from rollout_hooks.gateway.errors import refused
from rollout_hooks.gateway.json_values import walk

# A character (escapes and classes are one), or a counted repeat of the item before it; XGrammar takes spaces in counts.
_ITEM = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\{ *(?P<least>\d+) *(?P<range>, *(?P<most>\d*) *)?\}|.", re.DOTALL)
_MOST = 10**9


def check_size(schemas: Sequence[Any], *, param: str) -> None:
    """Raise ApiError (400) if some schemas are together larger than `limits` allows."""
    for what, size, limit in _sizes(schemas):
        if size > limit:
            message = f"{param}: the JSON schema has {size} {what}, and {limit} are the most"
            raise refused(f"{message}; simplify it, or leave the constraint out", param=param)


def _sizes(schemas: Sequence[Any]) -> Iterator[tuple[str, int, int]]:
    """Yield what is measured, how much there is, and how much may be; the quickest first, which may stop the rest."""
    yield "characters", len(json.dumps(schemas)), limits.MAX_SCHEMA_LEN
    values = list(walk(list(schemas)))
    objects = [each for _, each in values if isinstance(each, dict)]
    yield "levels", max(depth for depth, _ in values) - 1, limits.MAX_NESTING
    yield "properties in one object", _longest(objects, "properties", dict), limits.MAX_PROPERTIES
    yield "values in enumerations", sum(_longest([each], "enum", list) for each in objects), limits.MAX_ENUM
    patterns = [each["pattern"] for each in objects if isinstance(each.get("pattern"), str)]
    named = [each["patternProperties"] for each in objects if isinstance(each.get("patternProperties"), dict)]
    patterns += [pattern for each in named for pattern in each]
    repeats = [count_repeats(pattern) for pattern in patterns]
    yield "characters that repeats add to patterns", sum(added for added, _ in repeats), limits.MAX_REPEATED_LEN
    yield "optional repeats in patterns", sum(optional for _, optional in repeats), limits.MAX_REPEATS


def count_repeats(pattern: str) -> tuple[int, int]:
    """Return how many characters the counted repeats of a pattern add to it, and how many of them may be left out.

    XGrammar writes counted repeats out: `a{5}` adds 4, `(ab){2,3}` adds 4, `a*` adds nothing. `a{2,5}` may leave out 3
    repeats. `a{5,}` is written `aaaaaa*`: it adds 5, which count as optional, too. The counts of nested ones multiply.
    """
    groups = [(0, 0)]  # of each open group, the characters when written out and the optional repeats
    last = (0, 0)  # the same of the item that a repeat would repeat
    num_plain = 0
    for match in _ITEM.finditer(pattern):
        item = match[0]
        if match["least"] is not None:
            more, optional = _more(match)
            new = (min(_MOST, last[0] * more), min(_MOST, last[1] * more + optional))
            last = _sum(last, new)
        elif item == "(":
            groups.append((0, 0))
            continue
        elif item == ")" and len(groups) > 1:
            new = last = groups.pop()
        elif item in "*+?^$":
            continue  # adds nothing, and a repeat behind it repeats what is before it
        else:
            new = last = (1, 0)
            num_plain += 1
        groups[-1] = _sum(groups[-1], new)
    written, optional = map(sum, zip(*groups, strict=True))
    return written - num_plain, optional


def _more(match: re.Match[str]) -> tuple[int, int]:
    """Return how often a counted repeat writes its item beyond the first time, and how many of these are optional."""
    # Python reads no number of more than 4,300 digits.
    least, most = (int((match[name] or match["least"])[:9]) for name in ("least", "most"))
    if match["range"] and not match["most"]:
        return least, least
    return max(0, most - 1), max(0, most - least)


def _sum(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return a[0] + b[0], a[1] + b[1]


def _longest(objects: Sequence[dict[str, Any]], key: str, kind: type) -> int:
    return max((len(each[key]) for each in objects if isinstance(each.get(key), kind)), default=0)
