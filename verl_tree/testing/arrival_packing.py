"""The packing of a trainer that takes rows in their order, for comparison."""

from bisect import bisect
from collections.abc import Sequence

import numpy as np

from verl_tree.packing import check_caps, lower_bound
from verl_tree.packing.problem import Caps, Items, Pack, Packing
from verl_tree.tree import TokenForest
from verl_tree.tree.nodes import IntArray


def arrival_first_fit(
    forest: TokenForest,
    *,
    capacity: int | None = 8192,
    max_loss_terms: int | None = None,
    loss_terms: Sequence[int] | IntArray | None = None,
) -> Packing:
    """Put every trajectory, in the order given, into the first pack that takes it; arguments are those of `pack`."""
    caps = check_caps(forest, capacity=capacity, max_loss_terms=max_loss_terms, loss_terms=loss_terms)
    terms = forest.sequence_lens - 1 if loss_terms is None else np.asarray(loss_terms, dtype=np.int64)
    leaves = Items.from_forest(forest, terms=terms)
    bins = _bins(leaves, caps=caps, arrival=forest.dfs_rank)
    packs = tuple(Pack(leaves=forest.order[members], num_tokens=leaves.union_tokens(members)) for members in bins)
    return Packing(
        packs=packs,
        num_tokens=sum(part.num_tokens for part in packs),
        num_flat_tokens=forest.num_flat_tokens,
        lower_bound=lower_bound(forest, capacity=capacity, max_loss_terms=max_loss_terms, loss_terms=loss_terms),
        num_capacity_tokens=None if capacity is None else capacity * len(packs),
    )


class RangeMin:
    """Minimum of any range of a fixed array, from tables of the minima of 1, 2, 4, ... neighbours.

    On `lcp`, such a minimum is the number of tokens that two items share.
    """

    def __init__(self, values: IntArray) -> None:
        tables = [values]
        while 2 ** len(tables) <= len(values):
            before, half = tables[-1], 2 ** (len(tables) - 1)
            tables.append(np.minimum(before[:-half], before[half:]))
        self._tables = [table.tolist() for table in tables]

    def __call__(self, start: int, end: int) -> int:
        """Return min(values[start:end]) for start < end."""
        level = (end - start).bit_length() - 1
        table = self._tables[level]
        return min(table[start], table[end - 2**level])


def _bins(items: Items, *, caps: Caps, arrival: IntArray) -> list[list[int]]:
    """Put every item, in the order of `arrival` (m,), into the first bin that takes it. Bins are ascending lists."""
    lens, all_terms = items.lens.tolist(), items.terms.tolist()
    lcp = RangeMin(items.lcp)
    bins: list[list[int]] = []
    tokens: list[int] = []
    terms: list[int] = []
    for item in arrival.tolist():
        for number, members in enumerate(bins):
            added = lens[item] - _shared_with(members, item, lcp=lcp)
            if caps.hold(tokens[number] + added, terms[number] + all_terms[item]):
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


def _shared_with(members: list[int], item: int, *, lcp: RangeMin) -> int:
    """Count the tokens of an item's root path that a bin of ascending members holds."""
    # Its two neighbours in the bin share all of them.
    place = bisect(members, item)
    before = lcp(members[place - 1] + 1, item + 1) if place else 0
    after = lcp(item + 1, members[place] + 1) if place < len(members) else 0
    return max(before, after)
