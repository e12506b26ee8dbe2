"""Sections against the boolean mask of the forest, and the cut against all cuts."""

import time
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from tree_cases import DEEP, layout_of

from verl_tree.relay.cut import cut
from verl_tree.testing.synthetic import random_forest

# The forest that `Cut` draws: two trees, a cut inside a node, a section with parts of two branches.
SUBTREE_END_T = np.array([11, 7, 7, 7, 7, 6, 7, 11, 11, 11, 11, 12])
POSITION_T = np.array([0, 1, 2, 3, 4, 5, 5, 1, 2, 3, 4, 0])


def arrays(layout):
    """Return what `cut` asks for."""
    return layout.subtree_end_T.numpy(), layout.position_T.numpy()


def small_forest(seed):
    """Strict prefixes, duplicates, several roots; nodes of one token (seed 0, 3, ...) or of several."""
    return layout_of(random_forest(seed, num_leaves=12, mean_len=1 + 2 * (seed % 3), root_probability=0.15))


def comb(num_teeth, *, step, tooth_len):
    """Make a chain with a tooth every `step` tokens: all teeth follow it in preorder, the deepest first."""
    chain = [0] * (num_teeth * step)
    return [chain, *([*chain[: tooth * step], *[1] * tooth_len] for tooth in range(1, num_teeth))]


def mask_of(subtree_end):
    index = np.arange(len(subtree_end))
    return (index <= index[:, None]) & (index[:, None] < subtree_end)


def bounds(sections):
    return [0, *(each.end for each in sections.sections)]


def cost(sections, *, section_cost):
    return sections.num_sections * section_cost + len(sections.spine) / 3


def least_cost_of_all_cuts(parent_T, *, capacity, section_cost):
    """Try every cut. A root path is the set of bits of its tokens, the spine the union of those of the starts."""
    paths = []
    for parent in parent_T:
        paths.append(0 if parent < 0 else paths[parent] | 1 << parent)
    best = np.inf

    def go_on(start, spine, num_sections):
        nonlocal best
        for end in range(start + 1, min(start + capacity, len(paths)) + 1):
            if end == len(paths):
                best = min(best, (num_sections + 1) * section_cost + spine.bit_count() / 3)
            else:
                go_on(end, spine | paths[end], num_sections + 1)

    go_on(0, 0, 0)
    return best


def least_cost_over_all_positions(visible, *, capacity, section_cost):
    """Try every start of every section: what its end has on its root path and its start has not joins the spine."""
    num_tokens = len(visible)
    paths = [{*np.flatnonzero(row[:token]).tolist()} for token, row in enumerate(visible)] + [set()]

    @cache
    def least(end):
        starts = range(max(end - capacity, 0), end)
        return min(least(start) + section_cost + len(paths[end] - paths[start]) / 3 for start in starts) if end else 0

    return [least(end) for end in range(num_tokens + 1)][-1]


def check_sections(sections, visible, *, capacity):
    """Check that each section sees its context, one root path, and that its `subtree_end` is the mask."""
    starts = bounds(sections)
    assert starts[-1] == len(visible)
    assert sections.section_T.tolist() == [
        index for index, each in enumerate(sections.sections) for _ in range(each.num_tokens)
    ]
    for section, (start, end) in zip(sections.sections, pairwise(starts), strict=True):
        assert (section.start, section.end) == (start, end)
        assert 1 <= section.num_tokens == end - start <= capacity
        seen = np.flatnonzero(visible[start:end, :start].any(axis=0))
        assert section.context.tolist() == seen.tolist() == np.flatnonzero(visible[start, :start]).tolist()
        rows = [*seen, *range(start, end)]
        assert section.subtree_end.dtype == section.context.dtype == np.int64
        assert (mask_of(section.subtree_end) == visible[np.ix_(rows, rows)]).all()
    contexts = [each.context.tolist() for each in sections.sections]
    assert sections.num_context_tokens == sum(map(len, contexts))
    assert sections.spine.tolist() == sorted({token for context in contexts for token in context})
    assert (mask_of(sections.spine_subtree_end) == visible[np.ix_(sections.spine, sections.spine)]).all()


def test_the_example():
    sections = cut(SUBTREE_END_T, POSITION_T, capacity=4, section_cost=1)
    assert [(each.start, each.end) for each in sections.sections] == [(0, 4), (4, 8), (8, 12)]
    assert [each.context.tolist() for each in sections.sections] == [[], [0, 1, 2, 3], [0, 7]]
    assert [each.subtree_end.tolist() for each in sections.sections] == [
        [4, 4, 4, 4],
        [8, 7, 7, 7, 7, 6, 7, 8],
        [5, 5, 5, 5, 5, 6],
    ]
    assert [(each.num_context, each.num_tokens) for each in sections.sections] == [(0, 4), (4, 4), (2, 4)]
    assert sections.spine.tolist() == [0, 1, 2, 3, 7]
    assert sections.spine_subtree_end.tolist() == [5, 4, 4, 4, 5]
    assert sections.section_T.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert (sections.num_sections, sections.num_context_tokens) == (3, 6)


def test_the_spine_of_the_example():
    """The spine is the tokens 0 1 2 3 7, which count as 0 1 2 3 4 here: token 7, alone, sees token 0."""
    spine_cut = cut(SUBTREE_END_T, POSITION_T, capacity=4, section_cost=1).spine_cut(4)
    assert [(each.start, each.end, each.context.tolist()) for each in spine_cut.sections] == [(0, 4, []), (4, 5, [0])]
    assert [each.subtree_end.tolist() for each in spine_cut.sections] == [[4, 4, 4, 4], [2, 2]]


