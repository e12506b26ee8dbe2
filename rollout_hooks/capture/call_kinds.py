"""How the prompt of an LLM call relates to what the session recorded before it, told from the tokens.

A recorded path has *boundaries*: places where a call's prompt or output ended. The kind of a call follows from where
its prompt leaves the recorded paths (`|` marks boundaries):

    recorded   P P P | a a | t t g | b b |      P root prompt; a, b generated; t environment, g generation prompt
    prompt     P P P   a a   t t g   b b  u u   continuation: goes on from the end of a path
    prompt     P P P   a a   v v g              fork: parts at a boundary
    prompt     P P P   a a   t v g              fork: parts inside t, the text that followed a boundary
    prompt     P P P   a a   t v b b v g        fork: v quotes an output, which is no turn of the model there
    prompt     P P P   a a   t v g   b b  u u   rewrite: parts inside t, but carries the later turn along
    prompt     P P P   a x   t t g              rewrite: parts inside generated tokens
    prompt     P P Q   ...                      rewrite: parts inside the root prompt
    prompt     P P P   y     t t g              drift, if y reads like a a

The kind is that of the prompt as it is sent, after healing (`realign`). So DRIFT is what could not be healed. Kinds are
only counted; what is trained follows from the tokens alone (`SessionTree.locate`).
"""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from itertools import islice

import numpy as np

from rollout_hooks.capture.text_compare import Decode, reads_the_same
from rollout_hooks.capture.token_trie import Point, TokenTrie

_OUTPUT_END_LEN = 4
"""Last tokens of an output by which it is recognised in a later prompt."""
_LEAD_LEN = 4
"""Last tokens of a prompt by which it is recognised that a turn of the model begins."""
_MAX_OUTPUTS = _MAX_PLACES = 64
"""Most earlier outputs that are looked for in a prompt, and most places of one that are looked at."""


class CallKind(StrEnum):
    """The kind of a call: the first in this list whose description holds."""

    ROOT = "root"
    """The prompt shares no token with any recorded path, such as that of a session's first call."""
    CONTINUATION = "continuation"
    """The prompt begins with all tokens of a recorded path, generated ones included, that nothing continues yet."""
    DRIFT = "drift"
    """The prompt leaves a recorded path, but reads the same to the next boundary or to the end of the prompt."""
    FORK = "fork"
    """One of three: the prompt ends inside a recorded path, after a boundary; or it begins with the whole prompt of a
    running call; or it leaves the recorded paths at a boundary, where they part themselves, or in environment text
    after a boundary, and has no turn of the model that ends like an output recorded after that place."""
    REWRITE = "rewrite"
    """Any other prompt: text that an earlier call read or generated was changed."""


def classify(
    trie: TokenTrie, prompt: np.ndarray, *, num_outputs: Mapping[int, int], decode: Decode | None = None
) -> tuple[CallKind, Point]:
    """Return the kind of a call with this prompt (N,) int32, and the point where the prompt leaves the recorded paths.

    `num_outputs` has the number of generated tokens of each completed call. Paths of other calls end with their prompt.
    Without `decode`, drift is not told from other changes.
    """
    point = trie.walk(prompt)
    node, position = point
    if position == 0:
        return CallKind.ROOT, point
    if position == node.end and not node.children:
        is_whole_path = any(end == position and call in num_outputs for end, call in reversed(node.ends))
        return (CallKind.CONTINUATION if is_whole_path else CallKind.FORK), point
    rest = prompt[position:]
    if not rest.size:
        return (CallKind.FORK if trie.last_boundary(point) else CallKind.REWRITE), point
    if decode is not None and reads_the_same(trie, point, rest, decode=decode):
        return CallKind.DRIFT, point
    return (CallKind.FORK if _is_fork(trie, point, prompt, num_outputs) else CallKind.REWRITE), point


def _is_fork(trie: TokenTrie, point: Point, prompt: np.ndarray, num_outputs: Mapping[int, int]) -> bool:
    if _repeats_turn(trie, point, prompt, num_outputs):
        return False
    node, position = point
    if trie.is_at_boundary(point):
        return True
    if position == node.end:
        # A single child is left if the others belonged to calls that failed.
        if len(node.children) > 1:
            return True
        (node,) = node.children.values()
    is_in_environment = node.source[position - node.start] < 0
    return bool(is_in_environment) and trie.last_boundary(point) > 0


def _repeats_turn(trie: TokenTrie, point: Point, prompt: np.ndarray, num_outputs: Mapping[int, int]) -> bool:
    """Return whether the prompt, after the shared tokens, has a turn of the model that is recorded there.

    It is known by its end: the last four tokens, or a shorter output and the token before it. So a turn is also found
    if the history shortens it (chat templates drop the reasoning of earlier turns). Newest branches are looked for
    first.
    """
    text = prompt[point.position :].tobytes()
    outputs = (
        (Point(node, end), num_outputs[call])
        for node in trie.nodes_behind(point)
        for end, call in reversed(node.ends)
        if call in num_outputs and end - num_outputs[call] >= point.position
    )
    for end, num_output in islice(outputs, _MAX_OUTPUTS):
        start = end.position - num_output
        wanted = trie.tokens_to(end, start=end.position - min(_OUTPUT_END_LEN, num_output + 1))
        lead = _lead(trie.tokens_to(end, start=max(0, start - _LEAD_LEN))[:-num_output], prompt)
        for found in islice(_places(text, wanted), _MAX_PLACES):
            num_read = found + len(wanted)
            is_shortened = start == point.position and num_read <= num_output
            first = max(point.position, point.position + num_read - num_output) - len(lead)
            before = prompt[max(0, first) : point.position + num_read - 1]
            if is_shortened or next(_places(before.tobytes(), lead), None) is not None:
                return True
    return False


def _lead(before: np.ndarray, prompt: np.ndarray) -> np.ndarray:
    """Return the last tokens (at most 4) before an output that also end the prompt: the model's turn begins there."""
    num_tokens = min(len(before), _LEAD_LEN, len(prompt))
    differs = np.flatnonzero(before[len(before) - num_tokens :] != prompt[len(prompt) - num_tokens :])
    return before[len(before) - num_tokens + (int(differs[-1]) + 1 if differs.size else 0) :]


def _places(text: bytes, wanted: np.ndarray) -> Iterator[int]:
    """Yield where tokens stand in a text of tokens, both int32."""
    at = text.find(wanted.tobytes())
    while at >= 0:
        if at % wanted.itemsize == 0:
            yield at // wanted.itemsize
        at = text.find(wanted.tobytes(), at + 1)
