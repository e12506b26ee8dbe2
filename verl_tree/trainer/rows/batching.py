"""Which row is trained where: prompt groups are dealt to mini-batches and ranks, and padding evens the ranks out.

verl deals rows to ranks by length and cuts each rank's rows into mini-batches by count. If sessions have several
leaves, that parts siblings, and the number of optimiser steps depends on the number of leaves. Here a mini-batch is
`ppo_mini_batch_size` groups (verl's uid), however many leaves they have. A group is also on one rank, unless the ranks
would be so uneven that cutting it pays, although some of its tokens are then computed twice (docs/balance.md).

Example: 2 ranks, 2 groups per mini-batch, and the groups A (rows 0 1 2), B (row 3), C (rows 4 5), none worth a cut::

    mini-batch 0: A on rank 0, B on rank 1        rank 0: 0 1 2 | p        rows ((3, 1), (1, 3))
    mini-batch 1: C on rank 1                     rank 1: 3 | 4 5 q        num_rows (4, 2)

Rank 0 has nothing in mini-batch 1 and gets the padding row p. verl's dispatch cuts the batch into equal parts, so rank
1 gets the padding row q. If C were cut, rank 0 would have row 4 in place of p, and rank 1 would have row 5.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Self, TypeVar

import numpy as np

from verl_tree.cost.balance import Balance, GroupPart, balance
from verl_tree.cost.model import CostModel, WorkProfile

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class MiniBatchPlan:
    """Where the workers cut their rows into optimiser steps.

    A rank's rows of mini-batch m are the next `rows[dp_rank][m]` rows of its data: at least one, padding included. All
    ranks have the same total. All ranks together have `num_rows[m]` without padding, verl's `global_batch_size`.
    Where the loss weighs rows, `sessions` has a number for each row of a rank, that of its session (-1 for padding) or,
    if sessions do not weigh the same, of the row; `role_weights` what its role weighs, if roles are weighed.
    """

    rows: tuple[tuple[int, ...], ...]
    num_rows: tuple[int, ...]
    sessions: tuple[tuple[int, ...], ...] | None = None
    role_weights: tuple[tuple[float, ...], ...] | None = None

    def with_sessions(
        self, sessions: Sequence[int], *, row_order: Sequence[int], role_weights: Sequence[float] | None = None
    ) -> Self:
        """Add what weighs rows that are dispatched in `row_order`; see `RowAssignment`."""
        weighed = replace(self, sessions=self._dealt(sessions, row_order=row_order, of_padding=-1))
        if role_weights is None:
            return weighed
        return replace(weighed, role_weights=self._dealt(role_weights, row_order=row_order, of_padding=1.0))

    def _dealt(
        self, values: Sequence[Number], *, row_order: Sequence[int], of_padding: Number
    ) -> tuple[tuple[Number, ...], ...]:
        """Return one value per row for each rank."""
        ordered = [values[row] if row < len(values) else of_padding for row in row_order]
        num_rank_rows = sum(self.rows[0])
        starts = range(0, len(ordered), num_rank_rows)
        return tuple(tuple(ordered[start : start + num_rank_rows]) for start in starts)

    def to_extra_info(self) -> dict[str, Any]:
        """Return the keys to put into `KVBatchMeta.extra_info`."""
        # verl unpacks these with `assign_non_tensor_data`, which leaves nested tuples as they are; `assign_non_tensor`
        # would make one item per row of them.
        weighed = {"mini_batch_sessions": self.sessions, "mini_batch_role_weights": self.role_weights}
        known = {name: values for name, values in weighed.items() if values is not None}
        return {"mini_batch_rows": self.rows, "mini_batch_num_rows": self.num_rows, **known}

    @classmethod
    def from_batch(cls, data: Mapping[str, Any]) -> Self:
        """Read the plan from a worker's TensorDict, or any mapping with the keys of `to_extra_info`.

        Raises:
            ValueError: The batch has no plan: it does not come from our trainer.
        """
        if "mini_batch_rows" not in data:
            raise ValueError(
                "the batch has no mini_batch_rows: train with python -m verl_tree.main_ppo, whose trainers "
                "(verl_tree.trainer.modes) plan the mini-batches"
            )
        return cls(
            rows=tuple(tuple(rank_rows) for rank_rows in data["mini_batch_rows"]),
            num_rows=tuple(data["mini_batch_num_rows"]),
            **{
                name: tuple(map(tuple, data[f"mini_batch_{name}"]))
                for name in ("sessions", "role_weights")
                if f"mini_batch_{name}" in data
            },
        )


@dataclass(frozen=True, slots=True)
class RowAssignment:
    """The order in which rows are dispatched, where the mini-batches are, and what they cost."""

    # Indices of rows, rank by rank and mini-batch by mini-batch; number of rows + i is padding row i.
    row_order: tuple[int, ...]
    num_padding: int
    plan: MiniBatchPlan
    # Per rank and mini-batch, without padding; relative times until some are measured.
    predicted_s: tuple[tuple[float, ...], ...]
    num_cut_groups: int  # groups that are on more than one rank
    num_lost_tokens: int  # tree tokens that are computed again on another rank because of cuts

    def cells(self) -> list[list[list[int]]]:
        """Return the rows of each rank and mini-batch, without padding."""
        order, num_rows = iter(self.row_order), len(self.row_order) - self.num_padding
        return [[[row for row in islice(order, size) if row < num_rows] for size in sizes] for sizes in self.plan.rows]


def assign_rows(
    groups: Sequence[Sequence[int]],
    *,
    profiles: Sequence[WorkProfile],
    model: CostModel,
    num_ranks: int,
    groups_per_mini_batch: int,
    shuffle_seed: Sequence[int] | None = None,
    cut_groups: bool = True,
) -> RowAssignment:
    """Deal groups to mini-batches and ranks, and pad the ranks to equal numbers of rows.

    `groups` has the rows of each group, together the integers from 0 on. `profiles` has the work of each group, with
    positions in the group as `order`. `groups_per_mini_batch` is `ppo_mini_batch_size`. `shuffle_seed` draws groups
    into mini-batches at random; None keeps their order. `cut_groups` is False if a rank needs all leaves of a token.

    Invariants:
        - `row_order` is a permutation of all rows and `num_padding` padding rows.
        - All rows of a group are in one mini-batch, so the optimiser step does not depend on cuts.
        - A group is on one rank unless cutting it evens out the ranks. Its rows in a (rank, mini-batch) cell are one
          range of the group's DFS order, and stand next to each other in the given order.
        - Every mini-batch but the last is full.
        - Every cell has at least one row; all ranks have equally many; padding comes last in its cell.
        - The same arguments give the same answer.

    Raises:
        ValueError: There is nothing to train on, or the mini-batch size is below 1.
    """
    if not groups or not all(groups):
        raise ValueError(
            f"{len(groups)} prompt groups with {sum(map(len, groups))} trajectories: there is nothing to "
            "train on; see why sessions failed, or set trainer.v1.sampler.sync_refill_failed_groups=true"
        )
    if groups_per_mini_batch < 1:
        raise ValueError(
            f"actor_rollout_ref.actor.ppo_mini_batch_size={groups_per_mini_batch} must be at least 1 prompt"
        )
    num_rows = sum(len(group) for group in groups)
    assert [profile.num_leaves for profile in profiles] == [len(group) for group in groups]
    assert sorted(row for group in groups for row in group) == list(range(num_rows))

    order = list(range(len(groups)))
    if shuffle_seed is not None:
        order = np.random.default_rng(shuffle_seed).permutation(len(groups)).tolist()
    mini_batches = [order[i : i + groups_per_mini_batch] for i in range(0, len(order), groups_per_mini_batch)]

    cells: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    balances: list[Balance] = []
    for members in mini_batches:
        balanced = balance(
            members,
            profiles=profiles,
            model=model,
            rank_num_rows=[sum(len(cell) for cell in rank_cells) for rank_cells in cells],
            cut_groups=cut_groups,
        )
        balances.append(balanced)
        for rank, share in enumerate(balanced.shares):
            cells[rank].append([row for part in share for row in _rows_of(part, groups=groups, profiles=profiles)])
    num_padding = _pad(cells, first_padding_row=num_rows)
    return RowAssignment(
        row_order=tuple(row for rank_cells in cells for cell in rank_cells for row in cell),
        num_padding=num_padding,
        plan=MiniBatchPlan(
            rows=tuple(tuple(len(cell) for cell in rank_cells) for rank_cells in cells),
            num_rows=tuple(sum(len(groups[group]) for group in members) for members in mini_batches),
        ),
        predicted_s=tuple(zip(*(balanced.loads_s for balanced in balances), strict=True)),
        num_cut_groups=sum(balanced.num_cut_groups for balanced in balances),
        num_lost_tokens=sum(balanced.num_lost_tokens(profiles) for balanced in balances),
    )


def _rows_of(part: GroupPart, *, groups: Sequence[Sequence[int]], profiles: Sequence[WorkProfile]) -> list[int]:
    """Return the rows of a part of a group, in the order of the group."""
    positions = np.sort(profiles[part.group].order[part.start : part.end]).tolist()
    return [groups[part.group][position] for position in positions]


def _pad(cells: list[list[list[int]]], *, first_padding_row: int) -> int:
    """Append padding rows in place and return their number: one per empty cell, the others to each rank's last cell."""
    target = max(sum(max(1, len(cell)) for cell in rank_cells) for rank_cells in cells)
    num_padding = 0
    for rank_cells in cells:
        missing = [0 if cell else 1 for cell in rank_cells]
        missing[-1] += target - sum(len(cell) for cell in rank_cells) - sum(missing)
        for cell, num_missing in zip(rank_cells, missing, strict=True):
            start = first_padding_row + num_padding
            cell.extend(range(start, start + num_missing))
            num_padding += num_missing
    return num_padding
