"""How the prompt of an LLM call relates to what the session recorded before it, told from the tokens.

A recorded path has *boundaries*: places where a call's prompt or output ended. The kind of a call follows from where
its prompt leaves the recorded paths (`|` marks boundaries):

    recorded   P P P | a a | t t g | b b |      P root prompt; a, b generated; t environment, g generation prompt
    prompt     P P P   a a   t t g   b b  u u   continuation: goes on from the end of a path
    prompt     P P P   a a   v v g              fork: parts at a boundary
    prompt     P P P   a a   t v g              fork: parts inside t, the text that followed a boundary
    prompt     P P P   a a   t v g   b b  u u   rewrite: parts inside t, but carries the later output along
    prompt     P P P   a x   t t g              rewrite: parts inside generated tokens
    prompt     P P Q   ...                      rewrite: parts inside the root prompt
    prompt     P P P   y     t t g              drift, if y reads like a a

The kind is that of the prompt as it is sent, after healing (`realign`). So DRIFT is what could not be healed. Kinds are
only counted; what is trained follows from the tokens alone (`SessionTree.locate`).
"""

from collections.abc import Mapping
from enum import StrEnum
from itertools import islice

import numpy as np

from rollout_hooks.capture.text_compare import Decode, reads_the_same
from rollout_hooks.capture.token_trie import Point, TokenTrie

_OUTPUT_END_LEN = 4
"""Last tokens of an output by which it is recognised in a later prompt."""
_MAX_OUTPUTS = 64
"""Most earlier outputs that are looked for in a prompt."""


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
    after a boundary, and does not repeat the end of an output that is recorded after that place."""
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
    return (CallKind.FORK if _is_fork(trie, point, rest, num_outputs) else CallKind.REWRITE), point


def _is_fork(trie: TokenTrie, point: Point, rest: np.ndarray, num_outputs: Mapping[int, int]) -> bool:
    if _repeats_output(trie, point, rest, num_outputs):
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


def _repeats_output(trie: TokenTrie, point: Point, rest: np.ndarray, num_outputs: Mapping[int, int]) -> bool:
    """Return whether the prompt, after the shared tokens, holds the end of an output that is recorded there.

    The end is the last four tokens, or a shorter output and the token before it. So an output is also found if the
    history shortens it (chat templates drop the reasoning of earlier turns). Newest branches are looked for first.
    """
    text = rest.tobytes()
    outputs = (
        (Point(node, end), num_outputs[call])
        for node in trie.nodes_behind(point)
        for end, call in reversed(node.ends)
        if call in num_outputs and end - num_outputs[call] >= point.position
    )
    for end, num_output in islice(outputs, _MAX_OUTPUTS):
        wanted = trie.tokens_to(end, start=end.position - min(_OUTPUT_END_LEN, num_output + 1)).tobytes()
        at = text.find(wanted)
        while at % rest.itemsize and at >= 0:
            at = text.find(wanted, at + 1)
        if at >= 0:
            return True
    return False
