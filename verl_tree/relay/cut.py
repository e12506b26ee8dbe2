"""The preorder of a forest cut into sections, and what each section sees of those before it (docs/relay.md).

Cut the preorder anywhere. If a token of the section `start..end` has an ancestor `j < start`, then
`j < start <= token < subtree_end[j]`, so `j` is an ancestor of the section's first token too. Hence all that a section
sees of others is one path, the root path of its first token: its *context*. The *spine* is the union of the contexts.

Every cut computes each token once with gradient. The spine is computed once more, without. So the best cut has few
sections and a small spine.

Legend: T tokens of the preorder, K tokens of the spine, P tokens of a context, Q tokens of a section.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from verl_tree.tree.nodes import IntArray
from verl_tree.tree.runs import Runs

SPINE_COST = 1 / 3
"""What a spine token costs: a forward alone, in tokens that go forward and backward."""

MIN_SECTION_COST = 0.02
"""Least cost of a section besides its tokens, as a share of the capacity: launches, collectives, a gathered context."""


@dataclass(frozen=True, slots=True, eq=False)
class Section:
    """A stretch of a preorder, computed in one pass behind its context.

    Context and section are themselves a preorder, that of the tree that both span. So the mask of the pass is again one
    integer per key: key `j` is visible to query `i` iff `j <= i < subtree_end[j]`, and the queries are the last Q rows.

    Attributes:
        start: First token of the section.
        end: One past its last token.
        context: (P,) int64, ascending: the tokens before `start` that a token of the section sees.
        subtree_end: (P + Q,) int64, one past the last descendant of each token among context and section.
    """

    start: int
    end: int
    context: IntArray
    subtree_end: IntArray

    @property
    def num_context(self) -> int:
        """Context tokens P."""
        return len(self.context)

    @property
    def num_tokens(self) -> int:
        """Tokens of the section Q."""
        return self.end - self.start

    @property
    def entered(self) -> IntArray:
        """(E,) int64, ascending: the tokens of the context, counted in it, that have a child in the section."""
        runs = Runs.from_subtree_end(self.subtree_end, num_context=self.num_context)
        return runs.end_R[runs.entered_E] - 1


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """A preorder in sections.

    Example: `cut(subtree_end_T, position_T, capacity=4, section_cost=1)` of two trees, drawn with the index of each
    token in the preorder::

        0 ┬ 1 ─ 2 ─ 3 ─ 4 ┬ 5
          │               └ 6
          └ 7 ─ 8 ─ 9 ─ 10
        11

        position_T      0   1   2   3 |  4   5   6   7 |  8   9  10  11
        subtree_end_T  11   7   7   7 |  7   6   7  11 | 11  11  11  12
        section_T       0   0   0   0 |  1   1   1   1 |  2   2   2   2

        sections    start  end  context   subtree_end of context, section
                        0    4            4 4 4 4
                        4    8  0 1 2 3   8 7 7 7, 7 6 7 8
                        8   12  0 7       5 5, 5 5 5 6

        spine               0   1   2   3   7        0 ┬ 1 ─ 2 ─ 3
        spine_subtree_end   5   4   4   4   5          └ 7

    Attributes:
        sections: In preorder; every token is in one.
        spine: (K,) int64, ascending: the tokens that are context of some section.
        spine_subtree_end: (K,) int64, one past the last descendant of each spine token, counted in spine tokens.
        section_T: (T,) int64, the section of each token.
    """

    sections: tuple[Section, ...]
    spine: IntArray
    spine_subtree_end: IntArray
    section_T: IntArray

    @classmethod
    def whole(cls, subtree_end_T: IntArray) -> "Cut":
        """Return the preorder as one section, which has no context: an ordinary pack."""
        return _cut_at(np.asarray(subtree_end_T, dtype=np.int64), bounds=[0, len(subtree_end_T)])

    @property
    def num_sections(self) -> int:
        """Number of sections."""
        return len(self.sections)

    @property
    def num_context_tokens(self) -> int:
        """Sum of the context tokens P over the sections: keys that are gathered in every layer."""
        return sum(section.num_context for section in self.sections)

    def spine_cut(self, capacity: int) -> "Cut":
        """Cut the spine, which is a preorder of its own, every `capacity` tokens; an empty spine has no sections.

        The result counts in spine tokens 0..K-1. All keys and values of the spine are kept wherever it is cut, so the
        fewest sections are best.

        Raises:
            ValueError: The capacity is not positive.
        """
        _check_capacity(capacity)
        num_tokens = len(self.spine)
        return _cut_at(self.spine_subtree_end, bounds=[*range(0, num_tokens, capacity), num_tokens])


def cut(subtree_end_T: IntArray, position_T: IntArray, *, capacity: int, section_cost: float) -> Cut:
    """Cut the preorder of a forest into sections of at most `capacity` tokens, at the least cost of all cuts.

    The cost of a cut, in tokens that go forward and backward, is sections x `section_cost` + spine / 3.

    Args:
        subtree_end_T: (T,) one past the last descendant of each token, as in `TreeLayout`.
        position_T: (T,) number of ancestors of each token.
        capacity: The most tokens of a section.
        section_cost: What a section costs besides its tokens, in tokens, >= 0.

    Raises:
        ValueError: The capacity is not positive.
    """
    _check_capacity(capacity)
    assert section_cost >= 0, section_cost
    assert len(subtree_end_T) == len(position_T), (len(subtree_end_T), len(position_T))
    subtree_end_T, position_T = np.asarray(subtree_end_T, dtype=np.int64), np.asarray(position_T, dtype=np.int64)
    bounds = _best_bounds(subtree_end_T, position_T, capacity=capacity, section_cost=section_cost)
    return _cut_at(subtree_end_T, bounds=bounds)


def _check_capacity(capacity: int) -> None:
    if capacity < 1:
        key = "tree.capacity (actor.ppo_max_token_len_per_gpu unless set)"
        raise ValueError(f"capacity is {capacity}: set {key} to a positive number")


def _cut_at(subtree_end_T: IntArray, *, bounds: list[int]) -> Cut:
    """Make the sections between neighbouring bounds, the first 0 and the last T."""
    in_spine = np.zeros(len(subtree_end_T), dtype=bool)
    context = np.empty(0, dtype=np.int64)
    sections = []
    for start, end in pairwise(bounds):
        keys = np.concatenate([context, np.arange(start, end)])
        ends = subtree_end_T[keys]
        subtree_end = len(context) + np.minimum(ends, end) - start
        sections.append(Section(start=start, end=end, context=context, subtree_end=subtree_end))
        context = keys[ends > end]
        in_spine[context] = True
    spine = np.flatnonzero(in_spine)
    return Cut(
        sections=tuple(sections),
        spine=spine,
        spine_subtree_end=np.searchsorted(spine, subtree_end_T[spine]),
        section_T=np.repeat(np.arange(len(sections)), np.diff(bounds)),
    )


def _best_bounds(subtree_end_T: IntArray, position_T: IntArray, *, capacity: int, section_cost: float) -> list[int]:
    """Return the bounds 0..T of the sections of a cut of least cost.

    A section adds to the spine what the context of `end` has beyond that of `start`: position[end] minus the least
    position from `start` to `end`. Of all starts of a section that ends at `end`, only those on a *staircase* matter:
    the first token within reach, the token after its subtree, the token after the subtree of that, and so on. For all
    of them the section adds the same, as no token is nearer to the root than the last step. Proofs: docs/relay.md.
    """
    num_tokens = len(subtree_end_T)
    skip = subtree_end_T.tolist()  # the next step of a staircase, or a later one
    position = [*position_T.tolist(), 0]  # the context of the end is empty
    ends = _reached_ends(skip, capacity=capacity)
    cost, start_of = {0: 0.0}, {}
    cheapest = {token: token for token in ends}  # of the steps from a token to where it skips
    for end in ends[1:]:
        passed, last = [], max(end - capacity, 0)
        while skip[last] < end:
            passed.append(last)
            last = skip[last]
        best = last
        for step in reversed(passed):
            best = cheapest[step] = min(cheapest[step], best, key=cost.__getitem__)
            skip[step] = last  # ends ascend, so no later staircase needs the steps between
        start_of[end] = best
        new_in_spine = position[end] - min(position[last], position[end])
        cost[end] = cost[best] + section_cost + SPINE_COST * new_in_spine
    bounds = [num_tokens]
    while bounds[-1]:
        bounds.append(start_of[bounds[-1]])
    return bounds[::-1]


def _reached_ends(next_step: list[int], *, capacity: int) -> list[int]:
    """Return the tokens that a best cut may cut at, ascending: from T backwards, every step of every staircase."""
    num_tokens = len(next_step)
    is_end = bytearray(num_tokens) + b"\x01"
    for end in range(num_tokens, 0, -1):
        if is_end[end]:
            step = max(end - capacity, 0)
            # What follows a known step is known: a staircase of a later end went the same way, and further.
            while step < end and not is_end[step]:
                is_end[step] = 1
                step = next_step[step]
    return [token for token in range(num_tokens + 1) if is_end[token]]
