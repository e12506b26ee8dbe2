"""Baselines: packing in DFS order, which also starts the heuristic, and the paper's first programme."""

import numpy as np

from verl_tree.packing.problem import Caps, Items
from verl_tree.tree.nodes import IntArray


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
