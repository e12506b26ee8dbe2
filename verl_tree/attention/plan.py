"""What every attention layer of one pack shares: the runs of the pack and the pieces the work is cut into.

The mask of a pack in DFS preorder is one integer per key: key `j` is visible to query `i` iff
`j <= i < subtree_end[j]`. A *run* is a maximal stretch of tokens with one `subtree_end`: inside it attention is
causal, and the tokens of its subtree follow it directly. So the whole mask is a small set of rectangles and triangles::

    prompt ──┬── a ──┬── b        runs in DFS order:  prompt | a | b | c | d
             │       └── c
             └── d                prompt: triangle over itself, rectangle for the queries a..d
                                  a:      triangle over itself, rectangle for the queries b..c

Those are the pieces: contiguous slices, no mask, no gather, and no pair that is not visible. Pieces that hold different
keys of one query are merged by log-sum-exp.

Legend: T tree tokens of the pack, R runs.
"""

from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch

from verl_tree.attention.blocks import BlockLists
from verl_tree.attention.pieces import AttentionPiece, VarlenCall, varlen_calls, window_calls
from verl_tree.tree.layout import TreeLayout


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """The attention structure of one pack, built once on the host and used by every layer and backend.

    Attributes:
        subtree_end_T: int32 (T,), one past the last descendant of each token in DFS preorder.
        position_T: int32 (T,), position of each token on its own path, which sliding windows are measured in.
        num_tokens: T.
        max_path_len: Tokens on the longest root-to-leaf path; a sliding window that long is none.
        num_visible_pairs: (query, key) pairs the mask lets through; attention costs `4 * Hq * D` FLOPs for each in the
            forward pass and `10 * Hq * D` in the backward pass. Those of the full mask, whatever the windows of the
            layers.
        backend: Name of the backend the layers use, or `"auto"`.
    """

    subtree_end_T: torch.Tensor
    position_T: torch.Tensor
    num_tokens: int
    max_path_len: int
    num_visible_pairs: int
    backend: str
    _shared: "_Shared" = field(repr=False)

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
        subtree_end_T = torch.from_numpy(runs.subtree_end_T.astype(np.int32))
        position_T = torch.from_numpy(runs.positions())
        return cls(
            subtree_end_T=subtree_end_T.to(device),
            position_T=position_T.to(device),
            num_tokens=len(runs.subtree_end_T),
            max_path_len=int((runs.depth_R + runs.end_R - runs.start_R).max()),
            num_visible_pairs=int((runs.subtree_end_T - np.arange(len(runs.subtree_end_T))).sum()),
            backend=backend,
            _shared=_Shared(subtree_end_T, position_T, *_cut_into_pieces(runs)),
        )

    @property
    def self_pieces(self) -> tuple[AttentionPiece, ...]:
        """Pieces whose queries cover every token exactly once."""
        return self._shared.self_pieces

    @property
    def ancestor_pieces(self) -> tuple[AttentionPiece, ...]:
        """The other pieces; their results are merged into those of `self_pieces`."""
        return self._shared.ancestor_pieces

    def block_lists(self, *, query_block: int, key_block: int, window: int | None = None) -> BlockLists:
        """The visible tiles for kernels that work in blocks, on the plan's device.

        Found on the first call for a pair of sizes and a window, and then shared by all layers and by their
        recomputation.

        Args:
            query_block: Queries of a tile.
            key_block: Keys of a tile.
            window: Sliding window of the layer; None where it has none.

        Returns:
            The same object on every call.

        Raises:
            ValueError: A block size is not positive.
        """
        wanted = (query_block, key_block, window)
        if wanted not in self._shared.block_lists:
            found = BlockLists.from_subtree_end(
                self._shared.subtree_end_T.numpy(),
                query_block=query_block,
                key_block=key_block,
                window=window,
                position_T=self._shared.position_T.numpy(),
            )
            self._shared.block_lists[wanted] = found.to(self.subtree_end_T.device)
        return self._shared.block_lists[wanted]

    def varlen_calls(self) -> tuple[VarlenCall, ...]:
        """The pieces batched for kernels of sequences of varying lengths, on the plan's device; found once."""
        if self._shared.varlen_calls is None:
            self._shared.varlen_calls = varlen_calls(
                self.self_pieces, self.ancestor_pieces, device=self.subtree_end_T.device
            )
        return self._shared.varlen_calls

    def window_calls(self, window: int, *, max_segment_len: int | None = None) -> tuple[VarlenCall, ...]:
        """The calls of layers with a sliding window (see `pieces.window_calls`), on the plan's device; found once."""
        key = (window, max_segment_len)
        if key not in self._shared.window_calls:
            self._shared.window_calls[key] = window_calls(
                self.self_pieces,
                self.ancestor_pieces,
                window=window,
                max_segment_len=max_segment_len,
                device=self.subtree_end_T.device,
            )
        return self._shared.window_calls[key]


class _Shared:
    """What is found once and then shared by every copy of a plan.

    FSDP copies the dataclasses, dicts and tuples that are passed to a module, layer by layer and all that is in them;
    an object like this it passes on. `subtree_end_T` and `position_T` are copies on the host, so that planning waits
    for no device.
    """

    def __init__(
        self,
        subtree_end_T: torch.Tensor,
        position_T: torch.Tensor,
        self_pieces: tuple[AttentionPiece, ...],
        ancestor_pieces: tuple[AttentionPiece, ...],
    ) -> None:
        self.subtree_end_T = subtree_end_T
        self.position_T = position_T
        self.self_pieces = self_pieces
        self.ancestor_pieces = ancestor_pieces
        self.block_lists: dict[tuple[int, int, int | None], BlockLists] = {}
        self.varlen_calls: tuple[VarlenCall, ...] | None = None
        self.window_calls: dict[tuple[int, int | None], tuple[VarlenCall, ...]] = {}


@dataclass(frozen=True, slots=True, eq=False)
class _Runs:
    """Runs of one pack in DFS order, int64 (R,): token range, end of the subtree, tokens above."""

    subtree_end_T: np.ndarray
    start_R: np.ndarray
    end_R: np.ndarray
    subtree_end_R: np.ndarray
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
        depth_R = np.zeros(len(start_R), dtype=np.int64)
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
                depth_R[run] = depth_R[parent] + end_R[parent] - start_R[parent]
            stack.append(run)
        return cls(subtree_end_T, start_R, end_R, subtree_end_R, depth_R)

    def positions(self) -> np.ndarray:
        """int32 (T,) position of each token on its path."""
        offset_R = self.depth_R - self.start_R
        return (np.arange(len(self.subtree_end_T)) + np.repeat(offset_R, self.end_R - self.start_R)).astype(np.int32)


def _cut_into_pieces(runs: _Runs) -> tuple[tuple[AttentionPiece, ...], tuple[AttentionPiece, ...]]:
    """Every run's triangle, and the rectangle of the queries below it."""
    ranges = list(zip(runs.start_R.tolist(), runs.end_R.tolist(), runs.subtree_end_R.tolist(), strict=True))
    return (
        tuple(AttentionPiece(start, end, start, end, causal=True) for start, end, _ in ranges),
        tuple(AttentionPiece(end, below, start, end) for start, end, below in ranges if below > end),
    )
