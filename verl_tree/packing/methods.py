"""The methods that pack tree by tree, and the joining of packs of different trees."""

import time
from bisect import bisect, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np

from verl_tree.packing.bound import tree_lower_bound
from verl_tree.packing.exact import Budget, BudgetExceededError, exact
from verl_tree.packing.heuristic import heuristic
from verl_tree.packing.problem import UNLIMITED, Caps, Items
from verl_tree.packing.single_path import single_path
from verl_tree.tree import TokenForest
from verl_tree.tree.nodes import IntArray

_MAX_ROUNDS = 6_000
_MAX_ROUNDS_PER_TREE = 2_000
"""Rounds of improvement of all trees together and of one small tree: less than a second and a third of one."""

_MAX_TRIED_PACKS = 32
_AUTO_EXACT_ITEMS = 16
_AUTO_EXACT_STATES = 20_000
"""States of all trees together in which `auto` looks for optima: about a tenth of a second."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the methods need besides the forest; see `verl_tree.packing.pack`."""

    caps: Caps
    seed: int
    time_limit_s: float
    max_states: int


def tree_bounds(forest: TokenForest) -> list[int]:
    """Where each tree starts in the DFS order, and the end."""
    return [*np.flatnonzero(forest.lcp == 0).tolist(), forest.num_leaves]


def pack_trees(forest: TokenForest, *, terms: IntArray, method: str, options: Options) -> list[IntArray]:
    """Packs each tree by itself, then puts packs of different trees together. DFS ranks, bin by bin."""
    caps, bounds = options.caps, tree_bounds(forest)
    trees = [Items.from_forest(forest, terms=terms, start=start, end=end) for start, end in pairwise(bounds)]
    is_whole = [tree.num_tokens <= caps.num_tokens and tree.terms.sum() <= caps.num_terms for tree in trees]
    if method != "single_path" and caps.num_terms == UNLIMITED:
        trees = [tree if whole else tree.without_prefixes() for tree, whole in zip(trees, is_whole, strict=True)]
    solver = {"single_path": _single_path, "heuristic": _heuristic, "exact": _exact, "auto": _auto}[method]
    solve = solver(
        options, num_cut_items=sum(len(tree) for tree, whole in zip(trees, is_whole, strict=True) if not whole)
    )
    parts: list[_Part] = []
    for number, (tree, whole) in enumerate(zip(trees, is_whole, strict=True)):
        # A tree that fits is one pack; only the paper's first programme may cut it nevertheless.
        bins = [list(range(len(tree)))] if whole and method != "single_path" else solve(tree)
        for members in bins:
            parts.append(
                _Part(
                    tree=number,
                    num_tokens=tree.union_tokens(members),
                    num_terms=int(tree.terms[members].sum()),
                    ranks=np.concatenate([np.arange(tree.bounds[item], tree.bounds[item + 1]) for item in members]),
                )
            )
    return _share_packs(parts, caps=caps)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """What one tree puts into one pack."""

    tree: int
    num_tokens: int
    num_terms: int
    ranks: IntArray


Solve = Callable[[Items], list[list[int]]]


def _single_path(options: Options, *, num_cut_items: int) -> Solve:
    return partial(single_path, caps=options.caps)


def _heuristic(options: Options, *, num_cut_items: int) -> Solve:
    deadline_s = time.perf_counter() + options.time_limit_s

    def solve(tree: Items) -> list[list[int]]:
        return heuristic(
            tree,
            caps=options.caps,
            num_rounds=min(_MAX_ROUNDS * len(tree) // num_cut_items, max(_MAX_ROUNDS_PER_TREE, len(tree))),
            seed=options.seed,
            deadline_s=deadline_s,
            lower_bound=tree_lower_bound(tree, caps=options.caps),
        )

    return solve


def _exact(options: Options, *, num_cut_items: int) -> Solve:
    first = _heuristic(options, num_cut_items=num_cut_items)
    budget = Budget(max_states=options.max_states, deadline_s=time.perf_counter() + options.time_limit_s)

    def solve(tree: Items) -> list[list[int]]:
        try:
            return exact(tree, caps=options.caps, known=first(tree), budget=budget)
        except BudgetExceededError as error:
            raise ValueError(
                f"the exact packing of a tree with {tree.bounds[-1] - tree.bounds[0]} leaves and "
                f"{tree.nodes().num_nodes} nodes was not found with {budget.num_states} states "
                f"(max_states={options.max_states}) in {options.time_limit_s:g} s (time_limit_s): raise them, or use "
                'method="heuristic", which also reports how far from the optimum it can be (Packing.gap)'
            ) from error

    return solve


def _auto(options: Options, *, num_cut_items: int) -> Solve:
    first = _heuristic(options, num_cut_items=num_cut_items)
    budget = Budget(max_states=_AUTO_EXACT_STATES, deadline_s=time.perf_counter() + options.time_limit_s)

    def solve(tree: Items) -> list[list[int]]:
        known = first(tree)
        if len(tree) > _AUTO_EXACT_ITEMS:
            return known
        try:
            return exact(tree, caps=options.caps, known=known, budget=budget)
        except BudgetExceededError:
            return known

    return solve


def _share_packs(parts: list[_Part], *, caps: Caps) -> list[IntArray]:
    """Puts parts of different trees into one pack by best fit, the largest first. DFS ranks; packs in DFS order."""
    open_packs: list[tuple[int, int]] = []  # (tokens, number), ascending
    packs: list[_OpenPack] = []
    for part in sorted(parts, key=lambda each: (-each.num_tokens, each.ranks[0])):
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
    bins = [np.sort(np.concatenate(one.ranks)) for one in packs]
    return sorted(bins, key=lambda bin_: bin_[0])


@dataclass(slots=True)
class _OpenPack:
    """A pack that parts are put into."""

    ranks: list[IntArray] = field(default_factory=list)
    trees: set[int] = field(default_factory=set)
    num_terms: int = 0

    def takes(self, part: _Part, *, caps: Caps) -> bool:
        """Whether a part that has few enough tokens may enter."""
        # Parts of one tree do not fit together, or were parted on purpose (by the paper's first programme).
        return part.tree not in self.trees and self.num_terms + part.num_terms <= caps.num_terms

    def add(self, part: _Part) -> None:
        self.ranks.append(part.ranks)
        self.trees.add(part.tree)
        self.num_terms += part.num_terms
