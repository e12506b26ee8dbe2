"""Which rows are one tree, which trees are one step, and which rank computes what.

A tree with more rows than a step is cut into ranges of its depth-first order, which share most. An epoch is a random
order of these parts. They lie end to end on a circle that is cut into steps of equal length, at a random place first,
and a part belongs to the step in which its middle lies. So every part, large or small, has the same chance in every
step. Example, parts of 2, 3, 1 and 2 rows, 2 steps of 4 rows each, the first cut before row 0::

    rows   0 1 2 3 4 5 6 7
    parts  a a b b b c d d      middles 1, 3.5, 5.5, 7: the first step is a b, the second c d

A step has `train_batch_size` rows on average. Where that does not divide the rows it has a few more, none is left out.

Legend: S rows.
"""

import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Sampler
from typing_extensions import override

from verl_tree.cost.balance import balance
from verl_tree.cost.model import CostModel, WorkProfile
from verl_tree.sft.rows import PADDING, TokenRow
from verl_tree.tree import TokenForest
from verl_tree.tree.nodes import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class TreePart:
    """Rows that are trained in one step, in depth-first order, and the work of any range of them."""

    rows: IntArray
    token_rows: list[TokenRow]
    profile: WorkProfile

    @classmethod
    def of(cls, numbers: IntArray, token_rows: Sequence[TokenRow]) -> "TreePart":
        """Profile rows, whose numbers are given, too."""
        forest = TokenForest.from_sequences([row.token_ids for row in token_rows])
        profile = WorkProfile.from_forest(forest, trained=[row.is_trained for row in token_rows])
        return cls(numbers[profile.order], [token_rows[place] for place in profile.order], profile)

    @classmethod
    def joined(cls, parts: Sequence["TreePart"]) -> "TreePart":
        """Make one part of several."""
        return cls.of(np.concatenate([part.rows for part in parts]), [row for part in parts for row in part.token_rows])

    @property
    def num_tokens(self) -> int:
        """Number of tree tokens."""
        return self.profile.range_work(0, len(self.rows)).num_tokens


def find_trees(
    sequences: Sequence[np.ndarray], *, keys: Sequence[Hashable | None], min_shared: int
) -> tuple[list[IntArray], TokenForest]:
    """Return the rows of each tree in depth-first order, and the forest of all rows.

    Rows with the same key are one tree. Rows without a key (None) are sorted by their tokens; neighbours that share at
    least `min_shared` tokens are in one tree.
    """
    forest = TokenForest.from_sequences(sequences, merge_keys=keys)
    order = forest.order.tolist()
    starts = [
        place
        for place in range(1, len(order))
        if keys[order[place]] != keys[order[place - 1]]
        or (keys[order[place]] is None and forest.lcp[place] < min_shared)
    ]
    return np.split(forest.order, starts), forest


