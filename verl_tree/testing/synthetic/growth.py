"""A tree that grows node by node and then gets its tokens; every synthetic shape is made with it.

Growing needs only lengths. The tokens of all nodes are drawn at once at the end. Siblings start with different tokens,
so a tree branches exactly where it was asked to.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Sequences = list[NDArray[np.int32]]
Seed = int | np.random.Generator
TokenLen = int | tuple[int, int]  # a number of tokens, or (smallest, largest)

VOCAB_SIZE = 151_936  # rows of the embedding of Qwen3-8B
NO_PARENT = -1


@dataclass(frozen=True, slots=True, eq=False)
class Growth:
    """A forest that grows: nodes with lengths, and trajectories that end in them."""

    parent: list[int] = field(default_factory=list)  # NO_PARENT at roots
    node_len: list[int] = field(default_factory=list)
    rank: list[int] = field(default_factory=list)  # number of older siblings
    num_children: list[int] = field(default_factory=lambda: [0])  # the last entry, that of NO_PARENT, counts the roots
    # Per trajectory its last node, and nodes whose tokens it repeats after that one.
    ends: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)

    def add(self, parent: int, *, node_len: int) -> int:
        """Add a node and return its number."""
        assert node_len >= 1, "a node has tokens"
        self.parent.append(parent)
        self.node_len.append(int(node_len))
        self.rank.append(self.num_children[parent])
        self.num_children[parent] += 1
        self.num_children.insert(-1, 0)
        return len(self.parent) - 1

    def add_chain(self, parent: int, *, node_lens: Sequence[int]) -> list[int]:
        """Add a chain of nodes below `parent` and return their numbers."""
        chain = [parent]
        for node_len in node_lens:
            chain.append(self.add(chain[-1], node_len=node_len))
        return chain[1:]

    def end(self, node: int, *, repeat: tuple[int, ...] = ()) -> None:
        """End a trajectory in `node`, or after it with a copy of the tokens of other nodes."""
        self.ends.append((node, repeat))

    def sequences(self, rng: np.random.Generator, *, vocab_size: int, shuffle: bool) -> Sequences:
        """Draw the tokens: S arrays that share no memory.

        Raises:
            ValueError: A node has more children than there are token ids to tell them apart.
        """
        if max(self.num_children) > vocab_size:
            raise ValueError(
                f"vocab_size={vocab_size} cannot tell {max(self.num_children)} siblings apart by their first token: "
                f"give at least {max(self.num_children)}"
            )
        starts = np.concatenate([[0], np.cumsum(self.node_len)])
        tokens = rng.integers(vocab_size, size=starts[-1], dtype=np.int32)
        # Children count up from a random token of their parent, so the first tokens of siblings differ.
        first_of_parent = rng.integers(vocab_size, size=len(self.num_children))
        tokens[starts[:-1]] = (first_of_parent[self.parent] + self.rank) % vocab_size
        bounds = starts.tolist()
        rows = []
        for node, repeat in self.ends:
            assert not repeat or self.num_children[node] == 0, "repeated tokens could meet a child of the node"
            path = [*repeat[::-1], node]
            while self.parent[path[-1]] != NO_PARENT:
                path.append(self.parent[path[-1]])
            rows.append(np.concatenate([tokens[bounds[node] : bounds[node + 1]] for node in reversed(path)]))
        return [rows[index] for index in rng.permutation(len(rows))] if shuffle else rows


def check_counts(**counts: float) -> None:
    """Raise ValueError with the name of a count that is below 1."""
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name}={count}: give at least 1")


def draw_lens(rng: np.random.Generator, *, size: int, **named: TokenLen) -> list[int]:
    """Draw lengths uniformly from the one range given; its name is only for the error message."""
    ((name, token_len),) = named.items()
    low, high = token_len if isinstance(token_len, tuple) else (token_len, token_len)
    if not 1 <= low <= high:
        raise ValueError(f"{name}={token_len}: give a number of tokens, or (smallest, largest) with 1 <= smallest")
    return rng.integers(low, high + 1, size=size).tolist()
