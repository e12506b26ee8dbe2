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

from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np

from rollout_hooks.text_compare import CONTEXT_LEN, INCOMPLETE, Decode, may_agree, ways_that_may_agree
from rollout_hooks.token_trie import Point, TokenTrie, common_prefix_len

MAX_REPLACED_TOKENS = 64
"""Default bound of one splice, in tokens."""
_MAX_WAYS = 16
"""Ways on from one point that are compared token by token; many more than branches that begin with the same text."""


_NOTHING = np.zeros(0, dtype=np.int32)


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


@dataclass(slots=True)
class Realigner:
    """Heals the prompts of one session.

    Attributes:
        trie: The recorded paths.
        decode: Token ids to text.
        max_tokens: Most tokens that one splice replaces, and most that it brings in.
    """

    trie: TokenTrie
    decode: Decode
    max_tokens: int = MAX_REPLACED_TOKENS
    _known: dict[bytes, tuple[np.ndarray, np.ndarray, int]] = field(default_factory=dict)
    """Splices found before, by the tokens before them and the first ones replaced: all the given tokens that were
    compared, the recorded ones, and how many of the given ones they replace. A turn that has drifted comes back in
    every later prompt; so it is decoded once."""
    _last: tuple[np.ndarray, Realignment] = (_NOTHING, Realignment(_NOTHING))
    """The last prompt with a splice. As a rule the next one begins with the same tokens, so with the same splices."""

    def realign(self, given: np.ndarray) -> Realignment:
        """Heal the drift of a token sequence.

        Args:
            given: (G,) int32.

        Returns:
            The healed sequence, which decodes to the same text.
        """
        last_given, last = self._last
        shared_len = common_prefix_len(given, last_given)
        known = tuple(splice for splice in last.splices if splice.given_end + CONTEXT_LEN <= shared_len)
        realignment = self._realign(given, known) if known else None
        if realignment is None:
            realignment = self._realign(given, ())
        if realignment.splices:
            self._last = (given, realignment)
        return realignment

    def _realign(self, given: np.ndarray, known: tuple[Splice, ...]) -> Realignment | None:
        """Heal, with the first splices taken over from the last prompt; None if these do not stand here."""
        at, known_len = (known[-1].given_end, known[-1].end) if known else (0, 0)
        prompt = np.concatenate([self._last[1].token_ids[:known_len], given[at:]]) if known else given
        point = self.trie.walk(prompt)
        at += point.position - known_len
        parts, splices = [prompt[: point.position]], list(known)
        sound = (0, 0, 0)  # number of splices and parts that stand, and of the given tokens that these cover
        while True:
            if splices and self._is_sound(point, splices[sound[0] :], is_at_end=at == len(given)):
                sound = (len(splices), len(parts), at)
            elif len(splices) == len(known) > 0:
                return None
            found = self._find_splice(point, given[at:]) if at < len(given) else None
            if found is None:
                break
            recorded, num_replaced = found
            splices.append(Splice(at, at + num_replaced, point.position, point.position + len(recorded)))
            point, num_known = self.trie.advance(point, recorded)
            assert num_known == len(recorded)
            at += num_replaced
            point, num_followed = self.trie.advance(point, given[at:])
            parts += [recorded, given[at : at + num_followed]]
            at += num_followed
        num_splices, num_parts, at = sound
        if not num_splices:
            return Realignment(given)
        return Realignment(np.concatenate([*parts[:num_parts], given[at:]]), tuple(splices[:num_splices]))

    def _is_sound(self, point: Point, splices: list[Splice], *, is_at_end: bool) -> bool:
        """Whether the last splices lead to a boundary, or to the end, through generated tokens."""
        end = point.position if is_at_end else self.trie.last_boundary(point)
        if end < splices[-1].end:
            return False
        source = self.trie.source_to(point, start=splices[0].start)
        return bool((source[: end - splices[0].start] >= 0).any())

    def _find_splice(self, point: Point, given: np.ndarray) -> tuple[np.ndarray, int] | None:
        """Recorded tokens behind a point, and how many of the given ones they replace; None if there are none.

        Of several ways on that read the same: the one that the given tokens then follow farthest, the newest of equals.
        """
        trie = self.trie
        if point.position == 0 or (point.position == point.node.end and not point.node.children):
            return None
        context = trie.tokens_to(point, start=max(0, point.position - CONTEXT_LEN))
        key = context.tobytes() + given[:CONTEXT_LEN].tobytes()
        if key in self._known:
            compared, recorded, num_given = self._known[key]
            is_same = np.array_equal(given[: len(compared)], compared)
            if is_same and trie.advance(point, recorded)[1] == len(recorded):
                return recorded, num_given
        best, most_followed = None, -1
        window = given[: self.max_tokens + CONTEXT_LEN]
        ways = ways_that_may_agree(trie, point, given, decode=self.decode, max_len=self.max_tokens)
        for way in islice(ways, _MAX_WAYS):
            num_recorded, num_given = self._equal_texts(context.tolist(), way.tolist(), window.tolist())
            if not num_recorded:
                continue
            recorded = way[:num_recorded].copy()
            num_followed = trie.advance(trie.advance(point, recorded)[0], given[num_given:])[1]
            if num_followed > most_followed:
                best, most_followed = (recorded, num_given), num_followed
        if best is not None and best[1] + CONTEXT_LEN <= len(window):
            self._known[key] = (window[: best[1] + CONTEXT_LEN].copy(), *best)
        return best

    def _equal_texts(self, context: list[int], recorded: list[int], given: list[int]) -> tuple[int, int]:
        """The fewest recorded and given tokens, at least one each, behind which both read the same; (0, 0) if none."""
        num_recorded = num_given = 1
        before = self.decode(context)
        text, other = self.decode(context + recorded[:1]), self.decode(context + given[:1])
        while num_recorded <= len(recorded) and num_given <= min(len(given), self.max_tokens):
            if not may_agree(text, other):
                break
            behind = given[num_given : num_given + CONTEXT_LEN]
            # What follows tells whether two incomplete characters are the same one.
            is_told = bool(behind) or not text.endswith(INCOMPLETE)
            if text == other != before and is_told:
                compared = context + given[: num_given + CONTEXT_LEN]
                if self.decode(context + recorded[:num_recorded] + behind) == self.decode(compared):
                    return num_recorded, num_given
            # The shorter text goes on; an incomplete character does not count yet.
            lead = len(text.rstrip(INCOMPLETE)) - len(other.rstrip(INCOMPLETE))
            if lead < 0 or (lead == 0 and num_recorded < len(recorded)):
                num_recorded += 1
                text = self.decode(context + recorded[:num_recorded])
            else:
                num_given += 1
                other = self.decode(context + given[:num_given])
        return 0, 0
