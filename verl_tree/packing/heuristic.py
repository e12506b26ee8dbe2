"""Near-optimal packings of trees of any size: the best of three quick packings, then ruin and recreate (`improve.py`).

- `deepest_first`, the paper's rules (Tree Training, section 2.2.2), which bring leaves of similar depth together;
- `dfs_first_fit`, the same depth-first walk in the order of the token ids;
- `best_fit_up`, the paper's multi-path programme with one state per node.

Small subtrees of large trees are packed as one item.
"""

from bisect import bisect
from dataclasses import dataclass

import numpy as np

from verl_tree.packing.baselines import dfs_first_fit, next_fit
from verl_tree.packing.improve import MAX_WINDOW_ITEMS, improve
from verl_tree.packing.problem import Caps, Items

_COARSE_FRACTIONS = (128, 64, 32, 16, 8)
"""Items of a large tree hold at most 1/128 of a pack; 1/64 and so on if these are still too many items."""


def heuristic(
    items: Items, *, caps: Caps, num_rounds: int, seed: int, deadline_s: float, lower_bound: int
) -> list[list[int]]:
    """Pack one tree.

    The improvement ends after `num_rounds`, when `time.perf_counter` reaches `deadline_s`, or at `lower_bound` tokens,
    where the packing is optimal.
    """
    coarse = _coarse(items, caps=caps)
    starts = [best_fit_up(coarse, caps=caps), deepest_first(coarse, caps=caps), dfs_first_fit(coarse, caps=caps)]
    bins = min(starts, key=lambda bins: (sum(map(coarse.union_tokens, bins)), len(bins)))
    bins = improve(
        coarse, bins, caps=caps, num_rounds=num_rounds, seed=seed, deadline_s=deadline_s, lower_bound=lower_bound
    )
    if coarse is items:
        return bins
    first, last = (items.first_leaf.searchsorted(leaf).tolist() for leaf in (coarse.first_leaf, coarse.last_leaf))
    return [[each for item in members for each in range(first[item], last[item])] for members in bins]


def _coarse(items: Items, *, caps: Caps) -> Items:
    """Join small subtrees of a large tree until it has few items."""
    coarse = items
    for fraction in _COARSE_FRACTIONS:
        if len(coarse) <= MAX_WINDOW_ITEMS:
            break
        coarse = items.coarsened(caps=Caps(caps.num_tokens // fraction, caps.num_terms // fraction))
    return coarse


def deepest_first(items: Items, *, caps: Caps) -> list[list[int]]:
    """Pack by the paper's heuristic: depth-first, the child with the deepest leaf first, a new pack where a cap is met.

    The order brings leaves of similar depth together in every subtree. Source: Tree Training, section 2.2.2.
    """
    nodes, num_nodes = items.nodes, items.nodes.num_nodes
    parent, start = nodes.parent.tolist(), nodes.start.tolist()
    deepest = nodes.end.tolist()
    children: list[list[int]] = [[] for _ in range(num_nodes)]
    for node in range(num_nodes - 1, 0, -1):
        above = parent[node]
        deepest[above] = max(deepest[above], deepest[node])
        children[above].append(node)
    ends_here: list[list[int]] = [[] for _ in range(num_nodes)]
    for item, node in enumerate(items.end_node.tolist()):
        ends_here[node].append(item)
    order, shared, stack = [], [], [0]
    lens = items.lens.tolist()
    fork: int | None = 0  # where the walk left the path of the last item
    while stack:
        node = stack.pop()
        if fork is None:
            fork = start[node]
        for item in ends_here[node]:
            order.append(item)
            shared.append(lens[item] if fork is None else fork)
            fork = None
        stack.extend(sorted(children[node], key=lambda child: (deepest[child], -child)))
    index = np.array(order)
    bins = next_fit(items.lens[index], shared=np.array(shared), terms=items.terms[index], caps=caps)
    return [sorted(order[position] for position in members) for members in bins]


def best_fit_up(items: Items, *, caps: Caps) -> list[list[int]]:
    """Merge the children's bins at every node by best fit decreasing, from the leaves to the root."""
    nodes = items.nodes
    own, end, parent = (nodes.end - nodes.start).tolist(), nodes.end.tolist(), nodes.parent.tolist()
    all_terms = items.terms.tolist()
    arriving: list[list[_OpenBins]] = [[] for _ in range(nodes.num_nodes)]
    for item, node in enumerate(items.end_node.tolist()):
        arriving[node].append(_OpenBins([0], [(all_terms[item], [item])]))
    merged = _OpenBins([], [])
    for node in range(nodes.num_nodes - 1, -1, -1):
        room = Caps(num_tokens=caps.num_tokens - end[node], num_terms=caps.num_terms)
        merged, arriving[node] = _merge(arriving[node], caps=room), []
        merged.offset += own[node]
        if parent[node] >= 0:
            arriving[parent[node]].append(merged)
    return [sorted(members) for _, members in merged.contents]


@dataclass(slots=True)
class _OpenBins:
    """Bins of one node, ascending by load: loads, and loss terms and items (`contents`).

    A load is the tokens of a bin below the node, stored minus `offset`, which the walk to the root adds to every load.
    """

    loads: list[int]
    contents: list[tuple[int, list[int]]]
    offset: int = 0

    def put(self, load: int, terms: int, members: list[int], *, caps: Caps) -> None:
        """Add to the fullest bin that takes it, or open one."""
        load -= self.offset
        fullest = bisect(self.loads, caps.num_tokens - 2 * self.offset - load) - 1
        while fullest >= 0 and self.contents[fullest][0] + terms > caps.num_terms:
            fullest -= 1
        if fullest >= 0:
            other_terms, other_members = self.contents.pop(fullest)
            load += self.loads.pop(fullest) + self.offset
            terms, members = terms + other_terms, other_members + members
        place = bisect(self.loads, load)
        self.loads.insert(place, load)
        self.contents.insert(place, (terms, members))


def _merge(groups: list[_OpenBins], *, caps: Caps) -> _OpenBins:
    """Put the bins of several children together."""
    if len(groups) == 1:
        return groups[0]
    # Bins of one child never fit together, else they would have been merged there. So if one child has most of the
    # bins, only those of the others are moved.
    largest = max(groups, key=lambda group: len(group.loads))
    num_others = sum(len(group.loads) for group in groups) - len(largest.loads)
    base = largest if len(largest.loads) > num_others else _OpenBins([], [])
    moved = [
        (load + group.offset, terms, members)
        for group in groups
        if group is not base
        for load, (terms, members) in zip(group.loads, group.contents, strict=True)
    ]
    for load, terms, members in sorted(moved, key=lambda each: (-each[0], -each[1], each[2])):
        base.put(load, terms, members, caps=caps)
    return base
