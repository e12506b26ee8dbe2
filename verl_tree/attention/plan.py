"""What every attention layer of one pack shares: the runs of the pack and the pieces the work is cut into.

The mask of a pack in DFS preorder is one integer per key: key `j` is visible to query `i` iff
`j <= i < subtree_end[j]`. A *run* is a maximal stretch of tokens with one `subtree_end`: inside it attention is
causal, and the tokens of its subtree follow it directly. So the whole mask is a small set of rectangles and triangles::

    prompt ──┬── a ──┬── b        runs in DFS order:  prompt | a | b | c | d
             │       └── c
             └── d                prompt: triangle over itself, rectangle for the queries a..d
                                  a:      triangle over itself, rectangle for the queries b..c

Long runs become exactly those pieces: contiguous slices, no mask, no gather. Short runs would drown in call overhead,
so neighbours are put into one *window* that gathers the short runs of its paths and carries a boolean mask. Pieces
that hold different keys of one query are merged by log-sum-exp.

Legend: T tree tokens of the pack, R runs, K keys of one piece, L queries of one piece.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch

from verl_tree.attention.blocks import BlockLists
from verl_tree.layout import TreeLayout

LONG_RUN_LEN = 128
"""Runs of at least this many tokens are served by slices; below it the overhead of a call shows."""

WINDOW_LEN = 256
"""Most tokens of short runs that share one masked call."""

SPLIT_KEYS = 256
"""From this many keys that all queries of a window see, they get a piece of their own, without a mask."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPiece:
    """One call of a dense attention kernel: a contiguous range of queries against one set of keys.

    Attributes:
        query_start: First query.
        query_end: One past the last query.
        key_start: First key, where `key_index_K` is None.
        key_end: One past the last key, where `key_index_K` is None.
        key_index_K: int64 (K,) indices of the keys, or None for the slice `key_start:key_end`.
        causal: Queries and keys are the same range and key `j` is visible to query `i` iff `j <= i`.
        mask_LK: bool (L, K), True where visible, or None where every query sees every key (or `causal`).
    """

    query_start: int
    query_end: int
    key_start: int
    key_end: int
    key_index_K: torch.Tensor | None = None
    causal: bool = False
    mask_LK: torch.Tensor | None = None

    def to(self, device: torch.device | str) -> Self:
        """Returns the piece with its tensors on `device`."""
        index, mask = self.key_index_K, self.mask_LK
        return dataclasses.replace(
            self,
            key_index_K=None if index is None else index.to(device),
            mask_LK=None if mask is None else mask.to(device),
        )


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """The attention structure of one pack, built once on the host and used by every layer and backend.

    Attributes:
        subtree_end_T: int32 (T,), one past the last descendant of each token in DFS preorder.
        num_tokens: T.
        max_path_len: Tokens on the longest root-to-leaf path; what a sliding window must not be shorter than.
        num_visible_pairs: (query, key) pairs the mask lets through; attention costs `4 * Hq * D` FLOPs for each in the
            forward pass and `10 * Hq * D` in the backward pass.
        self_pieces: Pieces whose queries cover every token exactly once.
        ancestor_pieces: The other pieces; their results are merged into those of `self_pieces`.
        backend: Name of the backend the layers use, or `"auto"`.
    """

    subtree_end_T: torch.Tensor
    num_tokens: int
    max_path_len: int
    num_visible_pairs: int
    self_pieces: tuple[AttentionPiece, ...]
    ancestor_pieces: tuple[AttentionPiece, ...]
    backend: str = "auto"
    _shared: "_Shared" = field(default_factory=lambda: _Shared(), repr=False)

    @classmethod
    def from_layout(cls, layout: TreeLayout, *, backend: str = "auto") -> Self:
        """Builds the plan of a layout on the layout's device; see `from_subtree_end`."""
        return cls.from_subtree_end(layout.subtree_end_T, backend=backend)

    @classmethod
    def from_subtree_end(
        cls,
        subtree_end_T: torch.Tensor | np.ndarray,
        *,
        backend: str = "auto",
        device: torch.device | str | None = None,
    ) -> Self:
        """Builds the plan of a pack.

        Args:
            subtree_end_T: Integer (T,), one past the last descendant of each token in DFS preorder.
            backend: Attention backend the layers will use (a key of `verl_tree.attention.BACKENDS`, or `"auto"`).
            device: Where the plan's tensors go; by default the device of `subtree_end_T`.

        Returns:
            The plan.

        Raises:
            ValueError: `subtree_end_T` is not that of a forest in DFS preorder.
        """
        if isinstance(subtree_end_T, torch.Tensor):
            device = subtree_end_T.device if device is None else device
            subtree_end_T = subtree_end_T.detach().cpu().numpy()
        device = "cpu" if device is None else device
        runs = _Runs.from_subtree_end(np.asarray(subtree_end_T, dtype=np.int64))
        self_pieces, ancestor_pieces = _cut_into_pieces(runs)
        return cls(
            subtree_end_T=torch.from_numpy(runs.subtree_end_T.astype(np.int32)).to(device),
            num_tokens=len(runs.subtree_end_T),
            max_path_len=int((runs.depth_R + runs.end_R - runs.start_R).max()),
            num_visible_pairs=int((runs.subtree_end_T - np.arange(len(runs.subtree_end_T))).sum()),
            self_pieces=tuple(piece.to(device) for piece in self_pieces),
            ancestor_pieces=tuple(piece.to(device) for piece in ancestor_pieces),
            backend=backend,
        )

    def block_lists(self, *, query_block: int, key_block: int) -> BlockLists:
        """The visible tiles for kernels that work in blocks, on the plan's device.

        Found on the first call for a pair of sizes, and then shared by all layers and by their recomputation.

        Args:
            query_block: Queries of a tile.
            key_block: Keys of a tile.

        Returns:
            The same object on every call.

        Raises:
            ValueError: A block size is not positive.
        """
        sizes = (query_block, key_block)
        if sizes not in self._shared.block_lists:
            subtree_end_T = self.subtree_end_T.cpu().numpy()
            found = BlockLists.from_subtree_end(subtree_end_T, query_block=query_block, key_block=key_block)
            self._shared.block_lists[sizes] = found.to(self.subtree_end_T.device)
        return self._shared.block_lists[sizes]


