"""Packing cuts a forest into packs: sets of trajectories whose tree one forward/backward computes.

A pack of trajectories costs the union of their root paths, so a prefix is computed again in every pack that
needs it: trajectories that share much belong together. In DFS order those are neighbours, and the first
packing here keeps them together by filling one pack after another in that order.
"""

from dataclasses import dataclass

import numpy as np

from verl_tree.tree import IntArray, TokenForest


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """The trajectories of one forward/backward.

    Attributes:
        leaves: (s,) int64 indices of trajectories, in DFS order.
        num_tokens: tree tokens of the pack, the union of the root paths of its leaves.
    """

    leaves: IntArray
    num_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """A partition of the trajectories of a forest into packs.

    Attributes:
        packs: every trajectory is in exactly one of them.
        num_tokens: packed tokens, the sum over the packs.
        num_flat_tokens: sum of the trajectory lengths.
    """

    packs: tuple[Pack, ...]
    num_tokens: int
    num_flat_tokens: int

    @property
    def effective_reuse_ratio(self) -> float:
        """1 - packed tokens / flat tokens; 0.0 where there is nothing to pack."""
        return 1.0 - self.num_tokens / self.num_flat_tokens if self.num_flat_tokens else 0.0

    @property
    def compression(self) -> float:
        """Flat tokens / packed tokens; 1.0 where there is nothing to pack."""
        return self.num_flat_tokens / self.num_tokens if self.num_tokens else 1.0


def pack(forest: TokenForest, *, capacity: int | None = 8192, method: str = "auto") -> Packing:
    """Cuts a forest into packs of at most `capacity` tree tokens.

    Args:
        forest: the trajectories.
        capacity: tree tokens per pack. None: one pack of everything.
        method: "dfs_first_fit", or "auto" to let us choose.

    Returns:
        The packing; it has no packs if the forest is empty.

    Raises:
        ValueError: the method is unknown, the capacity is not positive, or a trajectory is longer than the
            capacity.
    """
    if method != "auto" and method not in _METHODS:
        raise ValueError(f"packing method {method!r} does not exist: use one of {['auto', *_METHODS]}")
    if capacity is not None:
        _check_capacity(forest, capacity)
    packs = _METHODS[_AUTO_METHOD if method == "auto" else method](forest, capacity)
    return Packing(
        packs=packs,
        num_tokens=sum(part.num_tokens for part in packs),
        num_flat_tokens=forest.num_flat_tokens,
    )


def _check_capacity(forest: TokenForest, capacity: int) -> None:
    if capacity < 1:
        raise ValueError(f"capacity is {capacity}: set tree.capacity to a positive number of tokens")
    too_long = np.flatnonzero(forest.sequence_lens > capacity)
    if len(too_long):
        first, longest = too_long[0], forest.sequence_lens.max()
        raise ValueError(
            f"trajectory {first} has {forest.sequence_lens[first]} tokens and a pack only {capacity} "
            f"({len(too_long)} of {forest.num_leaves} are too long, the longest has {longest}): raise "
            "tree.capacity (actor.ppo_max_token_len_per_gpu unless set) or shorten the trajectories"
        )


def _dfs_first_fit(forest: TokenForest, capacity: int | None) -> tuple[Pack, ...]:
    """Takes the leaves in DFS order and opens a new pack where the current one would outgrow the capacity.

    Every pack is a range of the order, so the tokens that a leaf adds to its pack are those that it does not
    share with the leaf before it, and no sibling is separated from its siblings except at a pack's two ends.
    """
    if not forest.num_leaves:
        return ()
    bounds, pack_tokens = [], []
    lens = forest.sequence_lens[forest.order].tolist()
    for index, (leaf_len, shared) in enumerate(zip(lens, forest.lcp.tolist(), strict=True)):
        added = leaf_len - shared
        if pack_tokens and (capacity is None or pack_tokens[-1] + added <= capacity):
            pack_tokens[-1] += added
        else:
            bounds.append(index)
            pack_tokens.append(leaf_len)
    return tuple(
        Pack(leaves=forest.order[start:end], num_tokens=num_tokens)
        for start, end, num_tokens in zip(bounds, [*bounds[1:], len(lens)], pack_tokens, strict=True)
    )


_METHODS = {"dfs_first_fit": _dfs_first_fit}
_AUTO_METHOD = "dfs_first_fit"
