"""The recorded paths of one session, each token stored once.

    call 0   P P P | a a |               one node:    root ── P P P a a t b b
    call 1   P P P   a a   t | b b |
    call 2   P P P   a a   u | c |       split:       root ── P P P a a ──┬── t b b
                                                                          └── u c

A node holds a stretch of tokens in two arrays: ids, and *source*, the first call that generated the token (-1 if none
did). Other calls that generated the same tokens are its *repeats*. A node without children grows in place, so a session
that never forks stays one node. Comparing a prompt of N tokens with everything recorded takes a few numpy calls on N
tokens, and one Python step for each fork on its way that the previous prompt did not pass.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rollout_hooks.capture.token_arrays import append, common_prefix_len


@dataclass(slots=True, eq=False)
class Node:
    """A stretch of tokens; only `TokenTrie` changes it."""

    start: int  # position of its first token, counted from the root
    tokens: np.ndarray  # (room,) int32, of which the first `size` entries are in use
    source: np.ndarray  # likewise
    size: int
    parent: "Node | None" = None  # None for the root, which has no tokens
    children: dict[int, "Node"] = field(default_factory=dict)  # by their first token
    # Ascending positions p, start < p <= end, where a call's prompt or output ended.
    boundaries: list[int] = field(default_factory=list)
    # Ascending (position, call) of the calls whose path ends in the node.
    ends: list[tuple[int, int]] = field(default_factory=list)
    # (call, position): the call generated the node's tokens up to that position, too, from the end of its prompt on.
    repeats: list[tuple[int, int]] = field(default_factory=list)
    head: str | None = None  # text of the first token in its context, cached by `text_compare`

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + self.size

    def slice(self, start: int, end: int) -> np.ndarray:
        """Return a view of the token ids from position `start` to position `end`."""
        return self.tokens[start - self.start : min(end - self.start, self.size)]


class Point(NamedTuple):
    """A place in the trie: after `position` tokens, the last of which lies in `node` (the root if there are none)."""

    node: Node
    position: int


class TokenTrie:
    """The recorded paths of one session's calls."""

    def __init__(self) -> None:
        empty = np.zeros(0, dtype=np.int32)
        self._root = Node(0, empty, empty, 0)
        self._end_of: dict[int, Point] = {}
        self.changes: list[int] = []
        """For each change: a position before which it left all as it was."""
        # The last `walk`: its tokens, how many of them were recorded, and the nodes on their way with their starts.
        self._walked, self._walked_len = empty, 0
        self._trail, self._starts = [self._root], [0]

    @property
    def root(self) -> Point:
        """The point before the first token."""
        return Point(self._root, 0)

    def end_of(self, call: int) -> Point:
        """Return where the path of a recorded call ends."""
        return self._end_of[call]

    def walk(self, tokens: np.ndarray) -> Point:
        """Follow `tokens` (N,) from the root as far as they are recorded; return where that ends."""
        num_shared = len(tokens) if tokens is self._walked else common_prefix_len(tokens, self._walked)
        # Keep the nodes whose first token is shared. One of them may have been split since.
        num_kept = max(1, bisect_left(self._starts, num_shared))
        trail = self._trail[:num_kept]
        start = max(trail[-1].start, min(num_shared, self._walked_len, trail[-1].end))
        point, _ = self.advance(Point(trail[-1], start), tokens[start:], trail=trail)
        self._walked, self._walked_len, self._trail = tokens, point.position, trail
        self._starts[num_kept:] = [node.start for node in trail[num_kept:]]
        return point

    def advance(self, point: Point, tokens: np.ndarray, *, trail: list[Node] | None = None) -> tuple[Point, int]:
        """Follow `tokens` (N,) from a point as far as they are recorded; return where that ends and their number."""
        node, position = point
        num_tokens = 0
        while True:
            num_shared = common_prefix_len(node.slice(position, node.end), tokens[num_tokens:])
            num_tokens, position = num_tokens + num_shared, position + num_shared
            child = None
            if position == node.end and num_tokens < len(tokens):
                child = node.children.get(int(tokens[num_tokens]))
            if child is None:
                return Point(node, position), num_tokens
            node = child
            if trail is not None:  # gets the nodes entered on the way
                trail.append(node)

    def begin(self, call: int, point: Point, rest: np.ndarray) -> None:
        """Record what a call reads: the tokens up to a point, then `rest`, whose first token is not recorded there."""
        self.changes.append(point.position)
        if rest.size:
            point = self._extend(point, rest, source=-1)
        self._end_at(call, point)

    def complete(self, call: int, output: np.ndarray) -> None:
        """Append what a call generated to its path.

        A token that another call has already generated there keeps that call as its source.
        """
        node, position = self._end_of[call]
        self.changes.append(position)
        del node.ends[bisect_left(node.ends, (position, call))]
        point, num_known = self.advance(Point(node, position), output)
        self._mark(point, num_known, source=call)
        rest = output[num_known:]
        self._end_at(call, self._extend(point, rest, source=call) if rest.size else point)

    def remove(self, call: int) -> None:
        """Forget the path of a call that generated nothing; what other calls share stays."""
        self._walked, self._walked_len, self._trail, self._starts = self._walked[:0], 0, [self._root], [0]
        self.changes.append(-1)
        node, position = self._end_of.pop(call)
        del node.ends[bisect_left(node.ends, (position, call))]
        del node.boundaries[bisect_left(node.boundaries, position)]
        while node.parent is not None and not node.children:
            end = node.ends[-1][0] if node.ends else node.start
            if end > node.start:
                node.size = end - node.start
                return
            del node.parent.children[int(node.tokens[0])]
            node = node.parent

    def tokens_to(self, point: Point, *, start: int = 0) -> np.ndarray:
        """Return a copy of the ids from position `start` to a point."""
        return self._collect(point, start=start, name="tokens")

    def source_to(self, point: Point, *, start: int = 0) -> np.ndarray:
        """Return a copy of the sources from position `start` to a point."""
        return self._collect(point, start=start, name="source")

    def repeats_to(self, point: Point) -> dict[int, int]:
        """Return the calls that generated tokens before a point again, each with where it stopped doing so."""
        found: dict[int, int] = {}
        node: Node | None = point.node
        while node is not None:
            for call, position in node.repeats:
                found[call] = max(found.get(call, 0), min(position, point.position))
            node = node.parent
        return found

    def last_boundary(self, point: Point) -> int:
        """Return the last boundary at or before a point, or 0 if there is none."""
        node, position = point
        while node.parent is not None:
            index = bisect_right(node.boundaries, position)
            if index:
                return node.boundaries[index - 1]
            node = node.parent
        return 0

    def is_at_boundary(self, point: Point) -> bool:
        """Return whether a call's prompt or output ended at this point."""
        return self.last_boundary(point) == point.position > 0

    def nodes_behind(self, point: Point) -> Iterator[Node]:
        """Yield the nodes that hold tokens after a point, first the rest of its own node if there is one."""
        stack = [point.node] if point.position < point.node.end else list(point.node.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def ways_on(self, point: Point, *, max_len: int | None = None) -> Iterator[np.ndarray]:
        """Yield the different token sequences (N,) that are recorded after a point, the newest first.

        They are cut to `max_len` tokens, or at the next boundary if it is None.
        """
        ahead = [point.node] if point.position < point.node.end else list(point.node.children.values())
        stack = [(node, np.zeros(0, dtype=np.int32)) for node in ahead]
        while stack:
            node, before = stack.pop()
            start = max(point.position, node.start)
            end = node.end if max_len is None else min(node.end, point.position + max_len)
            index = bisect_right(node.boundaries, start)
            is_cut = max_len is not None and end == point.position + max_len
            if max_len is None and index < len(node.boundaries):
                end, is_cut = node.boundaries[index], True
            more = node.slice(start, end)
            tokens = np.concatenate([before, more]) if before.size else more
            if is_cut or not node.children:
                yield tokens
            else:
                stack.extend((child, tokens) for child in node.children.values())

    def _collect(self, point: Point, *, start: int, name: str) -> np.ndarray:
        node, position = point
        if node.start <= start < position:
            values = node.tokens if name == "tokens" else node.source
            return values[start - node.start : position - node.start].copy()
        parts = [np.zeros(0, dtype=np.int32)]
        while node.parent is not None and position > start:
            values = node.tokens if name == "tokens" else node.source
            parts.append(values[max(start - node.start, 0) : position - node.start])
            node, position = node.parent, node.start
        return np.concatenate(parts[::-1])

    def _end_at(self, call: int, point: Point) -> None:
        insort(point.node.ends, (point.position, call))
        insort(point.node.boundaries, point.position)
        self._end_of[call] = point

    def _mark(self, point: Point, num_tokens: int, *, source: int) -> None:
        """Set `source` on those of the `num_tokens` tokens before a point that have none yet; others are repeated."""
        node, position = point
        start = position - num_tokens
        while node.parent is not None and position > start:
            values = node.source[max(start - node.start, 0) : position - node.start]
            if (values >= 0).any():
                node.repeats.append((source, position))
            values[values < 0] = source
            node, position = node.parent, node.start

    def _extend(self, point: Point, tokens: np.ndarray, *, source: int) -> Point:
        node, position = point
        if position < node.end:
            self._split(node, position)
        sources = np.full(len(tokens), source, dtype=np.int32)
        if node.parent is not None and not node.children:
            size = node.size + len(tokens)
            node.tokens = append(node.tokens, tokens, size=node.size)
            node.source = append(node.source, sources, size=node.size)
            node.size = size
            return Point(node, node.end)
        child = Node(position, tokens.copy(), sources, len(tokens), parent=node)
        node.children[int(tokens[0])] = child
        return Point(child, child.end)

    def _split(self, node: Node, position: int) -> None:
        """Cut a node in two; what comes after `position` becomes its only child."""
        size = position - node.start
        below = Node(position, node.tokens[size : node.size].copy(), node.source[size : node.size].copy(), 0, node)
        below.size = len(below.tokens)
        below.children = node.children
        for child in below.children.values():
            child.parent = below
        first = bisect_right(node.boundaries, position)
        node.boundaries, below.boundaries = node.boundaries[:first], node.boundaries[first:]
        first = bisect_left(node.ends, (position + 1, -1))
        node.ends, below.ends = node.ends[:first], node.ends[first:]
        for end, call in below.ends:
            self._end_of[call] = Point(below, end)
        below.repeats = [(call, end) for call, end in node.repeats if end > position]
        node.repeats = [(call, min(end, position)) for call, end in node.repeats]
        node.tokens, node.source = node.tokens[:size].copy(), node.source[:size].copy()
        node.size, node.children = size, {int(below.tokens[0]): below}
