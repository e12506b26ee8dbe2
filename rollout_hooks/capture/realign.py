"""Healing of drift: recorded tokens put in the place of others that read the same.

An agent that keeps its history as text sends it back through the tokenizer, which may cut the model's own text into
other tokens than the model sampled:

    recorded   P P P | a b c | t t | ...       `|` marks boundaries: where a call's prompt or output ended
    given      P P P   y   c   t t   u u       y reads like a b
    healed     P P P   a b c   t t   u u       what is sent: the model goes on from tokens that it sampled

Where the given tokens part from all recorded paths, the fewest tokens are looked for behind which both texts are equal
again; the recorded ones are spliced in and the comparison goes on behind them, so every drifted turn of a prompt heals.
A splice stands only if

- the text stays the same: both windows, with the tokens before and behind them, decode to equal strings;
- it replaces at most `max_tokens` tokens by at most as many;
- the given tokens then follow the recorded path to the next boundary, or end before it, and what they follow holds
  generated tokens. So text of the environment is replaced on the way to text that the model generated, and never for
  its own sake, when nothing would be won; and a changed history keeps its own tokens from the segment of the change on.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from rollout_hooks.capture.equal_texts import EqualTexts
from rollout_hooks.capture.text_compare import CONTEXT_LEN, Decode, ways_that_may_agree
from rollout_hooks.capture.token_arrays import common_prefix_len
from rollout_hooks.capture.token_trie import Point, TokenTrie

MAX_REPLACED_TOKENS = 64
"""Default bound of one splice, in tokens."""
_MAX_WAYS = 16
"""Ways on from one point that are compared token by token; many more than branches that begin with the same text."""


class Splice(NamedTuple):
    """Tokens `[given_start, given_end)` of the given sequence became `[start, end)` of the healed one."""

    given_start: int
    given_end: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Realignment:
    """A token sequence and what was spliced into it.

    Attributes:
        token_ids: (N,) int32, the healed sequence; the given one where there is no splice.
        splices: In ascending order.
    """

    token_ids: np.ndarray
    splices: tuple[Splice, ...] = ()

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Values of the given tokens (G,) for the healed ones (N,); a splice gets the largest of those it replaces."""
        parts, at = [], 0
        for splice in self.splices:
            largest = values[splice.given_start : splice.given_end].max()
            parts += [values[at : splice.given_start], np.repeat(largest, splice.end - splice.start)]
            at = splice.given_end
        return np.concatenate([*parts, values[at:]])

    def position(self, given: int) -> int:
        """Where a position of the given sequence lies in the healed one; inside a splice, at its start."""
        shift = 0
        for splice in self.splices:
            if given < splice.given_end:
                return min(given + shift, splice.start)
            shift = splice.end - splice.given_end
        return given + shift


class _Found(NamedTuple):
    """What stands for the given tokens at a place.

    Attributes:
        recorded: The tokens to splice in.
        num_replaced: How many of the given tokens they replace.
        num_read: How many of the given tokens from the place on decided it.
        read_end: Position in the trie behind all that decided it.
    """

    recorded: np.ndarray
    num_replaced: int
    num_read: int
    read_end: int


class _Known(NamedTuple):
    """Two texts found equal: the recorded tokens, and the given ones that they replace with the context behind."""

    recorded: bytes
    compared: bytes


class _Step(NamedTuple):
    """The state of a healing behind a splice, and what it depends on.

    Attributes:
        num_read: How many of the given tokens were read until then.
        read_end: Position in the trie behind all that was read.
        num_sound: How many splices stand, of those before this one.
        point: Where the splice ends.
    """

    num_read: int
    read_end: int
    num_sound: int
    point: Point


class _Healing(NamedTuple):
    """A prompt that was healed, for the next one that begins like it."""

    given: np.ndarray
    splices: tuple[Splice, ...]
    steps: list[_Step]
    """Those of the first splices; both `num_read` and `read_end` ascend."""


