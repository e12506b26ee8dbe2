"""The work of an update on trees, stored or of a shape: rows, cut into packs and sections and dealt to ranks.

By the code of a run, so seconds and bytes can be foreseen from it (`verl_tree.launch.run.layouts`).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from verl_tree.config import TreeConfig
from verl_tree.cost.model import CostModel, Work, WorkProfile
from verl_tree.engine.rows.packs import TreeMicroBatch, split_into_packs
from verl_tree.functional.memory import KeysAndValues
from verl_tree.functional.model_size import HALF, ModelSize, Sharing
from verl_tree.functional.update_memory import Levers, Relay, UpdateMemory, update_memory, waiting_bytes
from verl_tree.records import read_trees
from verl_tree.trainer.rows.batching import assign_rows
from verl_tree.tree import TokenForest


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of stored groups, those that an update computes."""

    tokens: tuple[np.ndarray, ...]
    trained: tuple[np.ndarray, ...]  # bool, as long as the tokens
    groups: tuple[tuple[int, ...], ...]  # the rows of each
    copies: int = 1  # how often an update has all of this
    num_left_out: int = 0
    places: tuple[int, ...] | None = None  # of the groups among all prompts; prompts of which nothing is left have none

    @classmethod
    def of_file(cls, path: Path, *, leaves_out: bool) -> Self:
        """Read what `tree.dump_dir` stored; `leaves_out` those whose advantages are all 0."""
        tokens: list[np.ndarray] = []
        trained: list[np.ndarray] = []
        groups: list[tuple[int, ...]] = []
        num_left_out = 0
        places: list[int] = []
        for place, tree in enumerate(read_trees(path)):
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
                places.append(place)
        if not groups:
            raise ValueError(
                f"--plan {path}: an update has nothing to compute of these trees; give those of another step"
            )
        return cls(tuple(tokens), tuple(trained), tuple(groups), num_left_out=num_left_out, places=tuple(places))

    @classmethod
    def of_shape(cls, shape: str, *, num_groups: int) -> Self:
        """Make equal groups of a shape such as `prompt=8000 branches=16x600 tools=4x150`.

        Behind the prompt of 8,000 tokens are 16 branches of 600 tokens, and behind each of them 4 of 150: 64 rows. All
        behind the prompt is trained.
        """
        levels = re.fullmatch(r"prompt=(\d+)((?: +\w+=\d+x\d+)*)", shape.strip())
        behind = re.findall(r"(\d+)x(\d+)", levels[2]) if levels else []
        sizes = [(int(count), int(length)) for count, length in ([("1", levels[1]), *behind] if levels else [])]
        if len(sizes) < 2 or not all(number > 0 for size in sizes for number in size):
            raise ValueError(
                f"--plan {shape!r}: neither a file nor a shape; give the trees that a run stored, or such as "
                "'prompt=8000 branches=16x600 tools=4x150', with numbers of 1 or more"
            )
        paths: list[list[np.ndarray]] = [[]]
        number = 0
        for count, length in sizes:
            nodes = [np.full(length, number + each) for each in range(len(paths) * count)]
            number += len(nodes)
            paths = [[*paths[each // count], node] for each, node in enumerate(nodes)]
        tokens = tuple(np.concatenate(path) for path in paths)
        trained = tuple(np.arange(len(each)) >= sizes[0][1] for each in tokens)
        return cls(tokens, trained, (tuple(range(len(tokens))),), copies=num_groups)

    def stretched(self, factor: int) -> Self:
        """Return rows of the same trees in which every token is there so many times."""
        tokens = tuple(np.repeat(each, factor) for each in self.tokens)
        return replace(self, tokens=tokens, trained=tuple(np.repeat(each, factor) for each in self.trained))

    def first(self, *, num_tokens: int, num_ranks: int) -> Self:
        """Return the first groups, of about as many tokens in all: as many for each rank, if there are so many."""
        num_groups = max(1, num_tokens * self.num_groups // (self.copies * sum(map(len, self.tokens))))
        num_groups = min(self.num_groups, -(-num_groups // num_ranks) * num_ranks)
        if self.copies > 1:
            return replace(self, copies=-(-num_groups // len(self.groups)))
        groups = self.groups[:num_groups]
        num_rows = groups[-1][-1] + 1
        places = None if self.places is None else self.places[:num_groups]
        return replace(
            self, tokens=self.tokens[:num_rows], trained=self.trained[:num_rows], groups=groups, places=places
        )

    def num_mini_batches(self, groups_per_mini_batch: int) -> int:
        """Return how many mini-batches have some of the groups."""
        last = self.num_groups - 1 if self.places is None else self.places[-1]
        return last // groups_per_mini_batch + 1

    @property
    def num_groups(self) -> int:
        """Groups, copies counted."""
        return len(self.groups) * self.copies

    @property
    def num_rows(self) -> int:
        """Rows, copies counted."""
        return len(self.tokens) * self.copies

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
        return self.copies * sum(each.range_work(0, each.num_leaves).num_tokens for each in self.profiles)


def micro_batches_of(
    rows: Rows, tree: TreeConfig, *, costs: CostModel, num_ranks: int, groups_per_mini_batch: int
) -> list[list[tuple[TreeMicroBatch, ...]]]:
    """Deal the rows to mini-batches and ranks and cut them as a run does: by mini-batch, what each rank computes."""
    cut = cache(partial(_cut, rows, tree=tree, costs=costs))  # those of copies are alike
    groups = [[(copy, row) for row in group] for copy in range(rows.copies) for group in rows.groups]
    profiles = rows.profiles * rows.copies
    # Prompts of which nothing is left count for the size of a mini-batch, too.
    by_mini_batch: dict[int, list[int]] = {}
    for group, place in enumerate(range(len(groups)) if rows.places is None else rows.places):
        by_mini_batch.setdefault(place // groups_per_mini_batch, []).append(group)
    mini_batches = []
    for members in by_mini_batch.values():
        members_rows = [row for group in members for row in groups[group]]
        bounds = np.cumsum([0, *(len(groups[group]) for group in members)])
        assignment = assign_rows(
            [range(start, end) for start, end in pairwise(bounds.tolist())],
            profiles=[profiles[group] for group in members],
            model=costs,
            num_ranks=num_ranks,
            groups_per_mini_batch=len(members),
        )
        cells = [cell for (cell,) in assignment.cells()]
        mini_batches.append([cut(_renumbered([members_rows[row] for row in cell])) for cell in cells])
    return mini_batches


def _renumbered(cell: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Count the copies of a cell's rows from 0 on, so that cells that are alike are equal."""
    numbers: dict[int, int] = {}
    return tuple((numbers.setdefault(copy, len(numbers)), row) for copy, row in cell)


def _cut(
    rows: Rows, cell: tuple[tuple[int, int], ...], *, tree: TreeConfig, costs: CostModel
) -> tuple[TreeMicroBatch, ...]:
    """Cut the rows of a cell, (copy, row) each, into packs and sections."""
    assert isinstance(tree.capacity, int)
    if not cell:
        return ()
    num_ids = 1 + max(int(tokens.max()) for tokens in rows.tokens)
    return split_into_packs(
        # Copies share no token.
        np.concatenate([rows.tokens[row] + copy * num_ids for copy, row in cell]),
        offsets=np.cumsum([0, *(len(rows.tokens[row]) for _, row in cell)]),
        trained=np.concatenate([rows.trained[row] for _, row in cell]),
        capacity=tree.capacity,
        config=tree,
        cost_model=costs,
    ).micro_batches


def predicted_s(
    mini_batches: Sequence[Sequence[Sequence[Work]]],
    costs: CostModel,
    *,
    num_stages: int = 1,
    gather_s: float = 0.0,
    repeats: float = 1.0,
) -> float:
    """Predict the seconds of an update, whose mini-batches wait for their slowest rank, from the work of micro-batches.

    In a pipeline the first stages wait at the end and the last ones at the beginning, as long as the longest pass takes
    on the others. What FSDP gathers for a pass, in `gather_s`, comes while the pass before computes. A mini-batch has
    the work `repeats` times.
    """

    def of_rank(works: Sequence[Work]) -> float:
        works = [work for work in works if work.num_packs]
        seconds = [costs.predict(work) for work in works]
        longest = max((each / work.num_packs for each, work in zip(seconds, works, strict=True)), default=0.0)
        computed = (repeats * sum(seconds) + (num_stages - 1) * longest) / num_stages
        return max(computed, repeats * gather_s * sum(work.num_packs for work in works))

    return sum(max(map(of_rank, ranks)) for ranks in mini_batches)


class Pass(NamedTuple):
    """What the memory of a pass is computed from, in tokens."""

    num_tokens: int
    num_scored: int
    num_context: int = 0
    spine_len: int | None = None  # of a tree in sections
    is_first: bool = True  # of its micro-batch


def passes_of(micros: Sequence[TreeMicroBatch]) -> list[Pass]:
    """List the passes of a rank as they run; those of a tree in sections begin with the last section."""
    passes = []
    for micro in micros:
        # A log-prob is made where the parent of its token is.
        scorers = np.unique(micro.layout.parent_T.numpy()[micro.wanted_T.numpy()])
        for number, section in enumerate(reversed(micro.cut.sections)):
            num_scored = int(((scorers >= section.start) & (scorers < section.end)).sum())
            relayed = (section.num_context, len(micro.cut.spine)) if micro.is_relayed else (0, None)
            passes.append(Pass(section.num_tokens, num_scored, *relayed, is_first=number == 0))
    return passes


def rank_bytes(
    size: ModelSize,
    passes: Sequence[Pass],
    *,
    levers: Levers,
    on_host: bool = False,
    sharing: Sharing,
    reduce_bytes: int,
    kernel_bytes: int | None = None,
) -> int:
    """Compute the most bytes that a rank takes at once in a mini-batch, besides weights and states that stay.

    Where gradients wait they are there, too, from the second pass on. In a pipeline the first stage has as
    many passes on the way as there are stages, and the stores of all relayed trees of a mini-batch are there at once.
    `reduce_bytes` are those of a gradient when it is added up over the ranks; see `update_memory` for `kernel_bytes`.
    """
    part, team = sharing.part_of(size), sharing.team

    @cache
    def memory_of(each: Pass) -> UpdateMemory:
        relay = None
        if each.spine_len is not None:
            relay = Relay(-(-each.num_context // team), on_host, spine_len=-(-each.spine_len // team))
        return update_memory(
            part,
            -(-each.num_tokens // team),
            state_bytes=0,
            levers=replace(levers, chunk_size=min(levers.chunk_size, max(1, each.num_scored))),
            relay=relay,
            kernel_bytes=kernel_bytes,
        )

    if sharing.is_gathered:
        waiting = waiting_bytes(size, reduce_bytes=reduce_bytes) if sharing.waits else 0
        later = [memory_of(each).total + waiting for each in {*passes[1:]}]
        return max([*(memory_of(each).total for each in passes[:1]), *later], default=0)
    of_token = KeysAndValues(dims=2 * part.key_dims, num_layers=part.num_layers, dtype_bytes=HALF)

    def stored(spine_len: int) -> int:
        return of_token.relayed_bytes(0, trains=True, recomputes=True, on_host=on_host, spine_len=-(-spine_len // team))

    stores = stored(sum(each.spine_len or 0 for each in passes if each.is_first))
    return max(
        (
            stores
            + memory_of(each).total
            - stored(each.spine_len or 0)
            + sum(memory_of(other).checkpoints for other in passes[place + 1 : place + sharing.stages])
            for place, each in enumerate(passes)
        ),
        default=0,
    )
