"""Where the tokens of a model call hang below the path before them, the context of a relayed section."""

import numpy as np

from verl_tree.tree.nodes import IntArray


def roots_below_context(subtree_end_T: IntArray, *, num_context: int) -> tuple[IntArray, IntArray]:
    """Find the tokens whose parent is no token behind the context: (N,) int64 each, the tokens and their parents.

    `subtree_end_T` (T,) is that of a depth-first preorder that begins with a root path of `num_context` tokens. Both
    results count in its tokens; the parent is a token of the context, or -1 at a root.
    """
    token = np.arange(num_context, len(subtree_end_T))
    # Below an earlier token behind the context are all that one of their subtrees reaches.
    reached = np.maximum.accumulate(np.append(num_context, subtree_end_T[num_context:-1]))
    roots = token[reached <= token]
    # Subtrees end earlier and earlier along a path, so those that reach a root come first.
    return roots, np.searchsorted(-subtree_end_T[:num_context], -roots, side="left") - 1
