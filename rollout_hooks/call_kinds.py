"""How the prompt of an LLM call relates to what the session recorded before it: five kinds, told from the tokens.

A recorded path is cut into segments at its *boundaries*: where a call's prompt or a call's output ended. With L the
length of the longest prefix that the prompt shares with any recorded path (`|` marks boundaries):

    recorded   P P P | a a | t t g | b b |      P root prompt; a, b generated; t environment, g generation prompt
    prompt     P P P   a a   t t g   b b  u u   continuation: goes on from the end of a path
    prompt     P P P   a a   v v g              fork: parts at a boundary
    prompt     P P P   a a   t v g              fork: parts inside t, the text that followed a boundary
    prompt     P P P   a a   t v g   b b  u u   rewritten: parts inside t, but carries the later output along
    prompt     P P P   a x   t t g              rewritten: parts inside generated tokens
    prompt     P P Q   ...                      rewritten: parts inside the root prompt
    prompt     P P P   y     t t g              drift, if y reads like a a

The kind is counted, it decides nothing: what is trained follows from the tokens alone (`SessionTree.locate`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np


class CallKind(StrEnum):
    """Kind of a call; the first sentence that holds decides, in the order of this list."""

    ROOT = "root"
    """The prompt shares no token with any recorded path; the first call of a session is one."""
    CONTINUATION = "continuation"
    """The prompt begins with all tokens of a recorded path, generated ones included, that nothing continues yet."""
    DRIFT = "drift"
    """The prompt parts from a recorded path and still reads the same to the end of that segment, or of the prompt."""
    FORK = "fork"
    """The prompt ends behind a boundary without having parted, or begins with the whole prompt of a running call, or
    parts from the recorded paths at a boundary, where they part themselves, or in environment text behind a
    boundary, without repeating the end of an output that it leaves behind."""
    REWRITE = "rewrite"
    """Any other prompt: text that an earlier call read or generated was changed."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A path as the classification sees it, of N tokens.

    Attributes:
        token_ids: (N,) int64.
        is_generated: (N,) bool.
        boundaries: Ascending positions at which a call's prompt or output on this path ended; the last is N.
        is_completed: Whether the path ends with the output of a call (and not with the prompt of a running one).
    """

    token_ids: np.ndarray
    is_generated: np.ndarray
    boundaries: tuple[int, ...]
    is_completed: bool


def common_prefix_len(a: np.ndarray, b: np.ndarray) -> int:
    """Number of leading tokens that two token arrays share."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n


def classify(
    prompt: np.ndarray, recorded: Sequence[Recorded], *, decode: Callable[[list[int]], str] | None = None
) -> tuple[CallKind, int]:
    """Kind of a call with this prompt, and the number of tokens it shares with the recorded paths.

    Args:
        prompt: (N,) int64.
        recorded: Paths of completed calls and prompts of running ones.
        decode: Token ids to text; without it drift is not told from other changes.

    Returns:
        The kind and L, the longest common prefix in tokens.
    """
    shared = [common_prefix_len(prompt, path.token_ids) for path in recorded]
    num_shared = max(shared, default=0)
    if num_shared == 0:
        return CallKind.ROOT, 0
    closest = [path for path, length in zip(recorded, shared, strict=True) if length == num_shared]
    ahead = [path for path in closest if len(path.token_ids) > num_shared]
    if not ahead:
        is_whole_path = any(path.is_completed for path in closest)
        return (CallKind.CONTINUATION if is_whole_path else CallKind.FORK), num_shared
    is_behind_boundary = any(path.boundaries[0] <= num_shared for path in closest)
    if num_shared == len(prompt):
        return (CallKind.FORK if is_behind_boundary else CallKind.REWRITE), num_shared
    if decode is not None and any(_reads_the_same(prompt, path, num_shared, decode) for path in ahead):
        return CallKind.DRIFT, num_shared
    return (CallKind.FORK if _is_fork(prompt, closest, ahead, num_shared) else CallKind.REWRITE), num_shared


def _is_fork(prompt: np.ndarray, closest: list[Recorded], ahead: list[Recorded], num_shared: int) -> bool:
    if any(_repeats_output(prompt, path, num_shared) for path in ahead):
        return False
    is_at_boundary = any(num_shared in path.boundaries for path in closest)
    is_where_paths_part = len({int(path.token_ids[num_shared]) for path in ahead}) > 1
    # Else all paths ahead share the segment that the prompt parts from, and any of them tells what it is.
    is_in_environment = ahead[0].boundaries[0] < num_shared and not ahead[0].is_generated[num_shared]
    return is_at_boundary or is_where_paths_part or is_in_environment


def _reads_the_same(prompt: np.ndarray, path: Recorded, num_shared: int, decode: Callable[[list[int]], str]) -> bool:
    """Whether prompt and path, though their tokens differ, have the same text up to where the shorter one ends.

    The text is compared from the start of the segment in which they part, since single tokens may be parts of a
    character.
    """
    start = max((b for b in path.boundaries if b <= num_shared), default=0)
    end = next(b for b in path.boundaries if b > num_shared)
    recorded_text, text = decode(path.token_ids[start:end].tolist()), decode(prompt[start:].tolist())
    if not recorded_text or not text:
        return False
    return text.startswith(recorded_text) or recorded_text.startswith(text)


def _repeats_output(prompt: np.ndarray, path: Recorded, num_shared: int) -> bool:
    """Whether the prompt, behind the shared tokens, holds the end of an output that the path has there.

    The end is the last four tokens, or the whole output and the token before it. That finds histories that carry
    outputs along, shortened ones too (chat templates drop the reasoning of earlier turns).
    """
    rest = prompt[num_shared:].tobytes()
    for start, end in zip(path.boundaries, path.boundaries[1:], strict=False):
        if start < num_shared or not path.is_generated[start]:
            continue
        wanted = path.token_ids[max(end - 4, start - 1) : end].tobytes()
        at = rest.find(wanted)
        while at % prompt.itemsize and at >= 0:
            at = rest.find(wanted, at + 1)
        if at >= 0:
            return True
    return False
