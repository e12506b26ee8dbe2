"""Which rows are one tree, which trees are one step, and which rank computes what."""

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from verl_tree.engine.rows.read_rows import ReadRows
from verl_tree.sft.rows import PADDING, TokenRow
from verl_tree.sft.sampler import TreeBatchSampler, TreePart, deal, find_trees, parts_of


def rows_of(*sequences: Sequence[int]) -> list[TokenRow]:
    """Return rows in which everything behind the first token is trained."""
    return [TokenRow(np.array(each, dtype=np.int32), np.arange(len(each)) > 0) for each in sequences]


def draw_rows(rng: random.Random, *, num_trees: int, max_rows: int) -> list[TokenRow]:
    """Draw trees of different sizes whose rows share at least 20 tokens, and lie in any order."""
    sequences = []
    for tree in range(num_trees):
        root = [tree] * 20
        branches = [[rng.randrange(100) for _ in range(rng.randint(1, 9))] for _ in range(3)]
        for _ in range(rng.randint(1, max_rows)):
            sequences.append(root + rng.choice(branches) + [rng.randrange(100) for _ in range(rng.randint(0, 9))])
    rng.shuffle(sequences)
    return rows_of(*sequences)


def draw_parts(rng: random.Random, *, num_trees: int, max_rows: int, batch_size: int) -> tuple[list[TreePart], int]:
    """Return the parts of drawn trees and the number of rows."""
    rows = draw_rows(rng, num_trees=num_trees, max_rows=max_rows)
    trees, _ = find_trees([row.token_ids for row in rows], keys=[None] * len(rows), min_shared=20)
    assert len(trees) == num_trees
    return parts_of(trees, rows, max_rows=batch_size), len(rows)


def test_neighbours_that_share_enough_are_one_tree() -> None:
    """Rows 0, 2 and 4 share a system prompt of two tokens with 1 and 3, which share four."""
    sequences = [[1, 2, 9, 9], [1, 2, 3, 4, 5], [1, 2, 8], [1, 2, 3, 4, 6], [7, 7]]
    arrays = [np.array(each) for each in sequences]
    keys = [None] * 5
    by_three, _ = find_trees(arrays, keys=keys, min_shared=3)
    assert [tree.tolist() for tree in by_three] == [[1, 3], [2], [0], [4]]
    by_two, _ = find_trees(arrays, keys=keys, min_shared=2)
    assert [tree.tolist() for tree in by_two] == [[1, 3, 2, 0], [4]]


def test_rows_of_a_key_are_one_tree_whatever_they_share() -> None:
    """Depth-first within the key; without a key, row 3 is not of the tree with which it shares all tokens."""
    arrays = [np.array(each) for each in ([5, 6], [1, 2, 3], [5, 6, 7], [5, 6, 7])]
    trees, _ = find_trees(arrays, keys=["a", "a", "a", None], min_shared=1)
    assert [tree.tolist() for tree in trees] == [[1, 0, 2], [3]]


def test_a_large_tree_is_cut_into_ranges_that_share() -> None:
    """Rows of two branches arrive alternately; each half of the cut has one: 3 + 3 tokens, not 3 + 4."""
    rows = rows_of(*([0, 0, 0, branch, leaf] for leaf in (5, 6) for branch in (1, 2)))
    (tree,), _ = find_trees([row.token_ids for row in rows], keys=[None] * 4, min_shared=3)
    parts = parts_of([tree], rows, max_rows=3)
    assert [part.rows.tolist() for part in parts] == [[0, 2], [1, 3]]
    assert [part.num_tokens for part in parts] == [6, 6]


