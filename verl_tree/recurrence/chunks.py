"""A forest cut into chunks that share one entering state, and the order in which a recurrence runs through them.

A recurrent layer spends its time inside chunks, all of which are computed at once; only the state goes from chunk to
chunk, one step after another. In a tree, a chunk is a set of at most C tokens whose ancestors outside of the chunk are
the same: the roots of the chunk have one parent token, in another chunk, and the chunk is entered with the state after
that token. It is *read* there, at the end or in the middle of the other chunk. Inside a chunk, `before` is the ancestor
relation. So there are as many steps as the deepest path has chunks, however many nodes there are.

Chunks are packed from the leaves up: a run of tokens takes small subtrees below it into the chunk of its last tokens,
and siblings that are left over share chunks. So short nodes leave few slots empty.

Example, C = 4, token 4 has three children; `>` is a read::

    0 ─ 1 ─ 2 ─ 3 ─ 4 ┬ 5            chunk 0 [0 1 2 3] > chunk 1 [4 5 6 7]     [5] and [6 7] fit beside 4
                      ├ 6 ─ 7                            > chunk 2 [8 9 . .]     [8 9] does not
                      └ 8 ─ 9
    token_MC     0 1 2 3 | 4 5 6 7 | 8 9 9 9      an empty slot repeats a token; nothing is after it
    slot_T       0 1 2 3 4 5 6 7 8 9
    read_slot_R  3 4                              after token 3 and after token 4
    entry_M      -1 0 0                           the read of the step before that a chunk is entered with
    step_M       0 1 2                            chunk_bounds 0 1 2 3, read_bounds 0 1 2 2

Legend: T tokens of a pack, M chunks of C slots, R reads, N runs.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verl_tree.tree.transfer import to_device


@dataclass(frozen=True, slots=True, eq=False)
class TreeChunks:
    """The chunks of a pack, in the order of their steps; tensors on the device, bounds on the host.

    Attributes:
        token_MC: int64, the token in each slot.
        before_MCC: bool, whether the second slot's token is on the path of the first's, itself included.
        slot_T: int64, the slot of each token among all M * C.
        read_slot_R: int64, the slots after whose tokens the state is read, ordered by the steps of their chunks.
        entry_M: int64, the read that a chunk is entered with, counted from the first of the step before; -1: none.
        chunk_bounds: The chunks of step s are chunk_bounds[s] to chunk_bounds[s + 1]. All roots are in step 0.
        read_bounds: The reads that are made in step s are read_bounds[s] to read_bounds[s + 1].
    """

    token_MC: Tensor
    before_MCC: Tensor
    slot_T: Tensor
    read_slot_R: Tensor
    entry_M: Tensor
    chunk_bounds: tuple[int, ...]
    read_bounds: tuple[int, ...]

    @classmethod
    def from_subtree_end(
        cls, subtree_end_T: np.ndarray, *, size: int, device: torch.device | str = "cpu"
    ) -> "TreeChunks":
        """Cut a forest in depth-first preorder into chunks of at most `size` tokens."""
        tokens, entry_token = _cut(subtree_end_T, size=size)
        first = np.array([each[0] for each in tokens])
        chunk_T = np.empty(len(subtree_end_T), dtype=np.int64)
        for chunk, each in enumerate(tokens):
            chunk_T[each] = chunk
        step = _steps(np.where(entry_token >= 0, chunk_T[entry_token], -1), first=first)
        order = np.lexsort((first, step))
        step, entry_token = step[order], entry_token[order]

        lens = np.array([len(tokens[chunk]) for chunk in order])
        slot_MC = np.minimum(np.arange(size), lens[:, None] - 1)
        starts = np.cumsum(lens) - lens
        in_order = np.concatenate([tokens[chunk] for chunk in order])
        token_MC = in_order[starts[:, None] + slot_MC]
        is_filled_MC = np.arange(size) < lens[:, None]
        slot_T = np.empty(len(subtree_end_T), dtype=np.int64)
        slot_T[token_MC[is_filled_MC]] = np.flatnonzero(is_filled_MC)
        row, column = token_MC[:, :, None], token_MC[:, None, :]
        before_MCC = (column <= row) & (row < subtree_end_T[column])
        before_MCC &= is_filled_MC[:, :, None] & is_filled_MC[:, None, :]

        steps = np.arange(step[-1] + 2)
        chunk_bounds = np.searchsorted(step, steps)
        read_slot_R, read_of_entered = np.unique(slot_T[entry_token[entry_token >= 0]], return_inverse=True)
        read_bounds = np.searchsorted(read_slot_R, chunk_bounds * size)
        entry_M = np.full(len(order), -1)
        is_entered = entry_token >= 0
        entry_M[is_entered] = read_of_entered - read_bounds[step[is_entered] - 1]
        arrays = (token_MC, before_MCC, slot_T, read_slot_R, entry_M)
        return cls(
            *to_device([torch.from_numpy(array) for array in arrays], device),
            chunk_bounds=tuple(chunk_bounds.tolist()),
            read_bounds=tuple(read_bounds.tolist()),
        )

    @property
    def num_steps(self) -> int:
        """Steps that follow each other: chunks on the deepest path."""
        return len(self.chunk_bounds) - 1


def parents(subtree_end_T: np.ndarray) -> np.ndarray:
    """Return the token before each token on its path, (T,) int64, -1 at roots."""
    start_N, last_N, parent_N = _runs(subtree_end_T)
    parent_T = np.arange(len(subtree_end_T)) - 1
    parent_T[start_N] = np.where(parent_N >= 0, last_N[parent_N], -1)
    return parent_T


def _runs(subtree_end_T: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find the runs, maximal stretches with one `subtree_end`: first and last token, and parent or -1; (N,) each."""
    start_N = np.concatenate([[0], np.flatnonzero(np.diff(subtree_end_T)) + 1])
    last_N = np.append(start_N[1:], len(subtree_end_T)) - 1
    parents: list[int] = []
    path: list[int] = []
    ends = subtree_end_T[start_N].tolist()
    for run, start in enumerate(start_N.tolist()):
        while path and ends[path[-1]] <= start:
            path.pop()
        parents.append(path[-1] if path else -1)
        path.append(run)
    return start_N, last_N, np.array(parents, dtype=np.int64)


