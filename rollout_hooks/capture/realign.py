"""Healing of drift: given tokens are replaced by recorded ones that read the same.

An agent that keeps its history as text sends it back through the tokenizer. That may cut the model's own text into
other tokens than the model sampled:

    recorded   P P P | a b c | t t | ...       `|` marks boundaries: where a call's prompt or output ended
    given      P P P   y   c   t t   u u       y reads like a b
    healed     P P P   a b c   t t   u u       what is sent: the model goes on from tokens that it sampled

Where the given tokens leave all recorded paths, `heal` finds the fewest tokens after which both texts are equal again.
It puts in the recorded ones and goes on after them, so every drifted turn of a prompt heals. Such a *splice* has at
most `max_tokens` tokens on either side. It stands only if the given tokens then follow the recorded path to the next
boundary, or end before it, and pass generated tokens on the way; docs/capture.md says why. A changed history keeps its
own tokens from the last boundary before the change on.
"""

from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np

from rollout_hooks.capture.text_compare import CONTEXT_LEN, Compare, Decode, fewest_equal, ways_that_may_agree
from rollout_hooks.capture.token_trie import Point, TokenTrie

MAX_REPLACED_TOKENS = 64
"""Most tokens of one splice, by default."""
_MAX_WAYS = 16
"""Most ways on from one point that are compared. Far fewer branches begin with the same text."""


class Splice(NamedTuple):
    """Tokens `[given_start, given_end)` of the given sequence became `[start, end)` of the healed one."""

    given_start: int
    given_end: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Realignment:
    """A token sequence (N,) int32 and its splices in ascending order; without splices it is the given sequence."""

    token_ids: np.ndarray
    splices: tuple[Splice, ...] = ()

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Carry values of the given tokens (G,) over to the healed ones (N,); a splice gets the largest it replaces."""
        parts, at = [], 0
        for splice in self.splices:
            largest = values[splice.given_start : splice.given_end].max()
            parts += [values[at : splice.given_start], np.repeat(largest, splice.end - splice.start)]
            at = splice.given_end
        return np.concatenate([*parts, values[at:]])

    def position(self, given: int) -> int:
        """Return where a position of the given sequence lies in the healed one; inside a splice, that is its start."""
        shift = 0
        for splice in self.splices:
            if given < splice.given_end:
                return min(given + shift, splice.start)
            shift = splice.end - splice.given_end
        return given + shift


class _Found(NamedTuple):
    """Recorded tokens that replace given ones, and where the given tokens after these lead."""

    recorded: np.ndarray
    num_replaced: int
    num_followed: int
    end: Point


def heal(
    trie: TokenTrie,
    given: np.ndarray,
    *,
    decode: Decode,
    max_tokens: int = MAX_REPLACED_TOKENS,
    compare: Compare | None = None,
) -> Realignment:
    """Heal the drift of a prompt, `given` (G,) int32; the result decodes to the same text.

    It depends on nothing but what is recorded and what is given. `max_tokens` limits both sides of a splice. `compare`
    is `fewest_equal` with `decode` and `max_tokens` bound; a cached one is faster.
    """
    compare = compare or partial(fewest_equal, decode=decode, max_tokens=max_tokens)
    point = trie.walk(given)
    at = point.position
    splices: list[Splice] = []
    replacements: list[np.ndarray] = []
    num_sound = 0
    while at < len(given):
        found = _find_splice(trie, point, given[at:], decode=decode, max_tokens=max_tokens, compare=compare)
        if found is None:
            break
        end = point.position + len(found.recorded)
        splices.append(Splice(at, at + found.num_replaced, point.position, end))
        replacements.append(found.recorded)
        point, at = found.end, at + found.num_replaced + found.num_followed
        if _is_sound(trie, point, splices[num_sound:], is_at_end=at == len(given)):
            num_sound = len(splices)
    if not num_sound:
        return Realignment(given)
    parts, at = [], 0
    for splice, recorded in zip(splices[:num_sound], replacements, strict=False):
        parts += [given[at : splice.given_start], recorded]
        at = splice.given_end
    return Realignment(np.concatenate([*parts, given[at:]]), tuple(splices[:num_sound]))


def _is_sound(trie: TokenTrie, point: Point, splices: list[Splice], *, is_at_end: bool) -> bool:
    """Return whether the last splices lead to a boundary, or to the end, through generated tokens."""
    end = point.position if is_at_end else trie.last_boundary(point)
    if end < splices[-1].end:
        return False
    source = trie.source_to(point, start=splices[0].start)
    return bool((source[: end - splices[0].start] >= 0).any())


def _find_splice(
    trie: TokenTrie, point: Point, given: np.ndarray, *, decode: Decode, max_tokens: int, compare: Compare
) -> _Found | None:
    """Find recorded tokens after a point that read like the first of the given ones.

    Of several ways on that read the same, take the one that the given tokens follow farthest, then the newest.
    """
    node, position = point
    if position == 0 or (position == node.end and not node.children):
        return None
    context = trie.tokens_to(point, start=max(0, position - CONTEXT_LEN)).tobytes()
    window = given[: max_tokens + CONTEXT_LEN]
    if position < node.end:
        ways = trie.ways_on(point, max_len=max_tokens)
    else:
        ways = ways_that_may_agree(trie, point, window, decode=decode, max_len=max_tokens)
    best = None
    for way in islice(ways, _MAX_WAYS):
        equal = compare(context, way.tobytes(), window.tobytes())
        if equal is None:
            continue
        num_recorded, num_replaced = equal
        recorded = way[:num_recorded].copy()
        behind, _ = trie.advance(point, recorded)
        end, num_followed = trie.advance(behind, given[num_replaced:])
        if best is None or num_followed > best.num_followed:
            best = _Found(recorded, num_replaced, num_followed, end)
        if num_recorded <= node.end - position:
            break  # all ways begin with these tokens
    return best