def parts_of(trees: Sequence[IntArray], rows: Sequence[TokenRow], *, max_rows: int) -> list[TreePart]:
    """Cut trees of more than `max_rows` rows into ranges of about equal length."""
    return [
        TreePart.of(numbers, [rows[number] for number in numbers.tolist()])
        for tree in trees
        for numbers in np.array_split(tree, -(-len(tree) // max_rows))
    ]


def deal(parts: Sequence[TreePart], *, num_ranks: int, shared_tokens: str = "sum") -> list[list[int]]:
    """Deal parts to ranks so that these come out even in predicted time (docs/balance.md); return the rows of each.

    A part is split over ranks only where that pays. The objectives of `shared_tokens` but `sum` count the rows that
    train a token on one rank, so with these no part is split, and parts that train the same token stay together. Ranks
    with fewer rows than another get padding rows, because verl's own engine needs at least as many rows as another rank
    has micro-batches.
    """
    counts_rows = shared_tokens != "sum"
    if counts_rows and num_ranks > 1:
        parts = _join(parts)
    dealt = balance(
        range(len(parts)),
        profiles=[part.profile for part in parts],
        model=CostModel.prior(),
        rank_num_rows=[0] * num_ranks,
        cut_groups=num_ranks > 1 and not counts_rows,
    )
    ranks = [
        [row for share in shares for row in parts[share.group].rows[share.start : share.end].tolist()]
        for shares in dealt.shares
    ]
    num_rows = max(map(len, ranks))
    return [rows + [PADDING] * (num_rows - len(rows)) for rows in ranks]


def _join(parts: Sequence[TreePart]) -> list[TreePart]:
    """Join parts in which rows train the same token, whatever trees they are of."""
    rows = [row for part in parts for row in part.token_rows]
    forest = TokenForest.from_sequences([row.token_ids for row in rows])
    part_of_row = np.repeat(np.arange(len(parts)), [len(part.rows) for part in parts])
    label = np.arange(len(parts))  # of each part; parts with one label are joined
    first, last_row = sys.maxsize, 0
    for row, shared in zip(forest.order.tolist(), forest.lcp.tolist(), strict=True):
        # What is shared with all rows before only shrinks, so of these the one that trains first decides. Between two
        # rows that train a token there may be others that only have it.
        if shared > first:
            label[label == label[part_of_row[row]]] = label[part_of_row[last_row]]
        else:
            first = sys.maxsize
        first, last_row = min(first, int(rows[row].is_trained.argmax())), row
    groups = [[parts[index] for index in np.flatnonzero(label == each)] for each in np.unique(label)]
    return [group[0] if len(group) == 1 else TreePart.joined(group) for group in groups]


class TreeBatchSampler(Sampler[list[int]]):
    """The rows that a rank computes in each step of an epoch, a function of seed, epoch and number of ranks.

    Which rows are a step does not depend on the number of ranks. The state is the place in an epoch, which is where a
    resumed run goes on.

    Args:
        parts: All of them, of at most `batch_size` rows each.
        batch_size: Rows of a step, on average.
        seed: Of the order.
        rank: This rank, of `num_ranks`.
        num_ranks: Ranks that share a step.
        shared_tokens: The objective, which decides on what may be cut (`deal`).
    """

    def __init__(
        self,
        parts: Sequence[TreePart],
        *,
        batch_size: int,
        seed: int,
        rank: int = 0,
        num_ranks: int = 1,
        shared_tokens: str = "sum",
    ) -> None:
        self._parts, self._seed, self._rank, self._num_ranks = parts, seed, rank, num_ranks
        self._shared_tokens = shared_tokens
        self._lens = np.array([len(part.rows) for part in parts], dtype=np.int64)
        assert self._lens.max() <= batch_size, "a step between two middles would be empty"
        self._num_rows = int(self._lens.sum())
        self._num_steps = max(1, self._num_rows // batch_size)
        self._epoch, self._resumed, self._next = 0, (0, 0), 0

    def __len__(self) -> int:
        return self._num_steps

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose steps the next iteration yields."""
        self._epoch = epoch

    @override
    def __iter__(self) -> Iterator[list[int]]:
        epoch = self._epoch
        steps = self.steps(epoch)
        resumed_epoch, start = self._resumed
        for step in range(start if epoch == resumed_epoch else 0, self._num_steps):
            self._next = step + 1
            yield deal(steps[step], num_ranks=self._num_ranks, shared_tokens=self._shared_tokens)[self._rank]

    def steps(self, epoch: int) -> list[list[TreePart]]:
        """Return the parts of each step of an epoch, never none."""
        rng = np.random.default_rng([self._seed, epoch])
        order = rng.permutation(len(self._parts))
        # In half rows, so that middles are integers.
        middles = 2 * np.cumsum(self._lens[order]) - self._lens[order]
        behind_first_cut = (middles - rng.integers(2 * self._num_rows)) % (2 * self._num_rows)
        step_of_part = behind_first_cut * self._num_steps // (2 * self._num_rows)
        steps: list[list[TreePart]] = [[] for _ in range(self._num_steps)]
        for part, step in zip(order.tolist(), step_of_part.tolist(), strict=True):
            steps[step].append(self._parts[part])
        return steps

    def state_dict(self) -> dict[str, int]:
        """Return the place in the epoch, and what it is a place in."""
        return {
            "epoch": self._epoch,
            "next_step": self._next,
            "num_rows": self._num_rows,
            "num_steps": self._num_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a place that `state_dict` returned.

        Raises:
            ValueError: It is a place in other rows or among other steps.
        """
        if (state["num_rows"], state["num_steps"]) != (self._num_rows, self._num_steps):
            raise ValueError(
                f"data.train_files: the checkpoint is of {state['num_rows']} rows in {state['num_steps']} steps, and "
                f"there are {self._num_rows} in {self._num_steps}; give the same files and data.train_batch_size, or "
                "set trainer.resume_mode=disable"
            )
        self._resumed = (state["epoch"], state["next_step"])