@dataclass(slots=True)
class Realigner:
    """Heals the prompts of one session.

    A turn that has drifted comes back in every later prompt; it is looked for once. Nothing is taken over but what
    would be found again, so a prompt heals as if it were the first:

    - a prompt goes on from the last state of the healing before it that depends on nothing but given tokens that both
      prompts share and on what has not changed in the trie since;
    - where there is one way on, the fewest tokens behind which the texts are equal depend on the context, the tokens
      compared and the context behind. So they are the same wherever these are.

    Attributes:
        trie: The recorded paths; no one else asks for its changes.
        decode: Token ids to text.
        max_tokens: Most tokens that one splice replaces, and most that it brings in.
    """

    trie: TokenTrie
    decode: Decode
    max_tokens: int = MAX_REPLACED_TOKENS
    _known: dict[bytes, _Known] = field(default_factory=dict)
    """Equal texts found before, by the tokens before them and the first ones replaced."""
    _last: _Healing | None = None
    """The last prompt with a splice."""
    _texts: EqualTexts = field(init=False)

    def __post_init__(self) -> None:
        self._texts = EqualTexts(self.decode, max_tokens=self.max_tokens)

    def realign(self, given: np.ndarray) -> Realignment:
        """Heal the drift of a token sequence.

        Args:
            given: (G,) int32.

        Returns:
            The healed sequence, which decodes to the same text.
        """
        trie = self.trie
        splices, steps = self._resume(given)
        if steps:
            num_sound, point, at = steps[-1].num_sound, steps[-1].point, splices[-1].given_end
            parts = [trie.tokens_to(point)]
            point, num_followed = trie.advance(point, given[at:])
            parts.append(given[at : at + num_followed])
            at += num_followed
        else:
            num_sound, point = 0, trie.walk(given)
            at, parts = point.position, [given[: point.position]]
        while True:
            if splices and self._is_sound(point, splices[num_sound:], is_at_end=at == len(given)):
                num_sound = len(splices)
            found = self._find_splice(point, given[at:]) if at < len(given) else None
            if found is None:
                break
            start, (point, num_known) = point.position, trie.advance(point, found.recorded)
            assert num_known == len(found.recorded)
            num_read, read_end = at + found.num_read, found.read_end
            if steps:
                num_read, read_end = max(num_read, steps[-1].num_read), max(read_end, steps[-1].read_end)
            steps.append(_Step(num_read, read_end, num_sound, point))
            splices.append(Splice(at, at + found.num_replaced, start, point.position))
            at += found.num_replaced
            point, num_followed = trie.advance(point, given[at:])
            parts += [found.recorded, given[at : at + num_followed]]
            at += num_followed
        if splices:
            self._last = _Healing(given, tuple(splices), steps)
        if not num_sound:
            return Realignment(given)
        if num_sound < len(splices):
            at = splices[num_sound - 1].given_end
            parts = [np.concatenate(parts)[: splices[num_sound - 1].end]]
        return Realignment(np.concatenate([*parts, given[at:]]), tuple(splices[:num_sound]))

    def _resume(self, given: np.ndarray) -> tuple[list[Splice], list[_Step]]:
        """The splices of the last prompt that are this one's too, and the state behind each."""
        changed = self.trie.take_lowest_change()
        if self._last is None:
            return [], []
        steps = self._last.steps
        del steps[bisect_right(steps, changed, key=attrgetter("read_end")) :]
        if not steps:
            return [], []
        shared_len = common_prefix_len(given, self._last.given)
        num_steps = bisect_right(steps, shared_len, key=attrgetter("num_read"))
        return list(self._last.splices[:num_steps]), steps[:num_steps]

    def _is_sound(self, point: Point, splices: list[Splice], *, is_at_end: bool) -> bool:
        """Whether the last splices lead to a boundary, or to the end, through generated tokens."""
        end = point.position if is_at_end else self.trie.last_boundary(point)
        if end < splices[-1].end:
            return False
        source = self.trie.source_to(point, start=splices[0].start)
        return bool((source[: end - splices[0].start] >= 0).any())

    def _find_splice(self, point: Point, given: np.ndarray) -> _Found | None:
        """Recorded tokens behind a point that read like the given ones; None if there are none.

        Of several ways on that read the same: the one that the given tokens then follow farthest, the newest of equals.
        """
        trie, (node, position) = self.trie, point
        if position == 0 or (position == node.end and not node.children):
            return None
        context = trie.tokens_to(point, start=max(0, position - CONTEXT_LEN))
        key = context.tobytes() + given[:CONTEXT_LEN].tobytes()
        known = self._known.get(key)
        if known is not None:
            recorded = np.frombuffer(known.recorded, dtype=np.int32)
            num_compared = len(known.compared) // given.itemsize
            is_only_way = np.array_equal(node.slice(position, position + len(recorded)), recorded)
            if is_only_way and given[:num_compared].tobytes() == known.compared:
                return _Found(recorded, num_compared - CONTEXT_LEN, num_compared, position + len(recorded) + 1)
        window = given[: self.max_tokens + CONTEXT_LEN]
        if position < node.end:
            ways = trie.ways_on(point, max_len=self.max_tokens)
        else:
            ways = ways_that_may_agree(trie, point, window, decode=self.decode, max_len=self.max_tokens)
        num_common = node.end - position  # the tokens that all ways begin with
        best, most_followed = None, -1
        num_read, read_end = self.max_tokens + CONTEXT_LEN, position + self.max_tokens + 1
        for way in islice(ways, _MAX_WAYS):
            num_recorded, num_replaced = self._texts.fewest(context.tolist(), way.tolist(), window.tolist())
            recorded = way[:num_recorded].copy()
            if num_recorded <= num_common:
                if not num_replaced:
                    return None
                num_compared = num_replaced + CONTEXT_LEN
                if num_recorded < len(way) and num_compared <= len(window):
                    self._known[key] = _Known(recorded.tobytes(), window[:num_compared].tobytes())
                return _Found(recorded, num_replaced, num_compared, position + num_recorded + 1)
            if not num_replaced:
                continue
            end, num_followed = trie.advance(trie.advance(point, recorded)[0], given[num_replaced:])
            num_read = max(num_read, num_replaced + num_followed + 1)
            read_end = max(read_end, end.position + 1)
            if num_followed > most_followed:
                best, most_followed = (recorded, num_replaced), num_followed
        return None if best is None else _Found(*best, num_read, read_end)
