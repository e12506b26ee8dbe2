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

A relayed call computes the tokens behind a context. Its chunks of step 0 are entered with states that other calls have
made, one for each token of the context that has a child here. The states after its own cut tokens are read for others.

Legend: T tokens of a pack, or of a call behind its context, M chunks of C slots, R reads, N runs, E states of the
context, L cut tokens.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from verl_tree.tree.plan import AttentionPlan
from verl_tree.tree.runs import Runs
from verl_tree.tree.transfer import to_device


@dataclass(frozen=True, slots=True, eq=False)
class TreeChunks:
    """The chunks of a pack, in the order of their steps; tensors on the device, bounds on the host.

    Attributes:
        token_MC: int64, the token in each slot.
        before_MCC: bool, whether the second slot's token is on the path of the first's, itself included.
        slot_T: int64, the slot of each token among all M * C.
        read_slot_R: int64, the slots after whose tokens the state is read, ordered by the steps of their chunks.
        entry_M: int64, the read that a chunk is entered with, counted from the first of the step before. In step 0, the
            state of the context, or -1: none.
        chunk_bounds: The chunks of step s are chunk_bounds[s] to chunk_bounds[s + 1]. All roots are in step 0.
        read_bounds: The reads that are made in step s are read_bounds[s] to read_bounds[s + 1].
        num_entered: States of the context that the call is entered with, E.
        left_L: int64, the reads after the cut tokens; None if there are none.
    """

    token_MC: Tensor
    before_MCC: Tensor
    slot_T: Tensor
    read_slot_R: Tensor
    entry_M: Tensor
    chunk_bounds: tuple[int, ...]
    read_bounds: tuple[int, ...]
    num_entered: int = 0
    left_L: Tensor | None = None

    @classmethod
    def of_plan(cls, plan: AttentionPlan, *, size: int) -> Self:
        """Return the tokens behind the context in chunks of at most `size`, cut once for all layers."""
        return plan.once(("chunks", size), lambda plan: cls._cut(plan, size=size))

    @classmethod
    def _cut(cls, plan: AttentionPlan, *, size: int) -> Self:
        subtree_end_T = plan.runs.subtree_end_T[plan.num_context :] - plan.num_context
        tokens, entry_token = _cut(plan.runs, size=size)
        first = np.array([each[0] for each in tokens])
        chunk_T = np.empty(len(subtree_end_T), dtype=np.int64)
        for chunk, each in enumerate(tokens):
            chunk_T[each] = chunk
        step = _steps(np.where(entry_token >= 0, chunk_T[np.maximum(entry_token, 0)], -1), first=first)
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
        is_entered = entry_token >= 0
        read_tokens = np.concatenate([entry_token[is_entered], plan.cut_places])
        read_slot_R, read_of_token = np.unique(slot_T[read_tokens], return_inverse=True)
        read_bounds = np.searchsorted(read_slot_R, chunk_bounds * size)
        entry_M = -2 - entry_token  # of those that states of the context enter, see `Runs.behind_context`
        num_entries = np.count_nonzero(is_entered)
        entry_M[is_entered] = read_of_token[:num_entries] - read_bounds[step[is_entered] - 1]
        arrays = (token_MC, before_MCC, slot_T, read_slot_R, entry_M, read_of_token[num_entries:])
        *on_device, left_L = to_device([torch.from_numpy(array) for array in arrays], plan.subtree_end_T.device)
        return cls(
            *on_device,
            chunk_bounds=tuple(chunk_bounds.tolist()),
            read_bounds=tuple(read_bounds.tolist()),
            num_entered=len(plan.runs.entered_E),
            left_L=left_L if len(plan.cut_places) else None,
        )

    @property
    def num_steps(self) -> int:
        """Steps that follow each other: chunks on the deepest path."""
        return len(self.chunk_bounds) - 1


def _cut(runs: Runs, *, size: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the tokens of each chunk, ascending, and the tokens that the chunks are entered after.

    In place of the token before a root is the number that stands for it in `Runs.behind_context`.
    """
    starts, lasts, parents = (each.tolist() for each in runs.behind_context())
    chunks: list[np.ndarray] = []
    entry_tokens: list[int] = []

    def close(tokens: np.ndarray, entry_token: int) -> None:
        chunks.append(np.sort(tokens))
        entry_tokens.append(entry_token)

    # What lies at the top of a run's subtree and is in no chunk yet: at most `size` tokens, the run's first among them.
    open_below: defaultdict[int, list[np.ndarray]] = defaultdict(list)
    for run in reversed(range(len(starts))):
        start, last = starts[run], lasts[run]
        taken, left = [], []
        room = size - 1
        for tokens in sorted(open_below.pop(run, []), key=lambda each: (len(each), each[0])):
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
        open_below[parents[run]].append(opened)
    for entry, parts in open_below.items():  # of the roots
        for tokens in _fill(parts, size=size):
            close(tokens, entry)
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
