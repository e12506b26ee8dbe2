"""Small random forests with every special case, for property tests and comparisons by brute force."""

import numpy as np

from verl_tree.testing.synthetic.growth import NO_PARENT, Growth, Seed, Sequences, check_counts


def random_forest(
    seed: Seed = 0,
    *,
    num_leaves: int = 10,
    mean_len: float = 3.0,
    max_depth: int = 5,
    root_probability: float = 0.1,
    prefix_probability: float = 0.1,
    duplicate_probability: float = 0.1,
    vocab_size: int = 64,
    shuffle: bool = True,
) -> Sequences:
    """Draw a small forest for property tests: random arity and depth, several roots, strict prefixes, duplicates.

    A trajectory begins a tree of its own, is a strict prefix of another, or duplicates an earlier one, each with the
    given probability; else it forks from another. Node lengths are geometric with mean `mean_len`, so nodes of one
    token are common. `max_depth` bounds the nodes on a path; from about 8 leaves on, depths below 3 are rare. A small
    `vocab_size` repeats tokens along a path.

    Raises:
        ValueError: A count or mean_len is below 1, or the probabilities sum to more than 1.
    """
    check_counts(num_leaves=num_leaves, mean_len=mean_len, max_depth=max_depth)
    probabilities = [root_probability, prefix_probability, duplicate_probability]
    if min(probabilities) < 0 or sum(probabilities) > 1:
        raise ValueError(f"root, prefix and duplicate probability {probabilities}: give them >= 0 and a sum <= 1")
    rng, tree = np.random.default_rng(seed), Growth()
    inner: list[tuple[int, int]] = []  # (node, nodes that may follow it), of nodes that have a child
    for _ in range(num_leaves):
        kind = rng.choice(["root", "prefix", "duplicate", "fork"], p=[*probabilities, 1 - sum(probabilities)])
        if kind == "duplicate" and tree.ends:
            tree.end(tree.ends[rng.integers(len(tree.ends))][0])
        elif kind == "prefix" and inner:
            tree.end(inner[rng.integers(len(inner))][0])
        else:
            is_fork = kind == "fork" and inner
            node, room = inner[rng.integers(len(inner))] if is_fork else (NO_PARENT, max_depth)
            num_nodes = int(rng.integers(1, room + 1)) if tree.ends else max_depth
            chain = tree.add_chain(node, node_lens=rng.geometric(1 / mean_len, size=num_nodes).tolist())
            tree.end(chain[-1])
            inner += zip(chain[:-1], range(room - 1, room - num_nodes, -1), strict=True)
    return tree.sequences(rng, vocab_size=vocab_size, shuffle=shuffle)
