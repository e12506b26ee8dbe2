"""The model calls of a cut forest: by hand on the forest that `Cut` draws, and followed as sets on random forests."""

from collections.abc import Sequence

import numpy as np
import pytest
from tree_cases import DEEP, layout_of

from verl_tree.relay.calls import RelayCalls
from verl_tree.relay.cut import Cut, cut
from verl_tree.relay.run import NumCalls
from verl_tree.testing.synthetic import random_forest

# 0 ┬ 1 ─ 2 ─ 3 ─ 4 ┬ 5      leaves in preorder: 0..3 (a strict prefix), 0..4 (one that ends at a section's first
#   │               └ 6      token), 0..5, 0..4 6, 0 7..10, 11
#   └ 7 ─ 8 ─ 9 ─ 10
# 11                         sections 0..3, 4..7, 8..11; spine 0 1 2 3 7
SUBTREE_END_T = np.array([11, 7, 7, 7, 7, 6, 7, 11, 11, 11, 11, 12])
POSITION_T = np.array([0, 1, 2, 3, 4, 5, 5, 1, 2, 3, 4, 0])
PARENT_T = np.array([-1, 0, 1, 2, 3, 4, 4, 0, 7, 8, 9, -1])
LEAVES = [[0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 6], [0, 7, 8, 9, 10], [11]]
EVERY_T = np.arange(12)


def drawn(*, scorer_T=PARENT_T, wanted: Sequence[int] = range(12), max_loss_terms=None):
    sections = cut(SUBTREE_END_T, POSITION_T, capacity=4, section_cost=1)
    return RelayCalls.of_cut(
        sections,
        spine_cut=sections.spine_cut(4),
        scorer_T=scorer_T,
        wanted_T=np.isin(EVERY_T, wanted),
        tree_index_F=np.concatenate(LEAVES),
        leaf_offsets=np.cumsum([0, *map(len, LEAVES)]),
        max_loss_terms=max_loss_terms,
    )


def lists(arrays):
    return [each.tolist() for each in arrays]


def groups(calls):
    return [lists(call.leaf_groups) for call in calls.sections]


def test_after_which_tokens_calls_are_entered_and_left():
    """0 has the child 7 in the next section, 3 has 4, and 7 has 8: rows 0, 1 and 2."""
    calls = drawn()
    assert calls.num_cut_tokens == 3
    assert lists(call.entered_rows_E for call in calls.sections) == [[], [0, 1], [2]]
    assert lists(call.cut_places for call in calls.sections) == [[0, 3], [3], []]
    assert [call.cut_rows for call in calls.sections] == [slice(0, 2), slice(2, 3), slice(0, 0)]
    # The spine 0 1 2 3 | 7 is entered once more after 0.
    assert lists(call.entered_rows_E for call in calls.spine) == [[], [0]]
    assert lists(call.cut_places for call in calls.spine) == [[0, 3], [0]]
    assert [call.cut_rows for call in calls.spine] == [slice(0, 2), slice(2, 3)]


def test_a_token_at_which_only_the_spine_is_cut():
    """A chain of 9 tokens in sections of 3; its spine, 0..5, is computed in the calls 0..3 and 4 5."""
    chain = np.arange(9)
    sections = cut(np.full(9, 9), chain, capacity=3, section_cost=1)
    calls = RelayCalls.of_cut(
        sections,
        spine_cut=sections.spine_cut(4),
        scorer_T=chain - 1,
        wanted_T=chain > 0,
        tree_index_F=chain,
        leaf_offsets=np.array([0, 9]),
    )
    assert calls.num_cut_tokens == 3  # 2, 3 and 5
    assert lists(call.entered_rows_E for call in calls.sections) == [[], [0], [2]]
    assert lists(call.cut_places for call in calls.sections) == [[2], [0, 2], []]
    assert lists(call.entered_rows_E for call in calls.spine) == [[], [1]]
    assert lists(call.cut_places for call in calls.spine) == [[2, 3], [1]]


def test_what_each_section_computes_sees_and_scores():
    calls = drawn()
    assert (calls.num_tokens, calls.num_spine_tokens) == (12, 5)
    assert lists(call.token_Q for call in calls.sections) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    # The context of the last section is 0 and 7, rows 0 and 4 of the store.
    assert lists(call.context_rows_P for call in calls.sections) == [[], [0, 1, 2, 3], [0, 4]]
    assert [call.num_context for call in calls.sections] == [0, 4, 2]
    assert calls.sections[1].subtree_end.tolist() == [8, 7, 7, 7, 7, 6, 7, 8]
    # 7 is the only spine token of its section: place 3, row 4.
    assert lists(call.spine_places for call in calls.sections) == [[0, 1, 2, 3], [3], []]
    assert [call.spine_rows for call in calls.sections] == [slice(0, 4), slice(4, 5), slice(0, 0)]
    # Token 0 has the children 1 and 7, and scores both, as 3 scores 4, although 4 and 7 are in the next section.
    assert lists(call.scored_K for call in calls.sections) == [[1, 7, 2, 3, 4], [5, 6, 8], [9, 10]]
    assert lists(call.scorer_K for call in calls.sections) == [[0, 0, 1, 2, 3], [0, 0, 3], [0, 1]]


