"""Packing cuts a forest into packs: sets of trajectories whose tree one forward/backward computes.

A pack of trajectories costs the union of their root paths, so a prefix is computed again in every pack that needs it.
The problem (Tree Training, section 2.2): partition the trajectories into packs of at most C tree tokens so that the
packed tokens, summed over the packs, are fewest. Trees share no token, so each is packed by itself; at the end packs of
different trees are put together where they fit, which saves passes and costs nothing. docs/packing.md has the
mathematics and the measurements.
"""

from collections.abc import Sequence

import numpy as np

from verl_tree.packing.baselines import arrival_first_fit, dfs_first_fit
from verl_tree.packing.bound import tree_lower_bound
from verl_tree.packing.methods import Options, pack_trees, tree_bounds
from verl_tree.packing.problem import UNLIMITED, Caps, Items, Pack, Packing
from verl_tree.tree import TokenForest
from verl_tree.tree.nodes import IntArray

__all__ = ["METHODS", "Pack", "Packing", "lower_bound", "pack"]

METHODS = ("auto", "heuristic", "exact", "single_path", "dfs_first_fit", "arrival_first_fit")


def pack(
    forest: TokenForest,
    *,
    capacity: int | None = 8192,
    method: str = "auto",
    max_loss_terms: int | None = None,
    loss_terms: Sequence[int] | IntArray | None = None,
    max_path_len: int | None = None,
    seed: int = 0,
    time_limit_s: float | None = None,
    max_states: int = 1_000_000,
) -> Packing:
    """Cuts a forest into packs with few tokens.

    Args:
        forest: the trajectories.
        capacity: tree tokens per pack. None: no limit.
        method: "heuristic": near the optimum for any size. "exact": the optimum of small and medium trees, or an error.
            "auto": the heuristic, then the exact programme where that is cheap. Baselines: "single_path" (the paper's
            first programme), "dfs_first_fit" and "arrival_first_fit" (in DFS order and in the order given).
        max_loss_terms: loss terms per pack, see `loss_terms`. None: no limit.
        loss_terms: (S,) for every trajectory the tokens that the loss trains on it: the (leaf, token) pairs that are
            expanded from the pack. None: all tokens but its first.
        max_path_len: tokens of the longest trajectory that the model may see. None: no limit.
        seed: of the heuristic's random choices.
        time_limit_s: seconds after which the improvement of "heuristic" and "auto" ends early (None: 10), which makes
            their result depend on the machine; or those of "exact" (None: 60).
        max_states: of the programme of "exact".

    Returns:
        The packing; it has no packs if the forest is empty. The same arguments give the same packing, unless the
        time limit is reached.

    Raises:
        ValueError: the method is unknown, a cap is not positive, a trajectory exceeds a cap, or "exact" exceeds its
            budget.
    """
    if method not in METHODS:
        raise ValueError(f"packing method {method!r} does not exist: use one of {list(METHODS)}")
    terms = forest.sequence_lens - 1 if loss_terms is None else np.asarray(loss_terms, dtype=np.int64)
    caps = _checked_caps(
        forest, capacity=capacity, max_loss_terms=max_loss_terms, terms=terms, max_path_len=max_path_len
    )
    terms = terms[forest.order]
    options = Options(
        caps=caps,
        seed=seed,
        time_limit_s=(60.0 if method == "exact" else 10.0) if time_limit_s is None else time_limit_s,
        max_states=max_states,
    )
    if method == "arrival_first_fit":
        whole = Items.from_forest(forest, terms=terms, start=0, end=forest.num_leaves)
        bins = [np.array(bin_) for bin_ in arrival_first_fit(whole, caps=caps, arrival=forest.dfs_rank)]
    elif method == "dfs_first_fit":
        whole = Items.from_forest(forest, terms=terms, start=0, end=forest.num_leaves)
        bins = [np.array(bin_) for bin_ in dfs_first_fit(whole, caps=caps)]
    else:
        bins = pack_trees(forest, terms=terms, method=method, options=options)
    packs = tuple(
        Pack(leaves=forest.order[bin_], num_tokens=forest.pack_num_tokens(forest.order[bin_])) for bin_ in bins
    )
    return Packing(
        packs=packs,
        num_tokens=sum(part.num_tokens for part in packs),
        num_flat_tokens=forest.num_flat_tokens,
        lower_bound=_lower_bound(forest, terms=terms, caps=caps),
        num_capacity_tokens=None if capacity is None else capacity * len(packs),
    )


def lower_bound(
    forest: TokenForest,
    *,
    capacity: int | None = 8192,
    max_loss_terms: int | None = None,
    loss_terms: Sequence[int] | IntArray | None = None,
) -> int:
    """Packed tokens that no method can go below; see `verl_tree.packing.bound`. Arguments and errors as of `pack`."""
    terms = forest.sequence_lens - 1 if loss_terms is None else np.asarray(loss_terms, dtype=np.int64)
    caps = _checked_caps(forest, capacity=capacity, max_loss_terms=max_loss_terms, terms=terms, max_path_len=None)
    return _lower_bound(forest, terms=terms[forest.order], caps=caps)


def _checked_caps(
    forest: TokenForest,
    *,
    capacity: int | None,
    max_loss_terms: int | None,
    terms: IntArray,
    max_path_len: int | None,
) -> Caps:
    """Refuses caps that cannot be kept, each with the key that sets it."""
    if len(terms) != forest.num_leaves or (terms < 0).any():
        raise ValueError(
            f"loss_terms has {len(terms)} entries, the least is {terms.min(initial=0)}: give one number of at least 0 "
            f"for each of the {forest.num_leaves} trajectories"
        )
    lens = forest.sequence_lens
    limits = (
        ("capacity", "tree.capacity (actor.ppo_max_token_len_per_gpu unless set)", capacity, lens, "tokens", "a pack"),
        ("max_loss_terms", "tree.max_loss_terms", max_loss_terms, terms, "loss terms", "a pack"),
        ("max_path_len", "tree.max_path_len", max_path_len, lens, "tokens", "a path"),
    )
    for name, key, limit, numbers, unit, holder in limits:
        if limit is None:
            continue
        if limit < 1:
            raise ValueError(f"{name} is {limit}: set {key} to a positive number")
        too_long = np.flatnonzero(numbers > limit)
        if len(too_long):
            first = too_long[0]
            raise ValueError(
                f"trajectory {first} has {numbers[first]} {unit} and {holder} only {limit} ({len(too_long)} of "
                f"{forest.num_leaves} are too long, the longest has {numbers.max()}): raise {key} or shorten the "
                "trajectories"
            )
    return Caps(
        num_tokens=UNLIMITED if capacity is None else capacity,
        num_terms=UNLIMITED if max_loss_terms is None else max_loss_terms,
    )


def _lower_bound(forest: TokenForest, *, terms: IntArray, caps: Caps) -> int:
    starts = np.array(tree_bounds(forest), dtype=np.int64)
    if len(starts) == 1:
        return 0
    tokens = np.add.reduceat(forest.sequence_lens[forest.order] - forest.lcp, starts[:-1])
    tree_terms = np.add.reduceat(terms, starts[:-1])
    is_whole = (tokens <= caps.num_tokens) & (tree_terms <= caps.num_terms)
    cut = [
        tree_lower_bound(Items.from_forest(forest, terms=terms, start=starts[tree], end=starts[tree + 1]), caps=caps)
        for tree in np.flatnonzero(~is_whole)
    ]
    return int(tokens[is_whole].sum()) + sum(cut)