def _cut(subtree_end_T: np.ndarray, *, size: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the tokens of each chunk, ascending, and the tokens that the chunks are entered after, -1 at roots."""
    starts, lasts, parent_N = (each.tolist() for each in _runs(subtree_end_T))
    chunks: list[np.ndarray] = []
    entry_tokens: list[int] = []

    def close(tokens: np.ndarray, entry_token: int) -> None:
        chunks.append(np.sort(tokens))
        entry_tokens.append(entry_token)

    # What lies at the top of a run's subtree and is in no chunk yet: at most `size` tokens, the run's first among them.
    open_below: dict[int, list[np.ndarray]] = {run: [] for run in range(-1, len(starts))}
    for run in reversed(range(len(starts))):
        start, last = starts[run], lasts[run]
        taken, left = [], []
        room = size - 1
        for tokens in sorted(open_below.pop(run), key=lambda each: (len(each), each[0])):
            if len(tokens) <= room:
                taken.append(tokens)
                room -= len(tokens)
            else:
                left.append(tokens)
        for tokens in _fill(left, size=size):
            close(tokens, last)
        # The end of the run goes with what it has taken; before that, full chunks.
        at = max(start, last - room)
        opened = np.concatenate([np.arange(at, last + 1), *taken])
        while at > start:
            close(opened, at - 1)
            end, at = at, max(start, at - size)
            opened = np.arange(at, end)
        open_below[parent_N[run]].append(opened)
    for tokens in _fill(open_below[-1], size=size):
        close(tokens, -1)
    return chunks, np.array(entry_tokens, dtype=np.int64)


def _fill(parts: list[np.ndarray], *, size: int) -> list[np.ndarray]:
    """Put parts together to as few sets of at most `size` tokens as first fit finds, the largest part first."""
    sets: list[list[np.ndarray]] = []
    rooms: list[int] = []
    for part in sorted(parts, key=len, reverse=True):
        found = next((index for index, room in enumerate(rooms) if len(part) <= room), None)
        if found is None:
            sets.append([part])
            rooms.append(size - len(part))
        else:
            sets[found].append(part)
            rooms[found] -= len(part)
    return [np.concatenate(each) for each in sets]


def _steps(parent: np.ndarray, *, first: np.ndarray) -> np.ndarray:
    """Return how many chunks are above each chunk; `parent` is the one it is entered from, or -1."""
    steps = np.zeros(len(parent), dtype=np.int64)
    # In depth-first order a parent's first token comes before that of its children.
    for chunk in np.argsort(first):
        if parent[chunk] >= 0:
            steps[chunk] = steps[parent[chunk]] + 1
    return steps
