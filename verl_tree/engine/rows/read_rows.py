"""The rows of a mini-batch that a loss reads, as one forest.

The forest is built from the rows' keys (`verl_tree.tree.row_keys`). Their token ids lie beside it.

Legend: B rows of the mini-batch, of which a loss reads S; F flat tokens of some leaves, F_all of the mini-batch.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from verl_tree.functional import shared_token_weights
from verl_tree.tree import TokenForest
from verl_tree.tree.layout import TreeLayout
from verl_tree.tree.nodes import IntArray
from verl_tree.tree.rows import ranges


@dataclass(frozen=True, slots=True, eq=False)
class ReadRows:
    """The rows of a mini-batch that a loss reads, as one forest with the leaves 0..S - 1."""

    forest: TokenForest
    rows: IntArray  # (S,) int64, each leaf's row in the mini-batch
    starts: IntArray  # (S,) int64, where each leaf starts among the F_all flat tokens
    token_ids: IntArray  # (F_all,) of all rows
    num_trained: IntArray  # (S,) int64, tokens of each leaf that a loss reads
    trained: np.ndarray  # (F_all,) bool, the flat tokens that a loss reads
    num_all_tokens: int  # Tree tokens, with those of the rows that teach nothing
    weights: Tensor | None = None  # (F_all,) gradient weights of the flat tokens. None: all are 1

    @classmethod
    def from_batch(
        cls,
        token_ids: np.ndarray,
        *,
        offsets: IntArray,
        trained: np.ndarray,
        keys: IntArray | None = None,
        live: np.ndarray | None = None,
    ) -> Self:
        """Build the forest of the rows that a loss reads; see `split_into_packs`."""
        keys = token_ids if keys is None else keys

        def forest_of(rows: IntArray) -> TokenForest:
            return TokenForest.from_sequences([keys[offsets[row] : offsets[row + 1]] for row in rows])

        num_trained = np.add.reduceat(trained, offsets[:-1], dtype=np.int64)
        rows = np.flatnonzero(num_trained)
        forest = forest_of(rows)
        num_all_tokens = forest.num_tokens
        if live is not None and not live[rows].all():
            rows = rows[live[rows]]
            forest = forest_of(rows)
        return cls(
            forest=forest,
            rows=rows,
            starts=offsets[rows],
            token_ids=token_ids,
            num_trained=num_trained[rows],
            trained=trained,
            num_all_tokens=num_all_tokens,
        )

    def flat_index(self, leaves: IntArray) -> IntArray:
        """Return the places of some leaves' tokens among the F_all flat tokens, leaf after leaf."""
        return ranges(self.starts[leaves], self.forest.sequence_lens[leaves])

    def trees(self) -> list[IntArray]:
        """Return the leaves of each tree, in DFS order."""
        starts = np.flatnonzero(self.forest.lcp == 0)
        return np.split(self.forest.order, starts[1:])

    def forest_of(self, leaves: IntArray) -> TokenForest:
        """Return the forest of some leaves alone; its trajectories are numbered in the order given."""
        return TokenForest.from_sequences([self.forest.sequence(leaf) for leaf in leaves.tolist()])

    def weigh(self, shared_tokens: str) -> Self:
        """Add the gradient weights of an objective for shared tokens; see `shared_token_weights`.

        Leaves are counted over the whole mini-batch, so the objective does not depend on the packing.
        """
        if shared_tokens == "sum":
            return self
        whole = TreeLayout.from_forest(self.forest)
        index = self.flat_index(whole.leaves)
        weight_F = shared_token_weights(whole, torch.from_numpy(self.trained[index]), shared_tokens)
        weights = torch.zeros(len(self.trained), dtype=weight_F.dtype)
        weights[index] = weight_F
        return replace(self, weights=weights)