class _Shared:
    """What is found once and then shared by every copy of a plan.

    FSDP copies the dataclasses and dicts that are passed to a module, layer by layer; an object like this it passes on.
    """

    def __init__(self) -> None:
        self.block_lists: dict[tuple[int, int], BlockLists] = {}


@dataclass(frozen=True, slots=True, eq=False)
class _Runs:
    """Runs of one pack in DFS order, int64 (R,): token range, end of the subtree, parent (-1: root), tokens above."""

    subtree_end_T: np.ndarray
    start_R: np.ndarray
    end_R: np.ndarray
    subtree_end_R: np.ndarray
    parent_R: np.ndarray
    depth_R: np.ndarray

    @classmethod
    def from_subtree_end(cls, subtree_end_T: np.ndarray) -> Self:
        num_tokens = len(subtree_end_T)
        if subtree_end_T.ndim != 1 or num_tokens == 0:
            raise ValueError(f"subtree_end has shape {subtree_end_T.shape}; it must be (T,) with at least one token")
        wrong = np.flatnonzero((subtree_end_T <= np.arange(num_tokens)) | (subtree_end_T > num_tokens))
        if len(wrong):
            raise ValueError(
                f"subtree_end[{wrong[0]}] = {subtree_end_T[wrong[0]]}, but a token's subtree holds the token itself "
                f"and ends within the pack of {num_tokens} tokens; give one past the last descendant in DFS preorder"
            )
        start_R = np.concatenate(([0], np.flatnonzero(np.diff(subtree_end_T)) + 1))
        end_R = np.append(start_R[1:], num_tokens)
        subtree_end_R = subtree_end_T[start_R]
        parent_R, depth_R = np.full(len(start_R), -1), np.zeros(len(start_R), dtype=np.int64)
        stack: list[int] = []
        for run, (start, end) in enumerate(zip(start_R.tolist(), subtree_end_R.tolist(), strict=True)):
            while stack and subtree_end_R[stack[-1]] <= start:
                stack.pop()
            if stack:
                parent = stack[-1]
                if end > subtree_end_R[parent]:
                    raise ValueError(
                        f"subtree_end[{start}] = {end} reaches past its ancestor's {subtree_end_R[parent]}; the tokens "
                        "are not in DFS preorder"
                    )
                parent_R[run] = parent
                depth_R[run] = depth_R[parent] + end_R[parent] - start_R[parent]
            stack.append(run)
        return cls(subtree_end_T, start_R, end_R, subtree_end_R, parent_R, depth_R)

    def is_long(self, run: int) -> bool:
        return bool(self.end_R[run] - self.start_R[run] >= LONG_RUN_LEN)

    def short_ancestor_tokens(self, runs: Iterable[int], before: int) -> np.ndarray:
        """int64 (K,) sorted tokens of the short runs above any of `runs` that start before token `before`."""
        seen: set[int] = set()
        for run in runs:
            above = int(self.parent_R[run])
            while above >= 0 and above not in seen:
                seen.add(above)
                above = int(self.parent_R[above])
        ranges = [
            np.arange(self.start_R[run], self.end_R[run])
            for run in sorted(seen)
            if self.start_R[run] < before and not self.is_long(run)
        ]
        return np.concatenate(ranges) if ranges else np.empty(0, dtype=np.int64)


