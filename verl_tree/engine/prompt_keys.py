"""Rows that share their prompts only, `tree.sharing=prompt`: what a trainer without trees can share, as an ablation.

The forest is built from keys, as where routes differ: the first token of a row's response has a key that no other row
has. So what follows is the row's own, and the gradients are those of full sharing, computed from more tokens.

Example: the rows [1 2 3 4 5] and [1 2 3 4 6], of which the first two tokens are the prompt::

    tree.sharing=full    1 2 3 4 ─┬─ 5        tree.sharing=prompt    1 2 ─┬─ 3 4 5
                                  └─ 6                                    └─ 3'4 6

Legend: B rows, F_all flat tokens of the mini-batch.
"""

import dataclasses
from dataclasses import dataclass
from typing import Self

import numpy as np

from verl_tree.engine.packs import TreeBatch
from verl_tree.tree.nodes import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class PromptKeys:
    """Keys under which rows share nothing behind their prompts."""

    keys_F_all: IntArray  # (F_all,) int64, what stands for each token where rows are compared
    _num_keys: int

    @classmethod
    def of_rows(cls, keys_F_all: IntArray, *, offsets: IntArray, response_lens: IntArray) -> Self:
        """Give each row (B,) a key of its own where its response begins; see `split_into_packs`.

        `keys_F_all` stand for tokens where all may be shared, the ids themselves or keys of images.
        """
        num_keys = int(keys_F_all.max(initial=0)) + 1
        keys = keys_F_all.astype(np.int64)
        (rows,) = np.nonzero(response_lens)
        keys[offsets[rows + 1] - response_lens[rows]] += (rows + 1) * num_keys
        return cls(keys, num_keys)

    def with_tokens(self, batch: TreeBatch) -> TreeBatch:
        """Return micro-batches that were cut by these keys, with what they stand for."""
        return tokens_of_keys(batch, num_keys=self._num_keys)


def tokens_of_keys(batch: TreeBatch, *, num_keys: int) -> TreeBatch:
    """Return micro-batches with token `key % num_keys` in place of each key."""
    micro_batches = tuple(
        dataclasses.replace(
            micro, layout=dataclasses.replace(micro.layout, token_ids_T=micro.layout.token_ids_T % num_keys)
        )
        for micro in batch.micro_batches
    )
    return dataclasses.replace(batch, micro_batches=micro_batches)
