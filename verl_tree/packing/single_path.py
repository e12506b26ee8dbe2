"""The paper's single-path programme (Tree Training, section 2.2.1, eq. 3-5): one shared prefix per step.

A step may share the root path of one node u among all leaves below u. It is feasible if that prefix and everything
below, leaf by leaf, fit into C: L(u) + R(u) <= C. It saves (n(u) - 1) L(u) tokens against flat. The programme
chooses the set of nodes with the largest saving, bottom-up in O(nodes): a node either takes all of its leaves, or
leaves them to its children. A leaf below no chosen node is a step of its own.

What the step computes is then a pack like any other, so that prefixes inside of it are shared too: its tokens can be
fewer than the programme counts.
"""

import numpy as np

from verl_tree.packing.problem import Caps, Items


def single_path(items: Items, *, caps: Caps) -> list[list[int]]:
    """Packs one tree by the programme of eq. 5.

    Args:
        items: one tree, an item per leaf.
        caps: of a pack.

    Returns:
        The items of each step.
    """
    nodes = items.nodes()
    end, parent = nodes.end, nodes.parent.tolist()
    lens_before = np.concatenate(([0], np.cumsum(items.lens)))
    terms_before = np.concatenate(([0], np.cumsum(items.terms)))
    num_leaves = nodes.last_leaf - nodes.first_leaf
    lens_below = lens_before[nodes.last_leaf] - lens_before[nodes.first_leaf]
    terms_below = terms_before[nodes.last_leaf] - terms_before[nodes.first_leaf]
    residual = lens_below - num_leaves * end  # R(u)
    is_feasible = (end + residual <= caps.num_tokens) & (terms_below <= caps.num_terms)
    own_saving = np.where(is_feasible, (num_leaves - 1) * end, -1).tolist()
    best = [0] * nodes.num_nodes  # sum over the children first, then the maximum of eq. 5
    takes_all = [False] * nodes.num_nodes
    for node in range(nodes.num_nodes - 1, -1, -1):
        if own_saving[node] >= best[node]:
            best[node], takes_all[node] = own_saving[node], True
        if parent[node] >= 0:
            best[parent[node]] += best[node]
    bins = []
    node, subtree_end = 0, nodes.subtree_end.tolist()
    first, last = nodes.first_leaf.tolist(), nodes.last_leaf.tolist()
    end_node = items.end_node(nodes).tolist()
    while node < nodes.num_nodes:
        if takes_all[node]:
            bins.append(list(range(first[node], last[node])))
            node = subtree_end[node]
            continue
        leaf = first[node]
        while leaf < last[node] and end_node[leaf] == node:
            bins.append([leaf])  # it ends in a node that takes nothing: a step of its own
            leaf += 1
        node += 1
    return bins