def test_cheap_sections_make_a_smaller_spine():
    """docs/relay.md: 3 sections and 5 spine tokens, or 4 and 3; a section costs as much as two thirds of a token."""
    for section_cost, expected in ((0.7, [0, 4, 8, 12]), (0.6, [0, 3, 7, 11, 12])):
        assert bounds(cut(SUBTREE_END_T, POSITION_T, capacity=4, section_cost=section_cost)) == expected
    assert cut(SUBTREE_END_T, POSITION_T, capacity=4, section_cost=0.6).spine.tolist() == [0, 1, 2]


def test_a_chain_ends_in_full_sections():
    """Ten tokens: the later the last section begins, the more are in the spine."""
    sections = cut(np.full(10, 10), np.arange(10), capacity=4, section_cost=0)
    assert bounds(sections) == [0, 2, 6, 10]
    assert sections.spine.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_star_is_cut_where_a_branch_begins():
    """Prompt of 4 tokens, three branches of 3: only the prompt is in the spine."""
    sections = cut(*arrays(layout_of([[0, 1, 2, 3, branch, 8, 9] for branch in (5, 6, 7)])), capacity=8, section_cost=0)
    assert bounds(sections) == [0, 7, 13]
    assert sections.spine.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", range(12))
def test_sections_and_spine_against_the_mask(seed):
    layout = small_forest(seed)
    visible, num_tokens = layout.materialize().numpy(), layout.num_tokens
    most_context = 0
    for capacity in (1, 2, 3, 7, num_tokens // 2, num_tokens - 1):
        for section_cost in (0, 0.3 * capacity):
            sections = cut(*arrays(layout), capacity=capacity, section_cost=section_cost)
            check_sections(sections, visible, capacity=capacity)
            assert sections.num_sections >= -(-num_tokens // capacity)
            spine = sections.spine
            for spine_capacity in (1, 2, 5, max(len(spine), 1)):
                spine_cut = sections.spine_cut(spine_capacity)
                check_sections(spine_cut, visible[np.ix_(spine, spine)], capacity=spine_capacity)
                assert spine_cut.num_sections == -(-len(spine) // spine_capacity)
            most_context = max(most_context, *(each.num_context for each in sections.sections))
    assert most_context == layout.position_T.max()  # with a capacity of 1, the deepest token is a section


def test_what_fits_is_one_section():
    for sequences in (DEEP, [[3]], [[1, 2], [3]]):
        layout = layout_of(sequences)
        sections = cut(*arrays(layout), capacity=layout.num_tokens, section_cost=0)
        assert bounds(sections) == [0, layout.num_tokens]
        assert sections.sections[0].subtree_end.tolist() == layout.subtree_end_T.tolist()
        assert sections.spine.tolist() == []
        assert sections.spine_cut(5).sections == ()


def test_a_forest_without_tokens_has_no_sections():
    sections = cut(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64), capacity=3, section_cost=1)
    assert (sections.sections, sections.section_T.tolist(), sections.spine.tolist()) == ((), [], [])


def test_the_cut_is_the_best_of_all_cuts():
    num_cases = 0
    for seed in range(60):
        layout = layout_of(random_forest(seed, num_leaves=2 + seed % 6, mean_len=1 + seed % 3, max_depth=4))
        if not 4 <= layout.num_tokens <= 14:
            continue
        for capacity in (1, 2, 3, 5, layout.num_tokens // 2):
            for section_cost in (0, 0.02 * capacity, 1, 2.5):
                sections = cut(*arrays(layout), capacity=capacity, section_cost=section_cost)
                best = least_cost_of_all_cuts(layout.parent_T.tolist(), capacity=capacity, section_cost=section_cost)
                assert cost(sections, section_cost=section_cost) == pytest.approx(best, abs=1e-9)
                num_cases += 1
    assert num_cases > 400


@pytest.mark.parametrize("seed", range(6))
def test_the_cut_of_larger_forests(seed):
    """Staircases of many steps, that ends and sections share."""
    for layout in (small_forest(seed), layout_of(comb(14 + seed, step=2, tooth_len=1 + seed % 3))):
        visible = layout.materialize().numpy()
        for capacity in (2, 5, 11, 30):
            for section_cost in (0, 0.02 * capacity, 1):
                sections = cut(*arrays(layout), capacity=capacity, section_cost=section_cost)
                best = least_cost_over_all_positions(visible, capacity=capacity, section_cost=section_cost)
                assert cost(sections, section_cost=section_cost) == pytest.approx(best, abs=1e-9)


def test_fifty_thousand_tokens():
    """About 0.02 s: 3,000 branches make staircases of 400 steps, which are not walked anew for every end."""
    layout = layout_of(comb(3000, step=1, tooth_len=16))
    start_s = time.process_time()
    sections = cut(*arrays(layout), capacity=6000, section_cost=120)
    assert time.process_time() - start_s < 0.3
    assert (layout.num_tokens, sections.num_sections) == (50_984, 9)


def test_a_capacity_of_zero_is_refused():
    with pytest.raises(ValueError, match=r"capacity is 0: set tree\.capacity .* to a positive number"):
        cut(SUBTREE_END_T, POSITION_T, capacity=0, section_cost=1)
    with pytest.raises(ValueError, match="capacity is 0"):
        cut(SUBTREE_END_T, POSITION_T, capacity=4, section_cost=1).spine_cut(0)
