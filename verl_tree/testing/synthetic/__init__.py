"""Synthetic forests for tests and benchmarks: trajectories of a known shape, the same for the same seed.

`overlap` has a given potential overlap ratio, SHAPES are what agents make, `random_forest` is small and has every
special case, and `groups` draws several prompts of any shape::

    forest = TokenForest.from_sequences(groups(star, num_groups=8, seed=3))
    forest = TokenForest.from_sequences(groups(partial(caterpillar, 20, system_len=512), num_groups=4))

All return a list of int32 arrays. With `shuffle` their order is random, as from a rollout, else that of the tree.
`seed` is a number or a generator; token ids are 0..vocab_size - 1. A count or length below 1 raises ValueError.
"""

from collections.abc import Callable

import numpy as np

from verl_tree.testing.synthetic.growth import VOCAB_SIZE, Seed, Sequences, check_counts
from verl_tree.testing.synthetic.shapes import SHAPES, caterpillar, star, tau2, tool_fan_out, tree_search, unbalanced
from verl_tree.testing.synthetic.sharing import overlap
from verl_tree.testing.synthetic.small import random_forest

__all__ = [
    "SHAPES",
    "VOCAB_SIZE",
    "caterpillar",
    "groups",
    "overlap",
    "random_forest",
    "star",
    "tau2",
    "tool_fan_out",
    "tree_search",
    "unbalanced",
]


def groups(
    shape: Callable[..., Sequences],
    *,
    num_groups: int,
    seed: Seed = 0,
    vocab_size: int = VOCAB_SIZE,
    shuffle: bool = True,
) -> Sequences:
    """Draw several prompts: independent draws of a shape, with different roots.

    `shape` is one of SHAPES, or any function that takes `seed`, `vocab_size` and `shuffle`. With `shuffle` the
    trajectories of all groups come in one random order, else one group after another.

    Raises:
        ValueError: The groups have more roots than there are token ids.
    """
    check_counts(num_groups=num_groups)
    rng = np.random.default_rng(seed)
    drawn = [shape(seed=stream, vocab_size=vocab_size, shuffle=shuffle) for stream in rng.spawn(num_groups)]
    # Two groups may begin with the same token by chance, so all roots get new tokens.
    firsts = [dict.fromkeys(int(sequence[0]) for sequence in group) for group in drawn]
    num_roots = sum(map(len, firsts))
    if num_roots > vocab_size:
        raise ValueError(f"vocab_size={vocab_size} cannot tell {num_roots} roots apart: give at least {num_roots}")
    fresh = iter(rng.choice(vocab_size, size=num_roots, replace=False).tolist())
    sequences = []
    for group, first_tokens in zip(drawn, firsts, strict=True):
        renamed = {token: next(fresh) for token in first_tokens}
        for sequence in group:
            sequence[0] = renamed[int(sequence[0])]
        sequences += group
    return [sequences[index] for index in rng.permutation(len(sequences))] if shuffle else sequences
