"""The methods that pack tree by tree, and the joining of packs of different trees."""

import time
from bisect import bisect, insort
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from verl_tree.packing.baselines import single_path
from verl_tree.packing.bound import tree_lower_bound
from verl_tree.packing.exact import Budget, BudgetExceededError, exact
from verl_tree.packing.heuristic import deepest_first, heuristic
from verl_tree.packing.problem import UNLIMITED, Caps, Items
from verl_tree.tree.nodes import IntArray

_MAX_ROUNDS = 6_000
_MAX_ROUNDS_PER_TREE = 2_000
"""Rounds of improvement: of all trees together (less than a second) and of one small tree (a third of a second)."""

_MAX_TRIED_PACKS = 32
_AUTO_EXACT_ITEMS = 16
_AUTO_EXACT_STATES = 20_000
"""States of all trees together in which `auto` looks for optima, about a tenth of a second."""


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """One tree of the forest that is packed.

    `leaves` has an item per leaf. `items` are the same, but prefixes are joined to what extends them if loss terms are
    not capped. `is_whole` says whether the tree fits into one pack.
    """

    leaves: Items
    items: Items
    is_whole: bool
    lower_bound: int

    @classmethod
    def from_leaves(cls, leaves: Items, *, caps: Caps) -> Self:
        """Prepare one tree, given by its leaves."""
        if caps.hold(leaves.num_tokens, leaves.num_terms):
            return cls(leaves, leaves, is_whole=True, lower_bound=leaves.num_tokens)
        items = leaves.without_prefixes() if caps.num_terms == UNLIMITED else leaves
        return cls(leaves, items, is_whole=False, lower_bound=tree_lower_bound(items, caps=caps))


@dataclass(frozen=True, slots=True)
class _Search:
    """What the packing of one tree may use. The budget is for all trees, and its deadline also ends the improvement.

    Trees that do not fit into one pack share the rounds of improvement by their items, of which all have
    `num_cut_items`.
    """

    caps: Caps
    seed: int
    num_cut_items: int
    budget: Budget


def _single_path(tree: Tree, search: _Search) -> list[list[int]]:
    return single_path(tree.leaves, caps=search.caps)


def _deepest_first(tree: Tree, search: _Search) -> list[list[int]]:
    return deepest_first(tree.items, caps=search.caps)


def _heuristic(tree: Tree, search: _Search) -> list[list[int]]:
    num_items = len(tree.items)
    return heuristic(
        tree.items,
        caps=search.caps,
        num_rounds=min(_MAX_ROUNDS * num_items // search.num_cut_items, max(_MAX_ROUNDS_PER_TREE, num_items)),
        seed=search.seed,
        deadline_s=search.budget.deadline_s,
        lower_bound=tree.lower_bound,
    )


def _exact(tree: Tree, search: _Search) -> list[list[int]]:
    return exact(tree.items, caps=search.caps, known=_heuristic(tree, search), budget=search.budget)


def _auto(tree: Tree, search: _Search) -> list[list[int]]:
    known = _heuristic(tree, search)
    if len(tree.items) > _AUTO_EXACT_ITEMS:
        return known
    try:
        return exact(tree.items, caps=search.caps, known=known, budget=search.budget)
    except BudgetExceededError:
        return known


TREE_METHODS = {
    "auto": _auto,
    "heuristic": _heuristic,
    "exact": _exact,
    "single_path": _single_path,
    "deepest_first": _deepest_first,
}


def pack_trees(
    trees: list[Tree], *, method: str, caps: Caps, seed: int, time_limit_s: float, max_states: int
) -> list[IntArray]:
    """Pack each tree by itself, then put packs of different trees together; arguments and errors are those of `pack`.

    The result has the leaves of each pack as ascending places in the DFS order of the forest.
    """
    budget = Budget(
        max_states=max_states if method == "exact" else _AUTO_EXACT_STATES,
        deadline_s=time.perf_counter() + time_limit_s,
    )
    num_cut_items = sum(len(tree.items) for tree in trees if not tree.is_whole)
    search = _Search(caps=caps, seed=seed, num_cut_items=num_cut_items, budget=budget)
    parts: list[_Part] = []
    for number, tree in enumerate(trees):
        # A tree that fits is one pack, but the paper's first programme may still cut it.
        items = tree.leaves if method == "single_path" else tree.items
        try:
            cut = method == "single_path" or not tree.is_whole
            bins = TREE_METHODS[method](tree, search) if cut else [list(range(len(items)))]
        except BudgetExceededError as error:
            raise ValueError(
                f"the exact packing of a tree with {len(tree.leaves)} leaves and {items.nodes.num_nodes} nodes was not "
                f"found with {budget.num_states} states (max_states={budget.max_states}) in {time_limit_s:g} s "
                '(time_limit_s): raise them, or use method="heuristic", which also reports how far from the optimum it '
                "can be (Packing.gap)"
            ) from error
        for members in bins:
            num_tokens, num_terms = items.union_tokens(members), int(items.terms[members].sum())
            parts.append(_Part(number, num_tokens=num_tokens, num_terms=num_terms, leaves=items.leaves(members)))
    return _share_packs(parts, caps=caps)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The leaves of one tree that are in one pack."""

    tree: int
    num_tokens: int
    num_terms: int
    leaves: IntArray


@dataclass(slots=True)
class _OpenPack:
    leaves: list[IntArray] = field(default_factory=list)
    trees: set[int] = field(default_factory=set)
    num_terms: int = 0

    def takes(self, part: _Part, *, caps: Caps) -> bool:
        """Return whether a part whose tokens fit may enter."""
        # Parts of one tree do not fit together, or the paper's first programme parted them on purpose.
        return part.tree not in self.trees and self.num_terms + part.num_terms <= caps.num_terms

    def add(self, part: _Part) -> None:
        self.leaves.append(part.leaves)
        self.trees.add(part.tree)
        self.num_terms += part.num_terms


def _share_packs(parts: list[_Part], *, caps: Caps) -> list[IntArray]:
    """Put parts of different trees into one pack by best fit, the largest first; packs are in DFS order."""
    open_packs: list[tuple[int, int]] = []  # (tokens, number), ascending
    packs: list[_OpenPack] = []
    for part in sorted(parts, key=lambda part: (-part.num_tokens, part.leaves[0])):
        place = bisect(open_packs, (caps.num_tokens - part.num_tokens, len(packs))) - 1
        lowest = max(place - _MAX_TRIED_PACKS, -1)
        while place > lowest and not packs[open_packs[place][1]].takes(part, caps=caps):
            place -= 1
        if place > lowest:
            tokens, number = open_packs.pop(place)
        else:
            tokens, number = 0, len(packs)
            packs.append(_OpenPack())
        packs[number].add(part)
        insort(open_packs, (tokens + part.num_tokens, number))
    return sorted((np.sort(np.concatenate(pack.leaves)) for pack in packs), key=lambda leaves: leaves[0])
