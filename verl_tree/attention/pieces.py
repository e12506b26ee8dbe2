"""The tree mask as rectangles and triangles, one by one or as the calls of a kernel for sequences of varying lengths.

Every run of tokens with one `subtree_end` is a triangle over itself and a rectangle for the queries below it. On a CPU
each is a call of its own. On a GPU a call has to be large: all triangles are one call, with every run as a sequence,
and the rectangles of one *level* are one more. The level of a rectangle is the number of rectangles around it, so those
of one level share neither queries nor keys. A prompt with branches has one level, so it takes the two calls of Prefix
Grouper (https://arxiv.org/abs/2506.05433)::

    prompt ──┬── a ──┬── b        call 0, causal:  prompt | a | b | c | d     against themselves
             │       └── c        call 1:          a b c d                    against prompt
             └── d                call 2:          b c                        against a

A layer with a sliding window takes no merging: every run against itself and the few tokens before it on its path, which
are gathered, some of them for several runs.

Legend: T tree tokens, Q queries and K keys of a call, S its segments.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

MAX_WINDOW_KEYS = 1 << 17
"""Keys that one call under a sliding window gathers: 256 MB for eight heads of 128 in bfloat16, and values likewise."""


@dataclass(frozen=True, slots=True)
class AttentionPiece:
    """One call of a dense attention kernel: a range of queries against a range of keys that all of them see.

    Attributes:
        query_start: First query.
        query_end: One past the last query.
        key_start: First key.
        key_end: One past the last key.
        causal: Queries and keys are the same range, and key `j` is visible to query `i` iff `j <= i`.
    """

    query_start: int
    query_end: int
    key_start: int
    key_end: int
    causal: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class VarlenCall:
    """One call of a varlen kernel: segments of queries, each against a segment of keys.

    Attributes:
        query_rows: The tokens that are queries, segment after segment: int64 (Q,), or a slice where they are one range.
        key_rows: The same for the keys, (K,).
        query_offsets_S1: int32 (S + 1,), where the segments start among the Q queries, and Q.
        key_offsets_S1: The same for the keys.
        max_query_len: At least the length of the longest segment of queries, and at least 2: for 1, flash-attn 2 takes
            another kernel, which gives the log-sum-exp in another order.
        max_key_len: At least the length of the longest segment of keys, and at least 2.
        causal: The keys of a segment end with its queries, and a query sees those up to itself. The causal calls of a
            layer cover every query once.
        window: With `causal`, how many keys a query sees, itself included; None: all.
    """

    query_rows: torch.Tensor | slice
    key_rows: torch.Tensor | slice
    query_offsets_S1: torch.Tensor
    key_offsets_S1: torch.Tensor
    max_query_len: int
    max_key_len: int
    causal: bool
    window: int | None = None


def varlen_calls(
    self_pieces: Sequence[AttentionPiece], ancestor_pieces: Sequence[AttentionPiece], *, device: torch.device
) -> tuple[VarlenCall, ...]:
    """Batches the pieces of a pack.

    Args:
        self_pieces: Triangles that cover every token once, in the order of the tokens.
        ancestor_pieces: Rectangles in DFS order.
        device: Where the tensors go.

    Returns:
        The call of the triangles, then those of the rectangles, level by level.
    """
    levels: list[list[AttentionPiece]] = []
    around: list[AttentionPiece] = []
    for piece in ancestor_pieces:
        while around and around[-1].query_end <= piece.key_start:
            around.pop()
        if len(around) == len(levels):
            levels.append([])
        levels[len(around)].append(piece)
        around.append(piece)
    return tuple(
        _call(
            [(piece.query_start, piece.query_end) for piece in pieces],
            [[(piece.key_start, piece.key_end)] for piece in pieces],
            causal=pieces[0].causal,
            device=device,
        )
        for pieces in (self_pieces, *levels)
    )


def window_calls(
    self_pieces: Sequence[AttentionPiece],
    ancestor_pieces: Sequence[AttentionPiece],
    *,
    window: int,
    max_segment_len: int | None,
    device: torch.device,
) -> tuple[VarlenCall, ...]:
    """The calls of a layer with a sliding window: every run against itself and what precedes it on its path.

    A window limits what must be gathered to `window - 1` keys before each run, so nothing needs merging. It is one
    call, unless many short runs under a long window gather more than `MAX_WINDOW_KEYS`.

    Args:
        self_pieces: Triangles that cover every token once, in the order of the tokens.
        ancestor_pieces: Rectangles in DFS order.
        window: Keys that a query sees, itself included.
        max_segment_len: Longer runs are cut; None: they are not.
        device: Where the tensors go.
    """
    subtree_end = {piece.key_start: piece.query_end for piece in ancestor_pieces}
    path: list[tuple[int, int]] = []
    batches: list[tuple[list, list]] = []
    num_keys = MAX_WINDOW_KEYS
    for piece in self_pieces:
        start, end = piece.query_start, piece.query_end
        while path and subtree_end.get(path[-1][0], 0) <= start:
            path.pop()
        path.append((start, end))
        for first in range(start, end, max_segment_len or end - start):
            last = min(first + max_segment_len, end) if max_segment_len else end
            keys = _last_of_path(path, end=last, num_tokens=window - 1 + last - first)
            num_keys += _num_tokens(keys)
            if num_keys > MAX_WINDOW_KEYS:
                batches.append(([], []))
                num_keys = _num_tokens(keys)
            batches[-1][0].append((first, last))
            batches[-1][1].append(keys)
    return tuple(_call(*batch, causal=True, window=window, device=device) for batch in batches)


def _last_of_path(path: list[tuple[int, int]], *, end: int, num_tokens: int) -> list[tuple[int, int]]:
    """Ranges of the last tokens of a path, whose last run is cut at `end`; all of it where it is no longer."""
    ranges = []
    for start, stop in reversed(path):
        stop = min(stop, end)
        ranges.append((max(start, stop - num_tokens), stop))
        num_tokens -= stop - ranges[-1][0]
        if num_tokens == 0:
            break
    return ranges[::-1]


def _call(
    query_ranges: list[tuple[int, int]],
    key_ranges: list[list[tuple[int, int]]],
    *,
    causal: bool,
    device: torch.device,
    window: int | None = None,
) -> VarlenCall:
    """A call of one range of queries and some ranges of keys per segment."""
    query_lens = [end - start for start, end in query_ranges]
    key_lens = [_num_tokens(ranges) for ranges in key_ranges]
    return VarlenCall(
        query_rows=_rows(query_ranges, device=device),
        key_rows=_rows([each for ranges in key_ranges for each in ranges], device=device),
        query_offsets_S1=_offsets(query_lens, device=device),
        key_offsets_S1=_offsets(key_lens, device=device),
        max_query_len=max(2, *query_lens),
        max_key_len=max(2, *key_lens),
        causal=causal,
        window=window,
    )


def _num_tokens(ranges: list[tuple[int, int]]) -> int:
    return sum(end - start for start, end in ranges)


def _rows(ranges: list[tuple[int, int]], *, device: torch.device) -> torch.Tensor | slice:
    """Ranges as an index; as a slice, which copies nothing, where each begins at the end of the one before."""
    if all(start == end for (_, end), (start, _) in itertools.pairwise(ranges)):
        return slice(ranges[0][0], ranges[-1][1])
    return torch.from_numpy(np.concatenate([np.arange(start, end) for start, end in ranges])).to(device)


def _offsets(lens: list[int], *, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.cumsum([0, *lens]).astype(np.int32)).to(device)
