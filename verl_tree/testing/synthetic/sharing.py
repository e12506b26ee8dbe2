"""Trees of a given potential overlap ratio (POR), to measure the effect of sharing alone."""

import numpy as np
from numpy.typing import NDArray

from verl_tree.testing.synthetic.growth import NO_PARENT, VOCAB_SIZE, Growth, Seed, Sequences, check_counts


def overlap(
    potential_overlap_ratio: float,
    *,
    num_leaves: int,
    num_flat_tokens: int,
    depth: int = 4,
    seed: Seed = 0,
    vocab_size: int = VOCAB_SIZE,
    shuffle: bool = True,
) -> Sequences:
    """Draw one tree with a given POR and exactly the given numbers of leaves and flat tokens.

    The experiment is that of the Tree Training paper, section 3.1: POR from 20 % to 92 % at constant leaves and tokens.
    The paper does not describe its trees. Ours have `depth` nodes on every path and shared tokens on every level, the
    same number on each path. Where that leaves too few tokens to the leaves (a high POR with few leaves), the root gets
    more. The leaves' own parts differ in length by up to 3x.

    The POR is exact to num_leaves / num_flat_tokens, and 0 gives separate trajectories. Otherwise `depth` is at least 3
    and `num_leaves` at least 2 ** (depth - 1).

    Raises:
        ValueError: No such tree has this POR.
    """
    check_counts(num_leaves=num_leaves, num_flat_tokens=num_flat_tokens)
    rng, tree = np.random.default_rng(seed), Growth()
    if potential_overlap_ratio == 0:
        parents, num_own_tokens = [NO_PARENT] * num_leaves, num_flat_tokens
    else:
        _check_overlap(potential_overlap_ratio, num_leaves=num_leaves, depth=depth)
        inner_parents, weights, levels, parents = _regular_tree(num_leaves, depth=depth)
        num_saved = round(potential_overlap_ratio * num_flat_tokens)
        node_lens = _inner_lens(num_saved, num_flat_tokens=num_flat_tokens, weights=weights, levels=levels)
        for parent, node_len in zip(inner_parents, node_lens.tolist(), strict=True):
            tree.add(parent, node_len=node_len)
        num_own_tokens = num_flat_tokens - int(weights @ node_lens)
    if num_own_tokens < num_leaves:
        raise ValueError(
            f"potential_overlap_ratio={potential_overlap_ratio} leaves {num_own_tokens} tokens for the own parts of "
            f"num_leaves={num_leaves} trajectories, which need one each: ask for less, or give more num_flat_tokens"
        )
    shares = rng.uniform(0.5, 1.5, size=num_leaves)
    own_lens = 1 + np.floor((num_own_tokens - num_leaves) * shares / shares.sum()).astype(np.int64)
    own_lens[: num_own_tokens - int(own_lens.sum())] += 1
    for parent, own_len in zip(parents, own_lens.tolist(), strict=True):
        tree.end(tree.add(parent, node_len=own_len))
    return tree.sequences(rng, vocab_size=vocab_size, shuffle=shuffle)


def _check_overlap(potential_overlap_ratio: float, *, num_leaves: int, depth: int) -> None:
    limit = 1 - 1 / num_leaves
    if not 0 < potential_overlap_ratio < limit:
        raise ValueError(
            f"potential_overlap_ratio={potential_overlap_ratio} is out of reach: num_leaves={num_leaves} trajectories "
            f"share at most 1 - 1/{num_leaves} = {limit:.4f}; ask for 0 or a value below that, or give more num_leaves"
        )
    if depth < 3 or num_leaves < 2 ** (depth - 1):
        raise ValueError(
            f"depth={depth} with num_leaves={num_leaves}: give a depth of at least 3 and at least "
            f"2 ** (depth - 1) leaves; `star` makes trees of depth 2"
        )


def _regular_tree(num_leaves: int, *, depth: int) -> tuple[list[int], NDArray, NDArray, list[int]]:
    """Make a tree with `depth` nodes on every path and about the same arity, at least 2, everywhere.

    Returns:
        Parent, leaves below (n,) and level (n,) of the inner nodes, parents before children; parent of each leaf (S,).
    """
    inner, leaf_parents = [(NO_PARENT, num_leaves, 0)], []
    for node, (_, weight, level) in enumerate(inner):  # grows while it is walked: breadth first
        levels_below = depth - 1 - level
        if levels_below == 1:
            leaf_parents += [node] * weight
            continue
        # Rounded down, the arity leaves at least 2 ** (levels_below - 1) leaves to each child.
        arity = int(weight ** (1 / levels_below) + 1e-9)
        inner += [(node, weight // arity + (child < weight % arity), level + 1) for child in range(arity)]
    parents, weights, levels = zip(*inner, strict=True)
    return list(parents), np.array(weights), np.array(levels), leaf_parents


def _inner_lens(num_saved: int, *, num_flat_tokens: int, weights: NDArray, levels: NDArray) -> NDArray[np.int64]:
    """Choose the lengths of the inner nodes so that F - T = sum((weights - 1) * lens) is `num_saved`.

    A token shared by w leaves saves w - 1 tokens and costs w flat tokens, so it costs the least per saved token near
    the root. The leaves get the fewest tokens if all levels have equal lengths, and the most if all shared tokens are
    in the root. The lengths mix the two.
    """
    num_leaves, num_levels, saves = int(weights[0]), int(levels[-1]) + 1, weights - 1
    saved_left = num_saved - int(saves.sum())  # every inner node has at least one token
    flat_left = num_flat_tokens - int(weights.sum())
    if saved_left < 0:
        raise ValueError(
            f"num_flat_tokens={num_flat_tokens} are too few to share {num_saved} over {len(weights)} inner nodes: "
            f"give more, or a smaller depth"
        )
    even_len, root_len = saved_left / int(saves.sum()), saved_left / (num_leaves - 1)
    own_if_even = flat_left - num_leaves * num_levels * even_len
    own_if_root = flat_left - num_leaves * root_len
    own = max(num_leaves, own_if_root / 2)
    even_share = 1.0 if own_if_even >= own else max(0.0, (own_if_root - own) / (own_if_root - own_if_even))
    level_lens = np.full(num_levels, even_share * even_len)
    level_lens[0] += (1 - even_share) * root_len
    lens = 1 + np.floor(level_lens[levels]).astype(np.int64)
    saved_left = num_saved - int(saves @ lens)
    for node, saved in enumerate(saves.tolist()):  # the rest, at most a few tokens a node, largest nodes first
        more_len, saved_left = divmod(saved_left, saved)
        lens[node] += more_len
    return lens
