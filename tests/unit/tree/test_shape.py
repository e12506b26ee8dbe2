"""Shapes of forests that share less than they could, against pairs of sequences compared token by token."""

import numpy as np
import pytest
from tree_cases import random_sequences

from verl_tree.tree import TokenForest
from verl_tree.tree.shape import ForestShape


def common_len(first: list[int], second: list[int]) -> int:
    """Count the tokens that two sequences share from the start."""
    pairs = list(zip(first, second, strict=False))
    return next((place for place, (mine, its) in enumerate(pairs) if mine != its), len(pairs))


def test_the_example_of_the_docstring() -> None:
    forest = TokenForest.from_sequences([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 6]])
    shape = ForestShape.of(forest).share_at_most(np.array([3, 1, 3]))
    assert (shape.order.tolist(), shape.lcp.tolist()) == ([1, 0, 2], [0, 1, 3])


@pytest.mark.parametrize("seed", range(40))
def test_any_two_share_what_both_may(seed: int) -> None:
    """In DFS order two leaves share the least that neighbours between them share, under any limits, also of 0."""
    rng = np.random.default_rng(seed)
    sequences = random_sequences(rng, num_sequences=14, mean_len=3, vocab_size=3)
    limits = np.array([rng.integers(0, len(each) + 1) for each in sequences])
    whole = ForestShape.of(TokenForest.from_sequences(sequences))
    is_kept = rng.random(14) < 0.8
    shape = whole.keep(is_kept).share_at_most(limits)
    assert sorted(shape.order) == sorted(whole.order[is_kept])
    found = [
        shape.lcp[first + 1 : second + 1].min()
        for first in range(shape.num_leaves)
        for second in range(first + 1, shape.num_leaves)
    ]
    wanted = [
        min(common_len(sequences[first], sequences[second]), limits[first], limits[second])
        for place, first in enumerate(shape.order)
        for second in shape.order[place + 1 :]
    ]
    assert found == wanted
    assert sum(wanted) > 0
    # Trees stay apart: profiles of several groups are cut between them.
    roots = [sequences[leaf][0] for leaf in shape.order]
    assert (np.diff(roots) != 0).sum() == len(set(roots)) - 1
