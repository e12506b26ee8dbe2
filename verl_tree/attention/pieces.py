"""The tree mask as pieces, and the kernel calls that run them.

A *piece* is a triangle (a run against itself) or a rectangle (the queries below a run against the run). Both are
contiguous ranges and hold visible pairs only. On a CPU each piece is a call of its own. On a GPU a call has to be
large: all triangles are one call, with every run as a segment, and the rectangles of each *level* are one more. The
level of a rectangle is how deep it is nested in other rectangles, so those of one level share neither queries nor keys.
A prompt with branches has one level and takes two calls, like Prefix Grouper (https://arxiv.org/abs/2506.05433). This
forest has two levels::

    prompt ──┬── a ──┬── b        call 0, causal:  prompt | a | b | c | d     against themselves
             │       └── c        call 1:          a b c d                    against prompt
             └── d                call 2:          b c                        against a

Under a sliding window a piece is a run against itself and the few tokens before it on its path. Nothing needs merging.
The keys are gathered, some of them for several runs.

Where the first tokens are context, their runs have no triangle, and their rectangles begin with the first query.

Legend: Q queries and K keys of a call, S its segments.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch

from verl_tree.tree.plan import AttentionPlan
from verl_tree.tree.runs import Runs
from verl_tree.tree.transfer import to_device

MAX_WINDOW_KEYS = 1 << 17
"""Most keys that one call under a sliding window gathers: for eight heads of 128 in bfloat16, 256 MB of keys."""

Range = tuple[int, int]
"""First row, and one past the last. The rows of keys are tokens; those of queries are tokens minus the context."""


class AttentionPiece(NamedTuple):
    """A range of queries, and the ranges of their keys: one, except under a sliding window."""

    queries: Range
    keys: tuple[Range, ...]


@dataclass(frozen=True, slots=True, eq=False)
class VarlenCall:
    """One call of a kernel: segments of queries, each against a segment of keys."""

    query_rows: torch.Tensor | slice  # Queries, segment after segment: int64 (Q,), or a slice if they are one range
    key_rows: torch.Tensor | slice  # The same for the keys, (K,)
    query_offsets_S1: torch.Tensor  # int32 (S + 1,), where the segments start among the queries. The last entry is Q
    key_offsets_S1: torch.Tensor  # The same for the keys
    max_query_len: int  # Length of the longest segment of queries, at least 2
    max_key_len: int  # The same for the keys
    # The keys of a segment end with its queries, and a query sees those up to itself. The causal calls of a layer
    # come first and cover every query once.
    causal: bool
    window: int | None  # With `causal`, how many keys a query sees, itself included. None: all

    @classmethod
    def of_pieces(
        cls, pieces: Sequence[AttentionPiece], *, causal: bool, window: int | None = None, device: torch.device
    ) -> Self:
        """Return the call that runs each piece as one segment, with its tensors on `device`."""
        query_lens = [_num_tokens((piece.queries,)) for piece in pieces]
        key_lens = [_num_tokens(piece.keys) for piece in pieces]
        rows = (_rows([piece.queries for piece in pieces]), _rows([each for piece in pieces for each in piece.keys]))
        index = [each for each in rows if isinstance(each, torch.Tensor)]
        query_offsets_S1, key_offsets_S1, *moved = to_device((_offsets(query_lens), _offsets(key_lens), *index), device)
        query_rows, key_rows = (moved.pop(0) if isinstance(each, torch.Tensor) else each for each in rows)
        return cls(
            query_rows=query_rows,
            key_rows=key_rows,
            query_offsets_S1=query_offsets_S1,
            key_offsets_S1=key_offsets_S1,
            # For 1, flash-attn 2 takes another kernel, which gives the log-sum-exp in another order.
            max_query_len=max(2, *query_lens),
            max_key_len=max(2, *key_lens),
            causal=causal,
            window=window,
        )


def mask_calls(plan: AttentionPlan, *, by_level: bool) -> tuple[VarlenCall, ...]:
    """Return the calls of a layer without a window, found once per plan.

    With `by_level`, all triangles are one call and the rectangles of each level one more. Else every piece is a call.
    """

    def find(plan: AttentionPlan) -> tuple[VarlenCall, ...]:
        device = plan.subtree_end_T.device
        return tuple(
            VarlenCall.of_pieces(batch, causal=level == 0, device=device)
            for level, pieces in enumerate(cut_mask(plan.runs))
            for batch in ([pieces] if by_level else [[piece] for piece in pieces])
        )

    return plan.once(("mask calls", by_level), find)


def window_calls(
    plan: AttentionPlan, window: int, *, max_query_len: int | None = None, max_keys: int = MAX_WINDOW_KEYS
) -> tuple[VarlenCall, ...]:
    """Return the calls of a layer with a sliding window, found once per plan and these numbers.

    Runs longer than `max_query_len` are cut into several segments. A call of several segments gathers at most
    `max_keys` keys. The default makes one call, unless many short runs under a long window gather more.
    """

    def find(plan: AttentionPlan) -> tuple[VarlenCall, ...]:
        batches: list[list[AttentionPiece]] = []
        num_keys = max_keys
        for piece in cut_window(plan.runs, window, max_query_len=max_query_len):
            num_keys += _num_tokens(piece.keys)
            if not batches or num_keys > max_keys:
                batches.append([])
                num_keys = _num_tokens(piece.keys)
            batches[-1].append(piece)
        device = plan.subtree_end_T.device
        return tuple(VarlenCall.of_pieces(batch, causal=True, window=window, device=device) for batch in batches)

    return plan.once(("window calls", window, max_query_len, max_keys), find)


def cut_mask(runs: Runs) -> list[list[AttentionPiece]]:
    """Return the triangles, which cover every query once, then the rectangles of each level, outermost first."""
    levels: list[list[AttentionPiece]] = [[]]
    around: list[int] = []  # where the rectangles around the run end
    first = runs.num_context
    for start, end, subtree_end in runs.ranges():
        if start >= first:
            levels[0].append(AttentionPiece((start - first, end - first), ((start, end),)))
        if subtree_end == end:
            continue
        while around and around[-1] <= start:
            around.pop()
        around.append(subtree_end)
        if len(around) == len(levels):
            levels.append([])
        queries = (max(end - first, 0), subtree_end - first)
        levels[len(around)].append(AttentionPiece(queries, ((start, end),)))
    return levels


def cut_window(runs: Runs, window: int, *, max_query_len: int | None) -> list[AttentionPiece]:
    """Return every run, cut to `max_query_len`, against itself and the `window - 1` tokens before it on its path."""
    pieces = []
    path: list[tuple[int, int, int]] = []
    for start, end, subtree_end in runs.ranges():
        while path and path[-1][2] <= start:
            path.pop()
        path.append((start, end, subtree_end))
        if start < runs.num_context:
            continue
        for first in range(start, end, max_query_len or end - start):
            last = min(first + max_query_len, end) if max_query_len else end
            keys = _last_of_path(path, end=last, num_tokens=window - 1 + last - first)
            pieces.append(AttentionPiece((first - runs.num_context, last - runs.num_context), keys))
    return pieces


def _last_of_path(path: list[tuple[int, int, int]], *, end: int, num_tokens: int) -> tuple[Range, ...]:
    """Return the ranges of the last `num_tokens` tokens of a path that is cut at `end`, or of all if it is shorter."""
    ranges = []
    for start, stop, _ in reversed(path):
        stop = min(stop, end)
        ranges.append((max(start, stop - num_tokens), stop))
        num_tokens -= stop - ranges[-1][0]
        if num_tokens == 0:
            break
    return tuple(ranges[::-1])


def _num_tokens(ranges: Sequence[Range]) -> int:
    return sum(end - start for start, end in ranges)


def _rows(ranges: list[Range]) -> torch.Tensor | slice:
    """Return the ranges as an index, or as a slice, which copies nothing, if each continues the one before."""
    if all(start == end for (_, end), (start, _) in itertools.pairwise(ranges)):
        return slice(ranges[0][0], ranges[-1][1])
    return torch.from_numpy(np.concatenate([np.arange(start, end) for start, end in ranges]))


def _offsets(lens: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.cumsum([0, *lens]).astype(np.int32))
