"""Comparison of the texts of token sequences, decoded in small windows and only where the tokens differ.

A token may be part of a character (byte-level vocabularies), and its text may depend on its neighbours (a leading space
is stripped at the start of a text). So tokens are never decoded alone, but after up to `CONTEXT_LEN` tokens that both
sequences share. Decoders show an incomplete character at the end as U+FFFD, which is not compared.
"""

from collections.abc import Callable, Iterator

import numpy as np

from rollout_hooks.capture.token_trie import Node, Point, TokenTrie

Decode = Callable[[list[int]], str]
"""Token ids to text. More tokens never give a shorter text, but for an incomplete character at the end."""

CONTEXT_LEN = 8
"""Tokens decoded before (and after) the ones that are compared: more than a character has bytes."""
INCOMPLETE = "\ufffd"
"""What decoders put in the place of bytes that are not a whole character."""
_WINDOW_LEN = 16
"""Tokens of a prompt whose text is at least as long as that of one recorded token."""


def may_agree(text: str, other: str) -> bool:
    """Return whether two texts can be beginnings of the same text."""
    text, other = text.rstrip(INCOMPLETE), other.rstrip(INCOMPLETE)
    return text.startswith(other) or other.startswith(text)


def ways_that_may_agree(
    trie: TokenTrie, point: Point, tokens: np.ndarray, *, decode: Decode, max_len: int | None
) -> Iterator[np.ndarray]:
    """Yield the ways on from a point (`TokenTrie.ways_on`) whose first token reads like the beginning of `tokens`."""
    context = trie.tokens_to(point, start=max(0, point.position - CONTEXT_LEN)).tolist()
    text = decode(context + tokens[:_WINDOW_LEN].tolist())
    if point.position < point.node.end:
        first = point.node.slice(point.position, point.position + 1).tolist()
        if may_agree(decode(context + first), text):
            yield from trie.ways_on(point, max_len=max_len)
        return
    for child in reversed(point.node.children.values()):
        if may_agree(_head(child, context, decode), text):
            yield from trie.ways_on(Point(child, child.start), max_len=max_len)


def _head(child: Node, context: list[int], decode: Decode) -> str:
    # The text is kept in the node, because many calls may part at one point.
    if child.head is None:
        child.head = decode([*context, int(child.tokens[0])])
    return child.head


def reads_the_same(trie: TokenTrie, point: Point, tokens: np.ndarray, *, decode: Decode) -> bool:
    """Return whether `tokens` read like a way on from a point, to its next boundary or to their own end.

    They are the rest of a prompt, at least one token, and `point` is where it leaves all recorded paths.
    """
    context = trie.tokens_to(point, start=max(0, point.position - CONTEXT_LEN)).tolist()
    for recorded in ways_that_may_agree(trie, point, tokens, decode=decode, max_len=None):
        before, recorded_text = decode(context), decode(context + recorded.tolist())
        num_tokens, text = 0, before
        while len(text) < len(recorded_text) and num_tokens < len(tokens):
            num_tokens = max(2 * num_tokens, len(recorded) + CONTEXT_LEN)
            text = decode(context + tokens[:num_tokens].tolist())
        if before in (text, recorded_text):
            continue
        if text.startswith(recorded_text) or (num_tokens >= len(tokens) and recorded_text.startswith(text)):
            return True
    return False


def fewest_equal(
    context: bytes, recorded: bytes, given: bytes, *, decode: Decode, max_tokens: int
) -> tuple[int, int] | None:
    """Find the fewest recorded and given tokens, at least one each, after which both read the same.

        context   P P P
        recorded        a  b  c  d          reads  "a" "b" "c" "d"
        given           ab  cd              reads  "ab" "cd"         the fewest: a b and ab

    Tokens are the bytes of int32 arrays, so that a caller can cache answers. Texts are compared up to `max_tokens`
    given tokens. The answer is the two numbers of tokens, or None if the texts part, or end, before they are equal.
    """
    before, ours, theirs = (np.frombuffer(tokens, dtype=np.int32).tolist() for tokens in (context, recorded, given))
    num_ours = num_theirs = 1
    unread = decode(before)
    text, other = decode(before + ours[:1]), decode(before + theirs[:1])
    while num_ours <= len(ours) and num_theirs <= min(len(theirs), max_tokens) and may_agree(text, other):
        behind = theirs[num_theirs : num_theirs + CONTEXT_LEN]
        # The next tokens tell whether two incomplete characters are the same one.
        is_told = bool(behind) or not text.endswith(INCOMPLETE)
        # Tokens without text do not count.
        if text == other != unread and is_told:
            compared = decode(before + theirs[: num_theirs + CONTEXT_LEN])
            if decode(before + ours[:num_ours] + behind) == compared:
                # More bytes of a character that stays incomplete read no longer.
                is_part = text.endswith(INCOMPLETE)
                while is_part and num_ours < len(ours) and decode(before + ours[: num_ours + 1] + behind) == compared:
                    num_ours += 1
                return num_ours, num_theirs
        # Lengthen the shorter text; an incomplete character does not count yet.
        lead = len(text.rstrip(INCOMPLETE)) - len(other.rstrip(INCOMPLETE))
        if lead < 0 or (lead == 0 and num_ours < len(ours)):
            num_ours += 1
            text = decode(before + ours[:num_ours])
        else:
            num_theirs += 1
            other = decode(before + theirs[:num_theirs])
    return None
