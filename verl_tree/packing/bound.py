"""A lower bound on packed tokens: in how many packs must each node appear at least?

Bottom-up over the nodes. A pack that visits node v holds v's whole root path, so C - L(v) tokens are left for what is
below, where L(v) counts the tokens from the root to the end of v. With t(u) visits of every node u below v, what is
below takes D(v) = sum of w(u) t(u) tokens at least, w(u) being the tokens of u. Three bounds on the visits of v:

- demand: D(v) / (C - L(v)), rounded up, and the same for loss terms;
- every child c: t(c), because a pack that visits c visits v;
- big items: a visit of c takes at least m(c) = w(c) + the shortest way from the end of c to the end of a leaf. Visits
  are items of size m(c); those of one child are in different packs by definition, and the bin-packing bound L2 of
  Martello and Toth (Lower bounds and reduction procedures for the bin packing problem, 1990) counts the bins.

The bound is the sum of w(v) t(v). It is the optimum wherever a tree fits into one pack.
"""

import numpy as np

from verl_tree.packing.problem import UNLIMITED, Caps, Items
from verl_tree.tree.nodes import IntArray


def tree_lower_bound(items: Items, *, caps: Caps) -> int:
    """Count the tokens that no packing of this tree can go below."""
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
    # Shortest way from the end of a node to the end of an item: 0 where one ends in the node.
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
    # Above room - threshold nothing else enters their bin; the other big ones leave room for what is small.
    num_closed = np.minimum(np.searchsorted(-size, -(room - thresholds), side="left"), num_big)
    num_kept = np.searchsorted(-size, -thresholds, side="right")
    open_room = (number[num_big] - number[num_closed]) * room - (total[num_big] - total[num_closed])
    overflow = np.maximum(total[num_kept] - total[num_big] - open_room, 0)
    return int(number[num_big] + (-(-overflow // room)).max())
