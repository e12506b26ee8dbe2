"""Healing of drift: given tokens are replaced by recorded ones that read the same.

An agent that keeps its history as text sends it back through the tokenizer. That may cut the model's own text into
other tokens than the model sampled:

    recorded   P P P | a b c | t t | ...       `|` marks boundaries: where a call's prompt or output ended
    given      P P P   y   c   t t   u u       y reads like a b
    healed     P P P   a b c   t t   u u       what is sent: the model goes on from tokens that it sampled

Where the given tokens leave all recorded paths, a `Healer` finds the fewest tokens after which both texts are equal
again. It puts in the recorded ones and goes on after them, so every drifted turn of a prompt heals. Such a *splice* has
at most `max_tokens` tokens on either side. It stands only if the given tokens then follow the recorded path to the next
boundary, or end before it, and pass generated tokens on the way; docs/capture.md says why. A changed history keeps its
own tokens from the last boundary before the change on.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from typing import NamedTuple

import numpy as np

from rollout_hooks.capture.text_compare import CONTEXT_LEN, Decode, fewest_equal, ways_that_may_agree
from rollout_hooks.capture.token_arrays import common_prefix_len
from rollout_hooks.capture.token_trie import Point, TokenTrie

MAX_REPLACED_TOKENS = 64
"""Most tokens of one splice, by default."""
_MAX_COMPARED = 4096
"""Text comparisons that a session remembers: one per place of drift, under 1 KB each."""
_MAX_KEPT = 4
"""Prompts whose steps a session keeps: about as many branches may take turns and each be healed from its last place."""
_NEVER = np.iinfo(np.int64).max
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


class _Step(NamedTuple):
    """A splice, where the given tokens lead behind it, and all that this depends on."""

    splice: Splice
    point: Point
    at: int  # the place in the given tokens that is at the point
    num_sound: int  # of the splices up to this one, those that stand if no more follow
    num_given: int  # the step depends on no given tokens behind these
    num_recorded: int  # nor on what is recorded behind this position


class _Healed(NamedTuple):
    """A prompt, its steps, and how often the trie had changed when they were made."""

    given: np.ndarray
    steps: list[_Step]
    num_changes: int


class Healer:
    """Heals the prompts of one session, each from where an earlier one leaves off.

    A drifted turn comes back in every later prompt. So the steps of the last few prompts are kept, and a prompt takes
    over those that depend on nothing that is given or recorded otherwise since. What comes out depends on nothing but
    what is recorded and what is given: a new healer finds the same. `max_tokens` limits both sides of a splice.
    """

    def __init__(self, trie: TokenTrie, *, decode: Decode, max_tokens: int) -> None:
        self._trie, self._decode, self._max_tokens = trie, decode, max_tokens
        self._kept: list[_Healed] = []
        # For turns that no kept prompt has at the same place.
        self.compare = lru_cache(_MAX_COMPARED)(partial(fewest_equal, decode=decode, max_tokens=max_tokens))

    def heal(self, given: np.ndarray) -> Realignment:
        """Heal the drift of a prompt, (G,) int32; it must not be changed afterwards. The result decodes to its text."""
        shared = [common_prefix_len(given, healed.given) for healed in self._kept]
        steps: list[_Step] = []
        if shared:
            nearest = int(np.argmax(shared))
            steps = self._known(self._kept[nearest], shared[nearest])
            if shared[nearest] == len(self._kept[nearest].given):
                del self._kept[nearest]
        self._go_on(given, steps)
        if steps:
            self._kept = [_Healed(given, steps, len(self._trie.changes)), *self._kept[: _MAX_KEPT - 1]]
        num_sound = steps[-1].num_sound if steps else 0
        if not num_sound:
            return Realignment(given)
        last = steps[num_sound - 1]
        token_ids = np.concatenate([self._trie.tokens_to(last.point), given[last.at :]])
        return Realignment(token_ids, tuple(step.splice for step in steps[:num_sound]))

    def _known(self, healed: _Healed, num_shared: int) -> list[_Step]:
        """Return the first steps of a kept prompt that hold for one that begins with the same tokens."""
        num_same = min(self._trie.changes[healed.num_changes :], default=_NEVER)
        num_steps = min(
            bisect_right(healed.steps, num_shared, key=lambda step: step.num_given),
            bisect_left(healed.steps, num_same, key=lambda step: step.num_recorded),
        )
        return healed.steps[:num_steps]

    def _go_on(self, given: np.ndarray, steps: list[_Step]) -> None:
        """Append the steps through a prompt to the first ones, which are known."""
        if steps:
            point, at, num_sound = steps[-1].point, steps[-1].at, steps[-1].num_sound
        else:
            point = self._trie.walk(given)
            at, num_sound = point.position, 0
        while at < len(given):
            found = self._find_splice(point, given[at:])
            if found is None:
                break
            end = point.position + len(found.recorded)
            splice = Splice(at, at + found.num_replaced, point.position, end)
            # Other ways on were followed as far as this one, at most.
            reach = self._max_tokens + found.num_followed
            num_given, num_recorded = at + reach + CONTEXT_LEN, point.position + reach
            point, at = found.end, at + found.num_replaced + found.num_followed
            first = steps[num_sound].splice if num_sound < len(steps) else splice
            if self._is_sound(point, first, splice, is_at_end=at == len(given)):
                num_sound = len(steps) + 1
            steps.append(_Step(splice, point, at, num_sound, num_given, num_recorded))

    def _is_sound(self, point: Point, first: Splice, last: Splice, *, is_at_end: bool) -> bool:
        """Return whether the splices `first` to `last` lead to a boundary, or to the end, through generated tokens."""
        end = point.position if is_at_end else self._trie.last_boundary(point)
        if end < last.end:
            return False
        source = self._trie.source_to(point, start=first.start)
        return bool((source[: end - first.start] >= 0).any())

    def _find_splice(self, point: Point, given: np.ndarray) -> _Found | None:
        """Find recorded tokens after a point that read like the first of the given ones.

        Of several ways on that read the same, take the one that the given tokens follow farthest, then the newest.
        """
        trie, max_tokens = self._trie, self._max_tokens
        node, position = point
        if position == 0 or (position == node.end and not node.children):
            return None
        context = trie.tokens_to(point, start=max(0, position - CONTEXT_LEN)).tobytes()
        window = given[: max_tokens + CONTEXT_LEN]
        if position < node.end:
            ways = trie.ways_on(point, max_len=max_tokens)
        else:
            ways = ways_that_may_agree(trie, point, window, decode=self._decode, max_len=max_tokens)
        best = None
        for way in islice(ways, _MAX_WAYS):
            equal = self.compare(context, way.tobytes(), window.tobytes())
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