def test_a_row_is_complete_where_its_last_score_is_made():
    """The second leaf ends at token 4, in section 1, but 4 is scored by 3, in section 0. Token 11 has no score."""
    assert groups(drawn()) == [[[0, 1]], [[2, 3]], [[4, 5]]]


def test_the_spine_scores_what_later_rows_read():
    """The rows of section 1 read 1 2 3 4, that of section 2 reads 7 and 8; both 7 and 4 are scored in section 0."""
    calls = drawn()
    assert lists(call.token_Q for call in calls.spine) == [[0, 1, 2, 3], [7]]
    assert lists(call.context_rows_P for call in calls.spine) == [[], [0]]
    assert lists(call.spine_places for call in calls.spine) == [[0, 1, 2, 3], [0]]
    assert [call.spine_rows for call in calls.spine] == [slice(0, 4), slice(4, 5)]
    assert lists(call.subtree_end for call in calls.spine) == [[4, 4, 4, 4], [2, 2]]
    assert lists(call.scored_K for call in calls.spine) == [[1, 7, 2, 3, 4], [8]]
    assert lists(call.scorer_K for call in calls.spine) == [[0, 0, 1, 2, 3], [0]]
    assert [call.leaf_groups for call in calls.spine] == [(), ()]


def test_what_no_later_row_reads_is_not_scored_early():
    """Only 2, 6 and 9 are wanted: 2 by the rows of 3, 4 and 5 too, which are complete at it; 9 in its own section."""
    calls = drawn(wanted=[2, 6, 9])
    assert lists(call.scored_K for call in calls.sections) == [[2], [6], [9]]
    assert groups(calls) == [[[0, 1, 2]], [[3]], [[4, 5]]]
    assert lists(call.scored_K for call in calls.spine) == [[2], []]


def test_a_section_without_a_scored_token_still_runs():
    calls = drawn(wanted=[1, 3, 11])
    assert lists(call.scored_K for call in calls.sections) == [[1, 3], [], []]
    # The row of 7..10 has no wanted token, nor has 11 a scorer: both are complete where they end.
    assert groups(calls) == [[[0, 1, 2, 3]], [], [[4, 5]]]
    assert lists(call.scored_K for call in calls.spine) == [[], []]


def test_a_value_is_scored_by_its_own_token():
    calls = drawn(scorer_T=EVERY_T)
    assert lists(call.scored_K for call in calls.sections) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert lists(call.scorer_K for call in calls.sections) == [[0, 1, 2, 3]] * 3
    assert groups(calls) == [[[0]], [[1, 2, 3]], [[4, 5]]]
    assert lists(call.scored_K for call in calls.spine) == [[0, 1, 2, 3], [7]]


def test_groups_hold_the_loss_terms_that_are_allowed():
    """The leaves have 3, 4, 5, 5, 4 and 0 loss terms; one alone may exceed the limit."""
    assert groups(drawn(max_loss_terms=7)) == [[[0, 1]], [[2], [3]], [[4, 5]]]
    assert groups(drawn(max_loss_terms=6)) == [[[0], [1]], [[2], [3]], [[4, 5]]]
    assert groups(drawn(max_loss_terms=10)) == [[[0, 1]], [[2, 3]], [[4, 5]]]
    assert groups(drawn(max_loss_terms=1)) == [[[0], [1]], [[2], [3]], [[4], [5]]]


def test_a_whole_preorder_is_one_call():
    layout = layout_of(DEEP)
    whole = Cut.whole(layout.subtree_end_T.numpy())
    (call,) = plan(layout, whole, capacity=3).sections
    assert call.token_Q.tolist() == list(range(layout.num_tokens))
    assert call.subtree_end.tolist() == layout.subtree_end_T.tolist()
    assert (call.num_context, len(call.spine_places), call.spine_rows) == (0, 0, slice(0, 0))
    assert lists(call.leaf_groups) == [list(range(len(DEEP)))]
    assert plan(layout, whole, capacity=3).spine == ()


def test_the_calls_of_each_mode_are_counted():
    assert NumCalls.of("forward", num_sections=5, num_spine_calls=2) == (5, 0)
    assert NumCalls.of("rows", num_sections=5, num_spine_calls=2) == (2, 5)
    assert NumCalls.of("joint", num_sections=5, num_spine_calls=2) == (5, 5)
    # A pack: with one section, all rows are complete at once.
    assert NumCalls.of("forward", num_sections=1, num_spine_calls=0) == (1, 0)
    assert NumCalls.of("rows", num_sections=1, num_spine_calls=0) == (0, 1)
    assert NumCalls.of("joint", num_sections=1, num_spine_calls=0) == (0, 1)


