"""The rows that por.py computes: of one drawn tree of a given overlap, of agents' shapes, or of stored trees."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from verl_tree.records import read_trees
from verl_tree.testing.synthetic import caterpillar, overlap, star, tau2, tool_fan_out, tree_search
from verl_tree.tree import TokenForest

DEPTH = 4

SHAPES: dict[str, Callable[..., list[np.ndarray]]] = {
    "star": partial(star, 16, prompt_len=1024, branch_len=128),
    "tau2": partial(tau2, 1, system_len=300, question_len=(3, 25), thinking_len=(3, 40), answer_len=(1, 12)),
    "tree_search": partial(tree_search, 4, prompt_len=256, step_len=(32, 128)),
    "caterpillar": partial(
        caterpillar, 12, system_len=256, question_len=(8, 64), thinking_len=(16, 256), answer_len=(8, 64)
    ),
    "tool_fan_out": partial(tool_fan_out, 6, prompt_len=256, plan_len=(4, 64), call_len=(4, 32), result_len=(8, 128)),
    "chain": lambda *, vocab_size: [np.random.default_rng(0).integers(vocab_size, size=4096)],
}
"""Those of `verl_tree.testing.synthetic` with shorter nodes, so that an update takes seconds, and a row that shares
nothing. What is shared, and how often, stays."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Trajectories, and the group of each: only those of one group share tokens."""

    sequences: list[np.ndarray]
    groups: list[int]

    def forest(self) -> TokenForest:
        """Return the forest of all groups."""
        return TokenForest.from_sequences(self.sequences, merge_keys=self.groups)

    def unshared(self) -> TokenForest:
        """Return the rows as a forest in which each is a tree by itself."""
        return TokenForest.from_sequences(self.sequences, merge_keys=range(len(self.sequences)))


def drawn_rows(potential_overlap_ratio: float, *, num_leaves: int, num_flat_tokens: int, vocab_size: int) -> Rows:
    """Draw one tree of the given overlap."""
    sequences = overlap(
        potential_overlap_ratio,
        num_leaves=num_leaves,
        num_flat_tokens=num_flat_tokens,
        depth=DEPTH,
        vocab_size=vocab_size,
    )
    return Rows(sequences, groups=[0] * len(sequences))


def shape_rows(name: str, *, vocab_size: int) -> Rows:
    """Draw one tree of `SHAPES`."""
    sequences = SHAPES[name](vocab_size=vocab_size)
    return Rows(sequences, groups=[0] * len(sequences))


def stored_rows(path: Path) -> Rows:
    """Read the rows of a file that `tree.dump_dir` got."""
    trees = read_trees(path)
    return Rows(
        [np.asarray(leaf.token_ids) for tree in trees for leaf in tree.leaves],
        groups=[number for number, tree in enumerate(trees) for _ in tree.leaves],
    )
