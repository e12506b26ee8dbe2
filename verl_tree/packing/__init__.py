"""Packing cuts a forest into packs: sets of trajectories whose tree one forward/backward computes.

A prefix is computed again in every pack that needs it. The problem (Tree Training, section 2.2): partition the
trajectories into packs of at most C tree tokens so that the packed tokens, summed over the packs, are fewest. Trees
share no token, so each is packed by itself. Then packs of different trees are put together where they fit, which saves
passes and costs nothing. docs/packing.md has the mathematics and the measurements.
"""

from collections.abc import Sequence

import numpy as np

from verl_tree.packing.baselines import dfs_first_fit
from verl_tree.packing.methods import TREE_METHODS, Tree, pack_trees
from verl_tree.packing.problem import UNLIMITED, Caps, Items, Pack, Packing
from verl_tree.tree import TokenForest
from verl_tree.tree.nodes import IntArray

__all__ = ["METHODS", "Pack", "Packing", "check_caps", "lower_bound", "pack"]

METHODS = (*TREE_METHODS, "dfs_first_fit")


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
    """Cut a forest into packs with few tokens; an empty forest has no packs.

    The same arguments give the same packing, unless the time limit is reached.

    Args:
        forest: The trajectories.
        capacity: Tree tokens per pack. None: no limit.
        method: "heuristic": near the optimum for any size. "exact": the optimum of small and medium trees, or an error.
            "auto": the heuristic, then the exact programme where that is cheap. For comparison, and no
            options of a training run: "single_path" (the paper's first programme), "deepest_first" (the paper's
            heuristic) and "dfs_first_fit" (in DFS order).
        max_loss_terms: Loss terms per pack, see `loss_terms`. None: no limit.
        loss_terms: (S,) tokens of each trajectory that the loss trains: the (leaf, token) pairs that are expanded from
            the pack. None: all tokens but its first.
        max_path_len: Tokens of the longest trajectory that the model may see. None: no limit.
        seed: Seed of the heuristic's random choices.
        time_limit_s: Seconds after which "exact" gives up (None: 60), or the improvement of "heuristic" and "auto" ends
            early (None: 10). An early end makes the result depend on the machine.
        max_states: States that "exact" may make.

    Raises:
        ValueError: The method is unknown, a cap is not positive, a trajectory exceeds a cap, or "exact" exceeds its
            budget.
    """
    if method not in METHODS:
        raise ValueError(f"packing method {method!r} does not exist: use one of {list(METHODS)}")
    caps = check_caps(
        forest, capacity=capacity, max_loss_terms=max_loss_terms, loss_terms=loss_terms, max_path_len=max_path_len
    )
    terms = _terms(forest, loss_terms)
    leaves = Items.from_forest(forest, terms=terms)
    trees = [Tree.from_leaves(tree, caps=caps) for tree in leaves.trees()]
    if method == "dfs_first_fit":
        bins = dfs_first_fit(leaves, caps=caps)
    else:
        if time_limit_s is None:
            time_limit_s = 60.0 if method == "exact" else 10.0
        bins = pack_trees(trees, method=method, caps=caps, seed=seed, time_limit_s=time_limit_s, max_states=max_states)
    packs = tuple(Pack(leaves=forest.order[members], num_tokens=leaves.union_tokens(members)) for members in bins)
    return Packing(
        packs=packs,
        num_tokens=sum(part.num_tokens for part in packs),
        num_flat_tokens=forest.num_flat_tokens,
        lower_bound=sum(tree.lower_bound for tree in trees),
        num_capacity_tokens=None if capacity is None else capacity * len(packs),
    )


def lower_bound(
    forest: TokenForest,
    *,
    capacity: int | None = 8192,
    max_loss_terms: int | None = None,
    loss_terms: Sequence[int] | IntArray | None = None,
) -> int:
    """Compute a lower bound on the packed tokens of any packing; arguments and errors are those of `pack`."""
    caps = check_caps(forest, capacity=capacity, max_loss_terms=max_loss_terms, loss_terms=loss_terms)
    trees = Items.from_forest(forest, terms=_terms(forest, loss_terms)).trees()
    return sum(Tree.from_leaves(tree, caps=caps).lower_bound for tree in trees)


def _terms(forest: TokenForest, loss_terms: Sequence[int] | IntArray | None) -> IntArray:
    """Return the loss terms of each trajectory, (S,) int64."""
    return forest.sequence_lens - 1 if loss_terms is None else np.asarray(loss_terms, dtype=np.int64)


def check_caps(
    forest: TokenForest,
    *,
    capacity: int | None,
    max_loss_terms: int | None,
    loss_terms: Sequence[int] | IntArray | None = None,
    max_path_len: int | None = None,
) -> Caps:
    """Return the caps of a pack; arguments are those of `pack`.

    Raises:
        ValueError: A cap is not positive, or a trajectory exceeds it; the message names the option that sets the cap.
    """
    terms = _terms(forest, loss_terms)
    if len(terms) != forest.num_leaves or (terms < 0).any():
        raise ValueError(
            f"loss_terms has {len(terms)} entries, the least is {terms.min(initial=0)}: give one number of at least 0 "
            f"for each of the {forest.num_leaves} trajectories"
        )
    lens = forest.sequence_lens
    capacity_key = "tree.capacity (actor.ppo_max_token_len_per_gpu unless set)"
    relay = ", or set tree.relay=auto in a training run, packing=None in tree_log_probs"
    limits = (
        ("capacity", capacity_key, capacity, lens, "tokens", "a pack", relay),
        ("max_loss_terms", "tree.max_loss_terms", max_loss_terms, terms, "loss terms", "a pack", ""),
        ("max_path_len", "tree.max_path_len", max_path_len, lens, "tokens", "a path", ""),
    )
    for name, key, limit, numbers, unit, holder, more in limits:
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
                f"trajectories{more}"
            )
    return Caps(
        num_tokens=UNLIMITED if capacity is None else capacity,
        num_terms=UNLIMITED if max_loss_terms is None else max_loss_terms,
    )