def plan(layout, sections, *, capacity, is_critic=False, wanted_T=None, max_loss_terms=None):
    every_T = np.arange(layout.num_tokens)
    return RelayCalls.of_cut(
        sections,
        spine_cut=sections.spine_cut(capacity),
        scorer_T=every_T if is_critic else layout.parent_T.numpy(),
        wanted_T=every_T >= 0 if wanted_T is None else wanted_T,
        tree_index_F=layout.tree_index_F.numpy(),
        leaf_offsets=layout.leaf_offsets,
        max_loss_terms=max_loss_terms,
    )


class Followed:
    """The calls of a forest, followed with sets: what is in the store, which scores are made, which rows are read."""

    def __init__(self, layout, calls, *, scorer, wanted):
        self.calls, self.scorer = calls, scorer
        self.path = {token: set(np.flatnonzero(row).tolist()) for token, row in enumerate(layout.materialize())}
        paths = np.split(layout.tree_index_F.numpy(), layout.leaf_offsets[1:-1])
        self.reads = [{token for token in path.tolist() if token in wanted and scorer[token] >= 0} for path in paths]
        self.token_of_row = {}

    def run(self, call):
        """Check that all that the call sees is in the store, and return what it scores."""
        context = {self.token_of_row[row] for row in call.context_rows_P.tolist()}
        own = set(call.token_Q.tolist())
        assert set().union(*(self.path[token] for token in own)) - own == context
        assert (self.scorer[call.scored_K] == call.token_Q[call.scorer_K]).all()
        assert (np.diff(call.scorer_K) >= 0).all()
        return call.scored_K.tolist()

    def store(self, call):
        """Put the spine tokens of a call into the store."""
        rows = range(call.spine_rows.start, call.spine_rows.stop)
        assert not self.token_of_row.keys() & set(rows)
        self.token_of_row |= zip(rows, call.token_Q[call.spine_places].tolist(), strict=True)


@pytest.mark.parametrize("is_critic", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_every_score_is_made_once_and_in_time(seed, is_critic):
    """Rows find all of their scores when their loss runs, and every section's scores have all of their gradients."""
    rng = np.random.default_rng(seed)
    layout = layout_of(random_forest(seed, num_leaves=12, mean_len=1 + seed % 4, root_probability=0.2))
    num_tokens = layout.num_tokens
    scorer = np.arange(num_tokens) if is_critic else layout.parent_T.numpy()
    for capacity in (1, 2, 3, 7, num_tokens // 2):
        wanted_T = rng.random(num_tokens) < (1.0 if is_critic else 0.6)
        sections = cut(layout.subtree_end_T.numpy(), layout.position_T.numpy(), capacity=capacity, section_cost=0.3)
        calls = plan(layout, sections, capacity=capacity, is_critic=is_critic, wanted_T=wanted_T, max_loss_terms=9)
        wanted = set(np.flatnonzero(wanted_T).tolist())
        followed = Followed(layout, calls, scorer=scorer, wanted=wanted)

        early = set()
        for call in calls.spine:
            early |= set(followed.run(call))
            followed.store(call)
        assert sorted(followed.token_of_row.items()) == list(enumerate(sections.spine.tolist()))

        made, read, leaves = [], [], []
        for call in reversed(calls.sections):
            made += followed.run(call)
            for group in call.leaf_groups:
                # Every leaf waits for a score of this section, or has none and ends here.
                assert all(
                    followed.reads[leaf] & set(call.scored_K.tolist()) or not followed.reads[leaf] for leaf in group
                )
                needed = set().union(*(followed.reads[leaf] for leaf in group.tolist()))
                assert needed <= early | set(made)
                read += [token for token in needed if token not in made]
                assert sum(len(followed.reads[leaf]) for leaf in group) <= 9 or len(group) == 1
                leaves += group.tolist()
            # Backward from here: no later group reads what this section has scored.
            rest = set(range(layout.num_leaves)) - set(leaves)
            assert not any(followed.reads[leaf] & set(call.scored_K.tolist()) for leaf in rest)
        assert sorted(made) == sorted(token for token in wanted if scorer[token] >= 0)
        assert sorted(leaves) == list(range(layout.num_leaves))
        assert early == set(read), "what is scored early is read early"


@pytest.mark.parametrize("seed", range(6))
def test_without_gradient_sections_run_in_order(seed):
    """Each section finds its context in the store, where the sections before it have put it."""
    layout = layout_of(random_forest(seed, num_leaves=12, mean_len=3))
    for capacity in (1, 3, 8):
        sections = cut(layout.subtree_end_T.numpy(), layout.position_T.numpy(), capacity=capacity, section_cost=0.3)
        calls = plan(layout, sections, capacity=capacity)
        followed = Followed(layout, calls, scorer=layout.parent_T.numpy(), wanted=set(range(layout.num_tokens)))
        for call in calls.sections:
            followed.run(call)
            followed.store(call)
        assert sorted(followed.token_of_row.items()) == list(enumerate(sections.spine.tolist()))
