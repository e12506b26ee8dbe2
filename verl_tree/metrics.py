"""Metrics of forests and packings: counters that add over forests, steps and ranks, and ratios of the sums.

A mean of ratios is not the ratio of the whole, so ratios are only taken at the end, from the added counters.
"""

from dataclasses import dataclass
from typing import Self

from verl_tree.packing import Packing
from verl_tree.tree import TokenForest


@dataclass(frozen=True, slots=True)
class ForestCounts:
    """What was packed. `sum(counts, ForestCounts())` adds any number of them.

    Attributes:
        num_flat_tokens: sum of the trajectory lengths.
        num_tree_tokens: unique tokens of the forests.
        num_packed_tokens: tokens computed, the sum over the packs.
        num_nodes: nodes of the forests.
        num_leaves: trajectories.
        num_packs: packs.
        depth: nodes on the longest path; of two forests the deeper one counts.
    """

    num_flat_tokens: int = 0
    num_tree_tokens: int = 0
    num_packed_tokens: int = 0
    num_nodes: int = 0
    num_leaves: int = 0
    num_packs: int = 0
    depth: int = 0

    @classmethod
    def from_packing(cls, packing: Packing, *, forest: TokenForest) -> Self:
        """Counts a forest and the packing made of it."""
        assert packing.num_flat_tokens == forest.num_flat_tokens, "a packing of another forest"
        return cls(
            num_flat_tokens=forest.num_flat_tokens,
            num_tree_tokens=forest.num_tokens,
            num_packed_tokens=packing.num_tokens,
            num_nodes=forest.num_nodes,
            num_leaves=forest.num_leaves,
            num_packs=len(packing.packs),
            depth=forest.depth,
        )

    def __add__(self, other: Self) -> Self:
        return type(self)(
            num_flat_tokens=self.num_flat_tokens + other.num_flat_tokens,
            num_tree_tokens=self.num_tree_tokens + other.num_tree_tokens,
            num_packed_tokens=self.num_packed_tokens + other.num_packed_tokens,
            num_nodes=self.num_nodes + other.num_nodes,
            num_leaves=self.num_leaves + other.num_leaves,
            num_packs=self.num_packs + other.num_packs,
            depth=max(self.depth, other.depth),
        )

    def metrics(self, *, prefix: str = "tree") -> dict[str, float]:
        """The metrics of everything that was added.

        Args:
            prefix: first part of the names.

        Returns:
            `por` = 1 - tree / flat tokens, `err` = 1 - packed / flat tokens and `compression` = flat / packed
            tokens (0, 0 and 1 where nothing was added); `tokens` (unique tree tokens), `flat_tokens`,
            `packed_tokens`, `nodes`, `leaves`, `packs` and `depth`.
        """
        flat, packed = self.num_flat_tokens, self.num_packed_tokens
        values = {
            "por": 1.0 - self.num_tree_tokens / flat if flat else 0.0,
            "err": 1.0 - packed / flat if flat else 0.0,
            "compression": flat / packed if packed else 1.0,
            "tokens": self.num_tree_tokens,
            "flat_tokens": flat,
            "packed_tokens": packed,
            "nodes": self.num_nodes,
            "leaves": self.num_leaves,
            "packs": self.num_packs,
            "depth": self.depth,
        }
        return {f"{prefix}/{name}": float(value) for name, value in values.items()}
