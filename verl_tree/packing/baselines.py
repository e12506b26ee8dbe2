"""Greedy packings, the ones that every other system uses: baselines, and starts for the heuristic."""

from bisect import bisect

import numpy as np

from verl_tree.packing.problem import Caps, Items
from verl_tree.tree.nodes import IntArray


class RangeMin:
    """Minimum of any range of a fixed array: tables of the minima of 1, 2, 4, ... neighbours.

    The tokens that two items share are such a minimum of `lcp`.
    """

    def __init__(self, values: IntArray) -> None:
        """O(n log n) once."""
        tables = [values]
        while 2 ** len(tables) <= len(values):
            before, half = tables[-1], 2 ** (len(tables) - 1)
            tables.append(np.minimum(before[:-half], before[half:]))
        self._tables = [table.tolist() for table in tables]

    def __call__(self, start: int, end: int) -> int:
        """min(values[start:end]) for start < end."""
        level = (end - start).bit_length() - 1
        table = self._tables[level]
        return min(table[start], table[end - 2**level])


def next_fit(lens: IntArray, *, shared: IntArray, terms: IntArray, caps: Caps) -> list[list[int]]:
    """Takes items in a depth-first order and opens a new bin where the current one would outgrow a cap.

    Every bin is a range of the order, so what an item adds to its bin is what it does not share with the item before.

    Args:
        lens: (m,) tokens of the items with their root paths.
        shared: (m,) tokens shared with the item before.
        terms: (m,) loss terms.
        caps: of a bin.

    Returns:
        Positions in the given order, bin by bin.
    """
    bins: list[list[int]] = []
    tokens = num_terms = 0
    for index, (item_len, item_shared, item_terms) in enumerate(
        zip(lens.tolist(), shared.tolist(), terms.tolist(), strict=True)
    ):
        added = item_len - item_shared
        if bins and tokens + added <= caps.num_tokens and num_terms + item_terms <= caps.num_terms:
            bins[-1].append(index)
            tokens, num_terms = tokens + added, num_terms + item_terms
        else:
            bins.append([index])
            tokens, num_terms = item_len, item_terms
    return bins


def dfs_first_fit(items: Items, *, caps: Caps) -> list[list[int]]:
    """Next fit in DFS order: no sibling is separated from its siblings except at a bin's two ends."""
    return next_fit(items.lens, shared=items.lcp, terms=items.terms, caps=caps)


def arrival_first_fit(items: Items, *, caps: Caps, arrival: IntArray) -> list[list[int]]:
    """Every item, in the order of arrival, goes to the first bin that it fits into.

    Args:
        items: of a whole forest, in DFS order.
        caps: of a bin.
        arrival: (m,) the items in order of arrival.
    """
    lens, all_terms = items.lens.tolist(), items.terms.tolist()
    lcp = RangeMin(items.lcp)
    bins: list[list[int]] = []
    tokens: list[int] = []
    terms: list[int] = []
    for item in arrival.tolist():
        for number, members in enumerate(bins):
            added = lens[item] - shared_with(members, item, lcp=lcp)
            fits = tokens[number] + added <= caps.num_tokens
            if fits and terms[number] + all_terms[item] <= caps.num_terms:
                break
        else:
            number, added = len(bins), lens[item]
            bins.append([])
            tokens.append(0)
            terms.append(0)
        bins[number].insert(bisect(bins[number], item), item)
        tokens[number] += added
        terms[number] += all_terms[item]
    return bins


def shared_with(members: list[int], item: int, *, lcp: RangeMin) -> int:
    """Tokens of the item's root path that a bin of ascending members holds: its two neighbours have them all."""
    place = bisect(members, item)
    before = lcp(members[place - 1] + 1, item + 1) if place else 0
    after = lcp(item + 1, members[place] + 1) if place < len(members) else 0
    return max(before, after)
