"""The rows that por.py computes: of one drawn tree of a given overlap, or of stored trees."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from verl_tree.records import read_trees
from verl_tree.testing.synthetic import overlap
from verl_tree.tree import TokenForest

DEPTH = 4


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


def stored_rows(path: Path) -> Rows:
    """Read the rows of a file that `tree.dump_dir` got."""
    trees = read_trees(path)
    return Rows(
        [np.asarray(leaf.token_ids) for tree in trees for leaf in tree.leaves],
        groups=[number for number, tree in enumerate(trees) for _ in tree.leaves],
    )
