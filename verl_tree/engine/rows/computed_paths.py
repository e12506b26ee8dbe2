"""What an update computes, as lengths: those of rows, and of what each of them shares with the row before it.

verl's FLOPs counter takes a list of lengths, and what it counts of a row is the sum of what its tokens add. So the
tokens of a row behind its first `n` cost the row less a row of `n` tokens, whatever kinds of layers a model has. Rows
in depth-first order share with the row before them all that is computed already.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Self

import numpy as np

from verl_tree.tree.layout import TreeLayout


@dataclass(frozen=True, slots=True)
class ComputedPaths:
    """Rows of which each token counts once for every time that it runs forward and backward.

    What a relayed tree runs forward once more, without gradient, does not count; nor does what gradient checkpointing
    runs again.
    """

    lens: tuple[int, ...] = ()  # Tokens of each row
    shared_lens: tuple[int, ...] = ()  # Those of a row that the row before it has computed, where there are any
    num_projected: int = 0  # Positions that the output head reads

    @classmethod
    def flat(cls, lens: Sequence[int]) -> Self:
        """Count rows of which each is computed by itself, every position projected."""
        return cls(lens=tuple(lens), num_projected=sum(lens))

    @classmethod
    def of_layout(cls, layout: TreeLayout, *, num_projected: int) -> Self:
        """Count the rows of a layout on the host, in one pack or in sections."""
        ends = layout.leaf_offsets[1:]
        last = layout.tree_index_F.numpy()[ends - 1]
        # Leaves are in depth-first order, and tokens in preorder: all up to the last token of a leaf is there by then.
        num_new = np.diff(np.maximum.accumulate(last + 1), prepend=0)
        lens = np.diff(layout.leaf_offsets)
        shared = lens - num_new
        return cls(tuple(lens.tolist()), tuple(shared[shared > 0].tolist()), num_projected)

    @classmethod
    def sum(cls, parts: Iterable[Self]) -> Self:
        """Put the rows of several parts together."""
        parts = list(parts)
        return cls(
            lens=tuple(chain.from_iterable(each.lens for each in parts)),
            shared_lens=tuple(chain.from_iterable(each.shared_lens for each in parts)),
            num_projected=sum(each.num_projected for each in parts),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens that run forward and backward."""
        return sum(self.lens) - sum(self.shared_lens)