def _cut_into_pieces(runs: _Runs) -> tuple[list[AttentionPiece], list[AttentionPiece]]:
    self_pieces: list[AttentionPiece] = []
    ancestor_pieces: list[AttentionPiece] = []
    window: list[int] = []
    for run, (start, end) in enumerate(zip(runs.start_R.tolist(), runs.end_R.tolist(), strict=True)):
        if window and (runs.is_long(run) or end - int(runs.start_R[window[0]]) > WINDOW_LEN):
            _add_window(runs, window, self_pieces, ancestor_pieces)
            window = []
        if not runs.is_long(run):
            window.append(run)
            continue
        self_pieces.append(AttentionPiece(start, end, start, end, causal=True))
        above_K = runs.short_ancestor_tokens([run], before=start)
        if len(above_K):
            ancestor_pieces.append(_piece(start, end, above_K))
        if runs.subtree_end_R[run] > end:
            ancestor_pieces.append(AttentionPiece(end, int(runs.subtree_end_R[run]), start, end))
    if window:
        _add_window(runs, window, self_pieces, ancestor_pieces)
    return self_pieces, ancestor_pieces


def _add_window(
    runs: _Runs, window: list[int], self_pieces: list[AttentionPiece], ancestor_pieces: list[AttentionPiece]
) -> None:
    start, end = int(runs.start_R[window[0]]), int(runs.end_R[window[-1]])
    above_K = runs.short_ancestor_tokens(window, before=start)
    if len(window) == 1 and not len(above_K):
        self_pieces.append(AttentionPiece(start, end, start, end, causal=True))
        return
    seen_by_all = runs.subtree_end_T[above_K] >= end
    if seen_by_all.sum() >= SPLIT_KEYS:
        ancestor_pieces.append(_piece(start, end, above_K[seen_by_all]))
        above_K = above_K[~seen_by_all]
    key_K, query_L = np.concatenate((above_K, np.arange(start, end))), np.arange(start, end)[:, None]
    self_pieces.append(_piece(start, end, key_K, mask_LK=(key_K <= query_L) & (query_L < runs.subtree_end_T[key_K])))


def _piece(start: int, end: int, key_K: np.ndarray, mask_LK: np.ndarray | None = None) -> AttentionPiece:
    """A piece over the sorted `key_K`: a slice where they are contiguous, else a gather."""
    mask = None if mask_LK is None else torch.from_numpy(mask_LK)
    first, last = int(key_K[0]), int(key_K[-1]) + 1
    index = None if last - first == len(key_K) else torch.from_numpy(key_K)
    return AttentionPiece(start, end, first, last, key_index_K=index, mask_LK=mask)
