"""Whether token sequences read the same: texts are decoded in small windows, and only where the tokens differ.

A token may be a part of a character (byte-level vocabularies), and its text may depend on its neighbours (a leading
space that is stripped at the start of a text). So a sequence is decoded behind `CONTEXT_LEN` tokens that both sequences
have before it, never alone. Decoders show an incomplete character at the end of a text as U+FFFD; it is left out of
comparisons.
"""

from collections.abc import Callable, Iterator

import numpy as np

from rollout_hooks.capture.token_trie import Node, Point, TokenTrie

Decode = Callable[[list[int]], str]
"""Token ids to text. More tokens never read shorter, but for an incomplete character at the end."""
Compare = Callable[[bytes, bytes, bytes], tuple[int, int] | None]
"""`fewest_equal` with its options bound."""

CONTEXT_LEN = 8
"""Tokens decoded before (and behind) the ones that are compared: more than a character has bytes."""
INCOMPLETE = "\ufffd"
"""What decoders put where bytes are no (whole) character."""
_WINDOW_LEN = 16
"""Tokens of a prompt that hold at least the text of one recorded token."""


def may_agree(text: str, other: str) -> bool:
    """Whether two texts can be beginnings of the same text."""
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
    # The text is kept in the node, since many calls may part at one point.
    if child.head is None:
        child.head = decode([*context, int(child.tokens[0])])
    return child.head


def reads_the_same(trie: TokenTrie, point: Point, tokens: np.ndarray, *, decode: Decode) -> bool:
    """Whether `tokens`, the rest of a prompt, read like a recorded way on, to its next boundary or to their own end.

    Args:
        trie: The recorded paths.
        point: Where `tokens` part from all of them.
        tokens: (N,), at least one.
        decode: Token ids to text.
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
    """Find the fewest recorded and given tokens, at least one each, behind which both read the same.

        context   P P P
        recorded        a  b  c  d          reads  "a" "b" "c" "d"
        given           ab  cd              reads  "ab" "cd"         the fewest: a b and ab

    Args:
        context: Tokens before both, as the bytes of int32; as bytes, so that a caller can remember answers.
        recorded: Recorded tokens, likewise.
        given: Given tokens, likewise.
        decode: Token ids to text.
        max_tokens: Most given tokens behind which texts are compared.

    Returns:
        Number of recorded and of given tokens; None if the texts part, or end, before they are equal.
    """
    before, ours, theirs = (np.frombuffer(tokens, dtype=np.int32).tolist() for tokens in (context, recorded, given))
    num_ours = num_theirs = 1
    unread = decode(before)
    text, other = decode(before + ours[:1]), decode(before + theirs[:1])
    while num_ours <= len(ours) and num_theirs <= min(len(theirs), max_tokens) and may_agree(text, other):
        behind = theirs[num_theirs : num_theirs + CONTEXT_LEN]
        # What follows tells whether two incomplete characters are the same one.
        is_told = bool(behind) or not text.endswith(INCOMPLETE)
        # Tokens that read like nothing do not count.
        if text == other != unread and is_told:
            compared = before + theirs[: num_theirs + CONTEXT_LEN]
            if decode(before + ours[:num_ours] + behind) == decode(compared):
                return num_ours, num_theirs
        # The shorter text goes on; an incomplete character does not count yet.
        lead = len(text.rstrip(INCOMPLETE)) - len(other.rstrip(INCOMPLETE))
        if lead < 0 or (lead == 0 and num_ours < len(ours)):
            num_ours += 1
            text = decode(before + ours[:num_ours])
        else:
            num_theirs += 1
            other = decode(before + theirs[:num_theirs])
    return None
