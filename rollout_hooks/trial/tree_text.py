r"""The rows of a session as a tree of text.

    prompt, 9 tokens: '<|im_start|>user\nq<|im_end|>\n'
    call 0 (root), 4 tokens, reward +0.2: 'plan'
    ├─ call 1 (continuation), 3 tokens: 'yes'
    │  leaf 0: reward 1.0
    └─ environment, 5 tokens: 'again'
       call 2 (fork), 2 tokens: 'no'
       leaf 1: reward 0.0

A node is a run of tokens of one origin that belong to the same leaves.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

MAX_TEXT = 160
"""Most characters of a node's text; the middle of a longer one is left out."""

PROMPT, ENVIRONMENT = -2, -1


@dataclass(frozen=True, slots=True)
class TextPath:
    """A leaf to be drawn.

    `origins` says of each token where it comes from: the number of the call that sampled it, `PROMPT` or `ENVIRONMENT`.
    `rewards` are those of nodes, by the position of a token. `end` is the line below the leaf.
    """

    token_ids: np.ndarray  # (N,) int64
    origins: np.ndarray  # (N,) int64
    end: str
    rewards: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of_stretches(
        cls,
        token_ids: Sequence[int],
        stretches: Sequence[tuple[int, int, int]],
        *,
        prompt_len: int,
        end: str,
        rewards: tuple[tuple[int, float], ...] = (),
    ) -> "TextPath":
        """Make a path of which the calls of `stretches` (call, start, end) sampled those tokens."""
        origins = np.full(len(token_ids), ENVIRONMENT)
        origins[:prompt_len] = PROMPT
        for call, start, stop in stretches:
            origins[start:stop] = call
        return cls(np.asarray(token_ids), origins, end, rewards)


def draw(paths: Sequence[TextPath], *, decode: Callable[[list[int]], str], kinds: Mapping[int, str]) -> list[str]:
    """Return the lines of a tree. `kinds` has the kind of each call."""
    lines = []
    for node in _nodes(paths):
        lines.append(node.head + _describe(node, decode, kinds))
        lines += [f"{node.indent}{path.end}" for path in node.paths if len(path.token_ids) == node.stop]
    return lines


def num_nodes_and_tokens(paths: Sequence[TextPath]) -> tuple[int, int]:
    """Return how many nodes the tree of these paths has, and how many tokens."""
    lens = [node.stop - node.start for node in _nodes(paths)]
    return len(lens), sum(lens)


class _Node(NamedTuple):
    """The tokens `start` to `stop` of some paths, and what stands before its first line and the others."""

    paths: list[TextPath]
    start: int
    stop: int
    head: str
    indent: str


def _nodes(paths: Sequence[TextPath]) -> Iterator[_Node]:
    """Yield the nodes of a tree in the order in which they are drawn."""
    waiting = [(group, 0, "", "") for group in reversed(_groups(paths, 0))]
    while waiting:
        group, start, head, indent = waiting.pop()
        stop = _stop(group, start)
        yield _Node(group, start, stop, head, indent)
        below = _groups([path for path in group if len(path.token_ids) > stop], stop)
        if len(below) == 1:
            waiting.append((below[0], stop, indent, indent))
            continue
        for each in reversed(below):
            first, other = ("└─ ", "   ") if each is below[-1] else ("├─ ", "│  ")
            waiting.append((each, stop, indent + first, indent + other))


def _groups(paths: Sequence[TextPath], position: int) -> list[list[TextPath]]:
    """Return the paths that go on with the same token of the same origin, in the order of the first of each."""
    groups: dict[tuple[int, int], list[TextPath]] = {}
    for path in paths:
        groups.setdefault((int(path.token_ids[position]), int(path.origins[position])), []).append(path)
    return list(groups.values())


def _stop(paths: Sequence[TextPath], start: int) -> int:
    """Return where the node ends that these paths share from `start` on."""
    first = paths[0]
    origins = first.origins[start:]
    stop = start + len(next(list(run) for _, run in groupby(origins.tolist())))
    for path in paths[1:]:
        stop = min(stop, len(path.token_ids))
        same = path.token_ids[start:stop] == first.token_ids[start:stop]
        same &= path.origins[start:stop] == first.origins[start:stop]
        stop = stop if same.all() else start + int(same.argmin())
    return stop


def _describe(node: _Node, decode: Callable[[list[int]], str], kinds: Mapping[int, str]) -> str:
    path, start, stop = node.paths[0], node.start, node.stop
    origin = int(path.origins[start])
    names = {PROMPT: "prompt", ENVIRONMENT: "environment"}
    name = names.get(origin) or f"call {origin} ({kinds[origin]})"
    reward = sum(value for position, value in path.rewards if start <= position < stop)
    text = repr(decode(path.token_ids[start:stop].tolist()))
    if len(text) > MAX_TEXT:
        text = f"{text[: MAX_TEXT // 2]} ... {text[-MAX_TEXT // 2 :]}"
    tokens = "1 token" if stop - start == 1 else f"{stop - start} tokens"
    return f"{name}, {tokens}{f', reward {reward:+g}' if reward else ''}: {text}"
