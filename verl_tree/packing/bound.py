"""A lower bound on packed tokens: the number of packs in which each node must appear at least.

L(v) counts the tokens from the root to the end of node v, w(v) those of v, and t(v) its visits: the packs that hold it.
A visit holds v's whole root path, so it leaves C - L(v) tokens for the nodes u below v. These take at least D(v) = sum
of w(u) t(u). Bottom-up, t(v) is the largest of:

- D(v) / (C - L(v)), rounded up, and the same for loss terms;
- t(c) of every child c, because a pack that visits c visits v;
- the number of bins of C - L(v) that the visits of the children need as items. A visit of c has at least the size w(c)
  + the shortest way from the end of c to the end of a leaf. The bins are counted by the bound L2 of Martello and Toth
  (Lower bounds and reduction procedures for the bin packing problem, 1990).

The bound is the sum of w(v) t(v). It is the optimum wherever a tree fits into one pack. See docs/packing.md.
"""

import numpy as np

from verl_tree.packing.problem import UNLIMITED, Caps, Items
from verl_tree.tree.nodes import IntArray


def tree_lower_bound(items: Items, *, caps: Caps) -> int:
    """Compute a lower bound on the packed tokens of this tree."""
    if caps.hold(items.num_tokens, items.num_terms):
        return items.num_tokens
    return int(least_visits(items, caps=caps) @ (items.nodes.end - items.nodes.start))


def least_visits(items: Items, *, caps: Caps) -> IntArray:
    """Count the packs in which each node of a tree appears at least, (N,) int64."""
    nodes = items.nodes
    num_nodes = nodes.num_nodes
    own, end, parent = (nodes.end - nodes.start).tolist(), nodes.end.tolist(), nodes.parent.tolist()
    terms_before = np.append(0, np.cumsum(items.terms))
    num_terms = (terms_before[nodes.last_leaf] - terms_before[nodes.first_leaf]).tolist()
    # Shortest way from the end of a node to the end of an item: 0 if an item ends in the node.
    shortest = [UNLIMITED] * num_nodes
    for node in items.end_node.tolist():
        shortest[node] = 0
    demand, most_visited = [0] * num_nodes, [1] * num_nodes
    child_visits: list[list[tuple[int, int]]] = [[] for _ in range(num_nodes)]
    visits = [1] * num_nodes
    for node in range(num_nodes - 1, -1, -1):
        room = caps.num_tokens - end[node]
        least = max(most_visited[node], -(-num_terms[node] // caps.num_terms))
        if demand[node] > room * least:  # a room of 0 tokens has no demand: its leaves end here
            least = -(-demand[node] // room)
        if demand[node] > room:
            least = max(least, _bin_packing_bound(child_visits[node], room=room))
        visits[node] = least
        child_visits[node] = []
        above = parent[node]
        if above >= 0:
            way = own[node] + shortest[node]
            shortest[above] = min(shortest[above], way)
            demand[above] += demand[node] + own[node] * least
            most_visited[above] = max(most_visited[above], least)
            child_visits[above].append((way, least))
    return np.array(visits, dtype=np.int64)


def _bin_packing_bound(items: list[tuple[int, int]], *, room: int) -> int:
    """Compute the bound L2 on bins of `room` for (size, count) items, for every threshold at once."""
    size, count = np.array(sorted(items, reverse=True), dtype=np.int64).T
    total = np.append(0, np.cumsum(size * count))
    number = np.append(0, np.cumsum(count))
    num_big = int(np.searchsorted(-size, -room / 2, side="left"))  # sizes above room / 2: one bin each
    thresholds = np.unique(size[num_big:])
    if not len(thresholds):
        return int(number[num_big])
    # Items above room - threshold have a bin to themselves. Other big items leave room for small ones.
    num_closed = np.minimum(np.searchsorted(-size, -(room - thresholds), side="left"), num_big)
    num_kept = np.searchsorted(-size, -thresholds, side="right")
    open_room = (number[num_big] - number[num_closed]) * room - (total[num_big] - total[num_closed])
    overflow = np.maximum(total[num_kept] - total[num_big] - open_room, 0)
    return int(number[num_big] + (-(-overflow // room)).max())
