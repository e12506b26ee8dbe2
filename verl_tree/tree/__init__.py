"""Token sequences as a prefix forest.

`forest` finds the forest and its numbers, `nodes` lists its nodes, and `layout` makes tensors of a pack. Only `layout`
needs torch, so it is imported by its own name.
"""

from verl_tree.tree.forest import TokenForest, lcp_of_subset
from verl_tree.tree.nodes import IntArray, NodeTable

__all__ = ["IntArray", "NodeTable", "TokenForest", "lcp_of_subset"]
