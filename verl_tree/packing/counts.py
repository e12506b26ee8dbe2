"""Metrics of forests and packings: counters that add over forests, steps and ranks, and ratios of the sums.

A mean of ratios is not the ratio of the whole, so ratios are taken last, from the added counters.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Self


@dataclass(frozen=True, slots=True)
class ForestCounts:
    """Counters of what was packed or relayed, in docs/glossary.md's words; `sum(counts, ForestCounts())` adds them.

    A relayed tree has no packs. Its packed tokens and their lower bound are its tree tokens, because its sections
    compute each of them once, forward and backward; the spine, which is forwarded once more, is counted apart.
    """

    num_flat_tokens: int = 0
    num_tree_tokens: int = 0
    num_all_tokens: int = 0  # Tree tokens, with those of the rows that teach nothing; 0 where nobody counts them
    num_packed_tokens: int = 0  # Tokens computed forward and backward, the sum over the packs and sections
    num_nodes: int = 0
    num_leaves: int = 0
    num_packs: int = 0
    num_flat_packs: int = 0  # Packs whose trajectories are computed one by one
    num_lower_bound_tokens: int = 0  # Lower bound on the packed tokens
    num_capacity_tokens: int = 0  # Tokens that the packs and sections could hold; 0 without a capacity
    depth: int = 0  # Nodes on the longest path; the maximum when added
    num_sections: int = 0  # Sections of the trees that are relayed
    num_spine_tokens: int = 0
    num_context_tokens: int = 0  # Context tokens gathered, the sum over the sections and the forwards of the spine
    num_routed_tokens: int = 0  # Tree tokens whose experts the rows say
    num_route_conflicts: int = 0  # Those of which the rows disagree
    max_store_bytes: int = 0  # Keys, values and gradients that one store held; the maximum when added

    def __add__(self, other: Self) -> Self:
        sums = [mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)]
        return replace(
            type(self)(*sums),
            depth=max(self.depth, other.depth),
            max_store_bytes=max(self.max_store_bytes, other.max_store_bytes),
        )

    def metrics(self, *, prefix: str = "tree") -> dict[str, float]:
        """Return the metrics of everything that was added, under `{prefix}/...`.

        Ratios: `por` = 1 - tree / flat tokens, `err` = 1 - packed / flat tokens, `compression` = flat / packed tokens
        (0, 0 and 1 if nothing was added). If there are packs or sections: `gap` = packed tokens / lower bound - 1, at
        least the distance from the best packing (packs that run flat count with all of their tokens). Under a capacity:
        `fill` = packed tokens / capacity of the packs and sections.

        Sums: `tokens` (tree tokens), `flat_tokens`, `packed_tokens`, `nodes`, `leaves`, `packs`, `packs_flat`. Maximum:
        `depth`.

        If rows that teach nothing were looked for: `live_tokens` = tree tokens / those of all rows that a loss reads.

        If trees were relayed: `sections`, `context_tokens` (sums), `spine_ratio` = spine tokens / tree tokens of all
        trees, `store_gib` (maximum).

        If routes were replayed: `route_conflicts` = tree tokens of which the rows disagree / those that got routes.
        """
        flat, packed, bound = self.num_flat_tokens, self.num_packed_tokens, self.num_lower_bound_tokens
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
            "packs_flat": self.num_flat_packs,
            "depth": self.depth,
        }
        if bound:
            values["gap"] = packed / bound - 1.0
        if self.num_capacity_tokens:
            values["fill"] = packed / self.num_capacity_tokens
        if self.num_all_tokens:
            values["live_tokens"] = self.num_tree_tokens / self.num_all_tokens
        if self.num_sections:
            values["sections"] = self.num_sections
            values["context_tokens"] = self.num_context_tokens
            values["spine_ratio"] = self.num_spine_tokens / self.num_tree_tokens
            values["store_gib"] = self.max_store_bytes / 2**30
        if self.num_routed_tokens:
            values["route_conflicts"] = self.num_route_conflicts / self.num_routed_tokens
        return {f"{prefix}/{name}": float(value) for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class RankTimes:
    """How evenly ranks work; `sum(times, RankTimes())` adds mini-batches, each of which waits for its slowest rank.

    Predictions are not in seconds until the cost model is fitted. Measured times are processor seconds, 0 on a GPU,
    where they are not measured. `packing_s` is what the slowest rank needed to find its forest and pack it.
    """

    predicted_max_s: float = 0.0
    predicted_mean_s: float = 0.0
    measured_max_s: float = 0.0
    measured_mean_s: float = 0.0
    packing_s: float = 0.0

    @classmethod
    def of_ranks(cls, *, predicted_s: Sequence[float], measured_s: Sequence[float], packing_s: Sequence[float]) -> Self:
        """Sum up one mini-batch from one entry per rank."""
        return cls(
            predicted_max_s=max(predicted_s),
            predicted_mean_s=sum(predicted_s) / len(predicted_s),
            measured_max_s=max(measured_s),
            measured_mean_s=sum(measured_s) / len(measured_s),
            packing_s=max(packing_s),
        )

    def __add__(self, other: Self) -> Self:
        return type(self)(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))

    def metrics(self, *, prefix: str = "tree") -> dict[str, float]:
        """Return `packing_s` and `rank_imbalance/{predicted,measured}` (maximum / mean), the latter if measured."""
        values = {"packing_s": self.packing_s}
        if self.predicted_mean_s:
            values["rank_imbalance/predicted"] = self.predicted_max_s / self.predicted_mean_s
        if self.measured_mean_s:
            values["rank_imbalance/measured"] = self.measured_max_s / self.measured_mean_s
        return {f"{prefix}/{name}": value for name, value in values.items()}
