"""Sections against the boolean mask, and the cut against all cuts."""

import numpy as np

from verl_tree.relay.cut import cut


def test_the_example():
    """The tree that `Cut` draws: two trees, a cut inside a node, a section that holds parts of two branches."""
    subtree_end_T = np.array([11, 7, 7, 7, 7, 6, 7, 11, 11, 11, 11, 12])
    position_T = np.array([0, 1, 2, 3, 4, 5, 5, 1, 2, 3, 4, 0])
    sections = cut(subtree_end_T, position_T, capacity=4, section_cost=1)
    assert [(each.start, each.end) for each in sections.sections] == [(0, 4), (4, 8), (8, 12)]
    assert [each.context.tolist() for each in sections.sections] == [[], [0, 1, 2, 3], [0, 7]]
    assert [each.subtree_end.tolist() for each in sections.sections] == [
        [4, 4, 4, 4],
        [8, 7, 7, 7, 7, 6, 7, 8],
        [5, 5, 5, 5, 5, 6],
    ]
    assert sections.spine.tolist() == [0, 1, 2, 3, 7]
    assert sections.spine_subtree_end.tolist() == [5, 4, 4, 4, 5]
    assert sections.section_T.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