def test_a_part_belongs_to_the_step_in_which_its_middle_lies() -> None:
    """Parts of 2, 3, 1 and 2 rows, and two steps of four. The circle starts with the first row behind the first cut."""
    sizes = (2, 3, 1, 2)
    starts = (0, 2, 5, 6)
    rows = rows_of(*[[tree, leaf] for tree, size in enumerate(sizes) for leaf in range(size)])
    trees = [np.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    parts = parts_of(trees, rows, max_rows=4)
    sampler = TreeBatchSampler(parts, batch_size=4, seed=0)
    seen = set()
    for epoch in range(20):
        rng = np.random.default_rng([0, epoch])
        order, cut = rng.permutation(4).tolist(), rng.integers(16) / 2
        expected: list[list[int]] = [[], []]
        place = 0.0
        for part in order:
            middle = place + sizes[part] / 2
            expected[0 if (middle - cut) % 8 < 4 else 1].append(part)
            place += sizes[part]
        assert [[parts.index(part) for part in step] for step in sampler.steps(epoch)] == expected
        seen |= {tuple(sorted(step)) for step in expected}
    assert (0, 1) in seen
    assert len(seen) > 4


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_every_row_comes_once_in_an_epoch(seed: int, num_ranks: int) -> None:
    """Whatever the sizes of trees and steps: as many steps in each epoch, and as many rows on each rank."""
    rng = random.Random(seed)
    batch_size = rng.choice([1, 3, 8, 64])
    parts, num_rows = draw_parts(
        rng, num_trees=rng.randint(1, 9), max_rows=rng.choice([1, 6, 20]), batch_size=batch_size
    )
    samplers = [
        TreeBatchSampler(parts, batch_size=batch_size, seed=seed, rank=rank, num_ranks=num_ranks)
        for rank in range(num_ranks)
    ]
    epochs = []
    for epoch in range(3):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        steps = list(zip(*samplers, strict=True))
        assert len(steps) == len(samplers[0]) == max(1, num_rows // batch_size)
        for step in steps:
            assert len({len(rows) for rows in step}) == 1, "padding makes ranks equal"
            assert any(PADDING not in rows for rows in step), "not more padding than needed"
        seen = Counter(row for step in steps for rows in step for row in rows if row != PADDING)
        assert seen == Counter(range(num_rows))
        epochs.append([sorted(row for rows in step for row in rows if row != PADDING) for step in steps])
    assert len(parts) < 5 or len(epochs[0]) == 1 or epochs[0] != epochs[1], "trees are shuffled"
    alone = TreeBatchSampler(parts, batch_size=batch_size, seed=seed)
    assert [sorted(rows) for rows in alone] == epochs[0], "the rows of a step do not depend on the ranks"


def test_a_tree_is_in_one_step_and_on_one_rank() -> None:
    """16 trees of four equal rows, 16 rows a step, 4 ranks: nothing has to be cut."""
    rows = rows_of(*([tree] * 20 + [leaf] for tree in range(16) for leaf in range(4)))
    trees, _ = find_trees([row.token_ids for row in rows], keys=[None] * 64, min_shared=20)
    parts = parts_of(trees, rows, max_rows=16)
    for rank in range(4):
        for step in TreeBatchSampler(parts, batch_size=16, seed=3, rank=rank, num_ranks=4):
            assert len(step) == 4
            assert len({row // 4 for row in step}) == 1


def test_every_row_has_the_same_chance_in_every_step() -> None:
    """Rows of small and large trees, also in the first and the last step: 3,000 draws of 1 in 5 are 600 +- 22."""
    parts, num_rows = draw_parts(random.Random(4), num_trees=15, max_rows=3, batch_size=3)
    sampler = TreeBatchSampler(parts, batch_size=num_rows // 5, seed=1)
    assert len(sampler) == 5
    counts = np.zeros((5, num_rows))
    for epoch in range(3000):
        for number, step in enumerate(sampler.steps(epoch)):
            counts[number, np.concatenate([part.rows for part in step])] += 1
    assert abs(counts - 600).max() < 5 * 22


def test_few_trees_are_split_over_ranks_and_the_others_get_padding() -> None:
    rows = rows_of(*([0] * 5 + [leaf] * 50 for leaf in range(3)))
    (tree,), _ = find_trees([row.token_ids for row in rows], keys=[None] * 3, min_shared=5)
    (part,) = parts_of([tree], rows, max_rows=8)
    assert deal([part], num_ranks=1) == [[0, 1, 2]]
    dealt = deal([part], num_ranks=5)
    assert sorted(row for rank in dealt for row in rank) == [PADDING, PADDING, 0, 1, 2]
    assert {len(rank) for rank in dealt} == {1}


class Numbers(Dataset[int]):
    """Row i is the number i."""

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("num_taken", [2, 5, 6, 9])
def test_a_resumed_loader_goes_on_where_it_was(num_taken: int) -> None:
    """An epoch has six steps: in the middle, before the last, at the end, and in the second epoch."""
    parts, num_rows = draw_parts(random.Random(8), num_trees=12, max_rows=4, batch_size=4)
    batch_size = num_rows // 6

    def loader() -> tuple[TreeBatchSampler, StatefulDataLoader]:
        sampler = TreeBatchSampler(parts, batch_size=batch_size, seed=5)
        return sampler, StatefulDataLoader(Numbers(), batch_sampler=sampler, collate_fn=list)

    def take(start_epoch: int, sampler: TreeBatchSampler, batches: StatefulDataLoader, limit: int) -> list[list[int]]:
        taken = []
        for epoch in range(start_epoch, 3):
            sampler.set_epoch(epoch)
            for batch in batches:
                taken.append(batch)
                if len(taken) == limit:
                    return taken
        return taken

    uninterrupted = take(0, *loader(), limit=100)
    assert len(uninterrupted) == 18
    sampler, batches = loader()
    first = take(0, sampler, batches, limit=num_taken)
    state = batches.state_dict()
    resumed_sampler, resumed = loader()
    resumed.load_state_dict(state)
    # verl counts epochs by steps.
    assert first + take(num_taken // 6, resumed_sampler, resumed, limit=100) == uninterrupted


def test_a_place_in_other_rows_is_refused() -> None:
    parts, _ = draw_parts(random.Random(0), num_trees=6, max_rows=3, batch_size=3)
    state = TreeBatchSampler(parts, batch_size=3, seed=0).state_dict()
    with pytest.raises(
        ValueError, match=r"data\.train_files: the checkpoint is of .* rows .* set trainer\.resume_mode=disable"
    ):
        TreeBatchSampler(parts[1:], batch_size=3, seed=0).load_state_dict(state)


def weight_of_tokens(ranks: Sequence[Sequence[int]], rows: Sequence[TokenRow], *, shared_tokens: str) -> Counter:
    """Add up over all rows of all ranks how much each tree token is trained. A token is named by the path to it."""
    weights: Counter[tuple[int, ...]] = Counter()
    for numbers in ranks:
        mine = [rows[number] for number in numbers if number != PADDING]
        if not mine:
            continue
        lens = [len(row.token_ids) for row in mine]
        read = ReadRows.from_batch(
            np.concatenate([row.token_ids for row in mine]),
            offsets=np.concatenate([[0], np.cumsum(lens)]),
            trained=np.concatenate([row.is_trained for row in mine]),
        ).weigh(shared_tokens)
        weight_F = torch.ones(sum(lens)) if read.weights is None else read.weights
        for row, by_token in zip(mine, weight_F.split(lens), strict=True):
            for place in np.flatnonzero(row.is_trained).tolist():
                weights[tuple(row.token_ids[: place + 1].tolist())] += round(float(by_token[place]), 5)
    return Counter({path: round(weight, 3) for path, weight in weights.items()})


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shared_tokens", ["sum", "mean", "once"])
def test_the_number_of_ranks_changes_no_weight(seed: int, shared_tokens: str) -> None:
    """Trees are larger than a step, begin like other trees, and have tokens that only some of their rows train."""
    rng = random.Random(seed)
    rows = [
        TokenRow(row.token_ids, np.array([place > 17 and rng.random() < 0.3 for place in range(len(row.token_ids))]))
        for row in draw_rows(rng, num_trees=6, max_rows=14)
    ]
    for row in rows:
        row.is_trained[-1] = True
    trees, _ = find_trees([row.token_ids for row in rows], keys=[None] * len(rows), min_shared=24)
    parts = parts_of(trees, rows, max_rows=3)
    assert len(parts) > len(trees) > 6
    samplers = {
        num_ranks: [
            TreeBatchSampler(
                parts, batch_size=24, seed=seed, rank=rank, num_ranks=num_ranks, shared_tokens=shared_tokens
            )
            for rank in range(num_ranks)
        ]
        for num_ranks in (1, 2, 4)
    }
    for alone, two, four in zip(*(zip(*ranks, strict=True) for ranks in samplers.values()), strict=True):
        want = weight_of_tokens(alone, rows, shared_tokens=shared_tokens)
        if shared_tokens != "sum":
            assert max(want.values()) == 1
        assert weight_of_tokens(two, rows, shared_tokens=shared_tokens) == want
        assert weight_of_tokens(four, rows, shared_tokens=shared_tokens) == want
        assert sum(any(row != PADDING for row in rank) for rank in four) > 1, "the step is on several ranks"


def test_parts_that_train_no_common_token_are_dealt_apart() -> None:
    """Rows 0 and 3 train the token behind the prompt, 1 and 2 only have it; 4 and 5 share no more than the prompt."""
    lists = [[9, 9, 5, 1], [9, 9, 5, 2], [9, 9, 5, 3], [9, 9, 5, 4], [9, 9, 6, 1], [9, 9, 7, 1]]
    trained = [[0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1]]
    rows = [TokenRow(np.array(ids), np.array(mask, dtype=bool)) for ids, mask in zip(lists, trained, strict=True)]
    parts = parts_of([np.array([number]) for number in range(6)], rows, max_rows=1)
    for shared_tokens in ("mean", "once"):
        dealt = [set(each) - {PADDING} for each in deal(parts, num_ranks=3, shared_tokens=shared_tokens)]
        assert sorted(map(sorted, dealt)) == [[0, 1, 2, 3], [4], [5]]
    assert sorted(map(len, deal(parts, num_ranks=3))) == [2, 2, 2]
