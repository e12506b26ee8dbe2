"""Where two token sequences have read the same: the fewest tokens of each behind which their texts are equal.

    context   P P P
    recorded        a  b  c  d          reads  "a" "b" "c" "d"
    given           ab  cd              reads  "ab" "cd"         the fewest: a b and ab

The shorter text goes on until both are equal. Texts are decoded in their context (see `text_compare`), which is what
this costs, so what cannot be equal is not decoded.
"""

from rollout_hooks.capture.text_compare import CONTEXT_LEN, INCOMPLETE, Decode, may_agree


class EqualTexts:
    """Compares the tokens of one session.

    Args:
        decode: Token ids to text; more tokens never read shorter, but for an incomplete character at the end.
        max_tokens: Most given tokens behind which texts are compared.
    """

    def __init__(self, decode: Decode, *, max_tokens: int) -> None:
        self._decode = decode
        self._max_tokens = max_tokens
        # Of tokens that were compared: characters that they read alone.
        self._num_chars: dict[int, int] = {}

    def fewest(self, context: list[int], recorded: list[int], given: list[int]) -> tuple[int, int]:
        """The fewest recorded and given tokens, at least one each, behind which both read the same.

        If there are none: how many recorded ones were read to tell, and 0.
        """
        num_recorded = num_given = 1
        text, other = self._decode(context + recorded[:1]), self._decode(context + given[:1])
        shorter_len = min(len(text.rstrip(INCOMPLETE)), len(other.rstrip(INCOMPLETE)))
        while num_recorded <= len(recorded) and num_given <= min(len(given), self._max_tokens):
            if not may_agree(text, other):
                break
            behind = given[num_given : num_given + CONTEXT_LEN]
            # What follows tells whether two incomplete characters are the same one.
            is_told = bool(behind) or not text.endswith(INCOMPLETE)
            # The tokens must read like something; a text that has grown since the first ones does.
            is_longer = len(text.rstrip(INCOMPLETE)) > shorter_len
            if text == other and is_told and (is_longer or text != self._decode(context)):
                compared = context + given[: num_given + CONTEXT_LEN]
                if self._decode(context + recorded[:num_recorded] + behind) == self._decode(compared):
                    return num_recorded, num_given
            # The shorter text goes on; an incomplete character does not count yet.
            text_len, other_len = len(text.rstrip(INCOMPLETE)), len(other.rstrip(INCOMPLETE))
            if text_len < other_len or (text_len == other_len and num_recorded < len(recorded)):
                missing = other_len - text_len
                num_recorded, text = self._lengthen(context, recorded, num_recorded, missing=missing, end=other_len)
            else:
                missing = text_len - other_len
                num_given, other = self._lengthen(context, given, num_given, missing=missing, end=text_len)
        return num_recorded, 0

    def _lengthen(
        self, context: list[int], tokens: list[int], num_tokens: int, *, missing: int, end: int
    ) -> tuple[int, str]:
        """More of `tokens`, and their text behind the context: one more, or as many as leave it shorter than `end`.

        A text shorter than the other one decides nothing, so those between are not decoded. How many there are is
        guessed from what the tokens read alone.
        """
        num_sure = num_tokens
        while num_sure < len(tokens) and (missing := missing - self._num_chars_of(tokens[num_sure])) > 0:
            num_sure += 1
        if num_sure > num_tokens + 1:
            text = self._decode(context + tokens[:num_sure])
            if len(text.rstrip(INCOMPLETE)) < end:
                return num_sure, text
        return num_tokens + 1, self._decode(context + tokens[: num_tokens + 1])

    def _num_chars_of(self, token: int) -> int:
        if token not in self._num_chars:
            self._num_chars[token] = len(self._decode([token]))
        return self._num_chars[token]
