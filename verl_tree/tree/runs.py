"""The runs of a pack: what its mask consists of.

The mask of a pack in DFS preorder is one integer per key: key `j` is visible to query `i` iff
`j <= i < subtree_end[j]`. A *run* is a maximal stretch of tokens with one `subtree_end`. Inside a run attention is
causal, and the tokens below a run follow it directly. So the whole mask is a few triangles and rectangles::

    prompt ──┬── a ──┬── b        runs in DFS order:  prompt | a | b | c | d
             │       └── c
             └── d                prompt: triangle over itself, rectangle for the queries a..d
                                  a:      triangle over itself, rectangle for the queries b..c

The first P tokens may be *context*: one root path that is computed elsewhere. A run ends where the context ends.

Legend: T tokens, P of them context, R runs, N of them behind the context, E of the others with a child behind it.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """The runs of one pack in DFS order, on the host, so that planning waits for no device.

    `subtree_end_T` and `position_T` are int32 (T,): one past the last descendant of each token, and its position on its
    own path. The others are int64 (R,): the first token of each run, one past its last token, the `subtree_end` of its
    tokens, and the run above it, -1 at a root.
    """

    subtree_end_T: np.ndarray
    position_T: np.ndarray
    start_R: np.ndarray
    end_R: np.ndarray
    subtree_end_R: np.ndarray
    parent_R: np.ndarray
    num_context: int

    @classmethod
    def from_subtree_end(cls, subtree_end_T: np.ndarray, *, num_context: int = 0) -> Self:
        """Find the runs of a pack. Raise a ValueError if it is not a forest in DFS preorder behind one root path."""
        num_tokens = len(subtree_end_T)
        if subtree_end_T.ndim != 1 or num_tokens == 0:
            raise ValueError(f"subtree_end has shape {subtree_end_T.shape}; it must be (T,) with at least one token")
        wrong = np.flatnonzero((subtree_end_T <= np.arange(num_tokens)) | (subtree_end_T > num_tokens))
        if len(wrong):
            raise ValueError(
                f"subtree_end[{wrong[0]}] = {subtree_end_T[wrong[0]]}, but a token's subtree holds the token itself "
                f"and ends within the pack of {num_tokens} tokens; give one past the last descendant in DFS preorder"
            )
        _check_context(subtree_end_T, num_context)
        start_R = np.union1d([0, num_context], np.flatnonzero(np.diff(subtree_end_T)) + 1)
        end_R = np.append(start_R[1:], num_tokens)
        subtree_end_R = subtree_end_T[start_R]
        depth_R = np.zeros(len(start_R), dtype=np.int64)  # tokens above the run
        parent_R = np.full(len(start_R), -1)
        path: list[int] = []
        for run, (start, end) in enumerate(zip(start_R.tolist(), subtree_end_R.tolist(), strict=True)):
            while path and subtree_end_R[path[-1]] <= start:
                path.pop()
            if path:
                parent = parent_R[run] = path[-1]
                if end > subtree_end_R[parent]:
                    raise ValueError(
                        f"subtree_end[{start}] = {end} reaches past its ancestor's {subtree_end_R[parent]}; the tokens "
                        "are not in DFS preorder"
                    )
                depth_R[run] = depth_R[parent] + end_R[parent] - start_R[parent]
            path.append(run)
        position_T = np.arange(num_tokens) + np.repeat(depth_R - start_R, end_R - start_R)
        whole = (subtree_end_T.astype(np.int32), position_T.astype(np.int32))
        return cls(*whole, start_R, end_R, subtree_end_R, parent_R, num_context)

    def ranges(self) -> list[tuple[int, int, int]]:
        """Return (start, end, subtree_end) of every run."""
        return list(zip(self.start_R.tolist(), self.end_R.tolist(), self.subtree_end_R.tolist(), strict=True))

    @property
    def entered_E(self) -> np.ndarray:
        """The runs of the context that have a child behind it, int64 (E,), ascending; it is after their last tokens."""
        parent_N = self.parent_R[self._first_own :]
        return np.unique(parent_N[(parent_N >= 0) & (parent_N < self._first_own)])

    def behind_context(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the N runs behind the context: first token, last token and parent, int64 (N,) each.

        All count behind the context. At a root the parent is -1, and below the context -2 - e, where e is the place of
        the run above in `entered_E`.
        """
        first = self._first_own
        parent_N = self.parent_R[first:]
        above_N = np.where(parent_N >= 0, -2 - np.searchsorted(self.entered_E, parent_N), -1)
        parent_N = np.where(parent_N >= first, parent_N - first, above_N)
        return self.start_R[first:] - self.num_context, self.end_R[first:] - 1 - self.num_context, parent_N

    @property
    def _first_own(self) -> int:
        return int(np.searchsorted(self.start_R, self.num_context))


def _check_context(subtree_end_T: np.ndarray, num_context: int) -> None:
    if not 0 <= num_context < len(subtree_end_T):
        raise ValueError(
            f"num_context = {num_context} of {len(subtree_end_T)} tokens: give a number from 0 on that leaves at least "
            "one query"
        )
    wrong = np.flatnonzero(subtree_end_T[:num_context] <= num_context)
    if len(wrong):
        raise ValueError(
            f"subtree_end[{wrong[0]}] = {subtree_end_T[wrong[0]]}, so the first query, token {num_context}, does not "
            f"see token {wrong[0]} of its context: give as context the root path of the first query, and nothing else"
        )
