"""The work of an update on stored trees: its rows, cut into packs and sections and dealt to ranks as a run does it.

By the same code, so seconds and bytes can be foreseen from it (`verl_tree.launch.run.layouts`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np

from verl_tree.config import TreeConfig
from verl_tree.cost.model import CostModel, WorkProfile
from verl_tree.engine.rows.packs import TreeMicroBatch, split_into_packs
from verl_tree.functional.update_memory import Levers, ModelSize, Relay, update_memory, waiting_bytes
from verl_tree.records import read_trees
from verl_tree.trainer.rows.batching import assign_rows
from verl_tree.tree import TokenForest


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of stored groups, those that an update computes."""

    tokens: tuple[np.ndarray, ...]
    trained: tuple[np.ndarray, ...]  # bool, as long as the tokens
    groups: tuple[tuple[int, ...], ...]  # the rows of each
    num_left_out: int = 0

    @classmethod
    def of_file(cls, path: Path, *, leaves_out: bool) -> Self:
        """Read what `tree.dump_dir` stored; `leaves_out` those whose advantages are all 0."""
        tokens: list[np.ndarray] = []
        trained: list[np.ndarray] = []
        groups: list[tuple[int, ...]] = []
        num_left_out = 0
        for tree in read_trees(path):
            first = len(tokens)
            for leaf in tree.leaves:
                advantages = leaf.token_advantages
                is_live = not leaves_out or advantages is None or bool(np.asarray(advantages).any())
                if not is_live or not leaf.is_trained[1:].any():
                    num_left_out += 1
                    continue
                tokens.append(np.asarray(leaf.token_ids, dtype=np.int64))
                trained.append(leaf.is_trained)
            if len(tokens) > first:
                groups.append(tuple(range(first, len(tokens))))
        if not groups:
            raise ValueError(
                f"--plan {path}: an update has nothing to compute of these trees; give those of another step"
            )
        return cls(tuple(tokens), tuple(trained), tuple(groups), num_left_out)

    def stretched(self, factor: int) -> Self:
        """Return rows of the same trees in which every token is there so many times."""
        tokens = tuple(np.repeat(each, factor) for each in self.tokens)
        return replace(self, tokens=tokens, trained=tuple(np.repeat(each, factor) for each in self.trained))

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(map(len, self.tokens))

    @cached_property
    def profiles(self) -> list[WorkProfile]:
        """The work of each group."""
        return [
            WorkProfile.from_forest(
                TokenForest.from_sequences([self.tokens[row] for row in group]),
                trained=[self.trained[row] for row in group],
            )
            for group in self.groups
        ]

    @property
    def num_tree_tokens(self) -> int:
        """Tree tokens, group by group."""
        return sum(each.range_work(0, each.num_leaves).num_tokens for each in self.profiles)


def micro_batches_of(
    rows: Rows, tree: TreeConfig, *, costs: CostModel, num_ranks: int, groups_per_mini_batch: int
) -> list[list[tuple[TreeMicroBatch, ...]]]:
    """Deal the rows to mini-batches and ranks and cut them as a run does: by mini-batch, what each rank computes."""
    assignment = assign_rows(
        rows.groups,
        profiles=rows.profiles,
        model=costs,
        num_ranks=num_ranks,
        groups_per_mini_batch=groups_per_mini_batch,
    )
    ranks = [[_cut(rows, cell, tree, costs=costs) for cell in of_rank] for of_rank in assignment.cells()]
    return [list(of_ranks) for of_ranks in zip(*ranks, strict=True)]


def _cut(rows: Rows, cell: Sequence[int], tree: TreeConfig, *, costs: CostModel) -> tuple[TreeMicroBatch, ...]:
    assert isinstance(tree.capacity, int)
    if not cell:
        return ()
    return split_into_packs(
        np.concatenate([rows.tokens[row] for row in cell]),
        offsets=np.cumsum([0, *(len(rows.tokens[row]) for row in cell)]),
        trained=np.concatenate([rows.trained[row] for row in cell]),
        capacity=tree.capacity,
        config=tree,
        cost_model=costs,
    ).micro_batches


def predicted_s(mini_batches: Sequence[Sequence[Sequence[TreeMicroBatch]]], costs: CostModel) -> float:
    """Predict the seconds of an update, whose mini-batches wait for their slowest rank."""
    return sum(max(sum(costs.predict(micro.work) for micro in of_rank) for of_rank in ranks) for ranks in mini_batches)


def rank_bytes(
    size: ModelSize,
    micros: Sequence[TreeMicroBatch],
    *,
    levers: Levers,
    on_host: bool = False,
    team: int = 1,
    reduce_bytes: int,
    kernel_bytes: int | None = None,
) -> int:
    """Compute the most bytes that a rank takes at once in a mini-batch, besides its part of weights and states.

    The passes run in the order of `micros`, the sections of a tree from the last to the first. From the second on there
    are the gradients that wait, too. `reduce_bytes` are those of a gradient when it is added up over the ranks; see
    `update_memory` for `kernel_bytes`.
    """

    def of_micro(micro: TreeMicroBatch) -> Iterator[int]:
        # A log-prob is made where the parent of its token is.
        scorers = np.unique(micro.layout.parent_T.numpy()[micro.wanted_T.numpy()])
        for section in reversed(micro.cut.sections):
            num_scored = int(((scorers >= section.start) & (scorers < section.end)).sum())
            relay = None
            if micro.is_relayed:
                relay = Relay(-(-section.num_context // team), on_host, spine_len=-(-len(micro.cut.spine) // team))
            yield update_memory(
                size,
                -(-section.num_tokens // team),
                state_bytes=0,
                levers=replace(levers, chunk_size=min(levers.chunk_size, max(1, num_scored))),
                relay=relay,
                kernel_bytes=kernel_bytes,
            ).total

    first, *later = [each for micro in micros for each in of_micro(micro)] or [0]
    return max([first, *(each + waiting_bytes(size, reduce_bytes=reduce_bytes) for each in later)])
