"""Baselines: the greedy packings of other systems, which also start the heuristic, and the paper's first programme."""

from bisect import bisect

import numpy as np

from verl_tree.packing.problem import Caps, Items
from verl_tree.tree.nodes import IntArray


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


def next_fit(lens: IntArray, *, shared: IntArray, terms: IntArray, caps: Caps) -> list[list[int]]:
    """Take items in a depth-first order and open a new bin where the current one would outgrow a cap.

    `shared` (m,) are the tokens that an item shares with the one before. The bins hold positions in the given order.
    """
    # Every bin is a range of the order, so an item adds to it what it does not share with the item before.
    bins: list[list[int]] = []
    tokens = num_terms = 0
    for index, (item_len, item_shared, item_terms) in enumerate(
        zip(lens.tolist(), shared.tolist(), terms.tolist(), strict=True)
    ):
        added = item_len - item_shared
        if bins and caps.hold(tokens + added, num_terms + item_terms):
            bins[-1].append(index)
            tokens, num_terms = tokens + added, num_terms + item_terms
        else:
            bins.append([index])
            tokens, num_terms = item_len, item_terms
    return bins


def dfs_first_fit(items: Items, *, caps: Caps) -> list[list[int]]:
    """Pack in DFS order by next fit: siblings are separated only at a bin's two ends."""
    return next_fit(items.lens, shared=items.lcp, terms=items.terms, caps=caps)


def arrival_first_fit(items: Items, *, caps: Caps, arrival: IntArray) -> list[list[int]]:
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


def single_path(items: Items, *, caps: Caps) -> list[list[int]]:
    """Pack one tree, an item per leaf, by the paper's single-path programme (Tree Training, section 2.2.1, eq. 3-5).

    One pack shares the root path of one node u among all n(u) leaves below u. It is feasible if L(u) + R(u) <= C: the
    path and everything below u, leaf by leaf. It saves (n(u) - 1) L(u) tokens against flat. Bottom-up, the programme
    finds the nodes with the largest saving: a node takes all of its leaves or leaves them to its children. A leaf below
    no such node is a pack of its own. What a pack shares below u is computed once, but the programme ignores it.
    """
    nodes = items.nodes
    first, last, parent = nodes.first_leaf.tolist(), nodes.last_leaf.tolist(), nodes.parent.tolist()
    lens_before, terms_before = np.append(0, np.cumsum(items.lens)), np.append(0, np.cumsum(items.terms))
    num_leaves = nodes.last_leaf - nodes.first_leaf
    lens_below = lens_before[nodes.last_leaf] - lens_before[nodes.first_leaf]
    terms_below = terms_before[nodes.last_leaf] - terms_before[nodes.first_leaf]
    residual = lens_below - num_leaves * nodes.end  # R(u)
    is_feasible = (nodes.end + residual <= caps.num_tokens) & (terms_below <= caps.num_terms)
    own_saving = np.where(is_feasible, (num_leaves - 1) * nodes.end, -1).tolist()
    best = [0] * nodes.num_nodes  # sum over the children first, then the maximum of eq. 5
    takes_all = [False] * nodes.num_nodes
    for node in range(nodes.num_nodes - 1, -1, -1):
        if own_saving[node] >= best[node]:
            best[node], takes_all[node] = own_saving[node], True
        if parent[node] >= 0:
            best[parent[node]] += best[node]
    bins = []
    node, subtree_end, end_node = 0, nodes.subtree_end.tolist(), items.end_node.tolist()
    while node < nodes.num_nodes:
        if takes_all[node]:
            bins.append(list(range(first[node], last[node])))
            node = subtree_end[node]
            continue
        leaf = first[node]
        while leaf < last[node] and end_node[leaf] == node:
            bins.append([leaf])  # it ends in a node that takes nothing
            leaf += 1
        node += 1
    return bins
