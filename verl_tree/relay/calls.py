"""The model calls that relay a cut forest: which tokens each call computes, sees and scores.

Every section is one call with a forward and a backward pass. The sections of the spine are forward passes without
gradient, whose keys and values the later calls read. A call makes the scores of the tokens whose *scorer* it computes:
a log-prob is scored by the token's parent, a value by the token itself. So a score stays in the call that has its
logits, also where the scored token is in another section.

A *cut token* has a child in another call. Recurrent layers keep the state after it for that call, as they cannot make
it of keys and values.

A row is *complete* in the section that makes its last score. Its other scores come from tokens of the context, which
the spine's calls have made before.

Legend: T tokens of the forest, Q tokens of a call, P tokens of its context, E of these with a child in the call, K
scores that it makes, F (leaf, token) pairs, S leaves.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from verl_tree.relay.cut import Cut, Section
from verl_tree.tree.nodes import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class RelayCall:
    """One call of the model."""

    token_Q: IntArray  # (Q,) int64, the tokens that it computes, in preorder
    subtree_end: IntArray  # (P + Q,) int64, the tree mask of the context followed by the tokens; see `Section`
    context_rows_P: IntArray  # (P,) int64, rows of the store that hold the context
    spine_places: IntArray  # int64, places in Q of the tokens that belong to the spine
    spine_rows: slice  # Their rows of the store
    entered_rows_E: IntArray  # (E,) int64, rows of the states that its tokens enter with
    cut_places: IntArray  # int64, places in Q of the cut tokens
    cut_rows: slice  # The rows of their states
    scored_K: IntArray  # (K,) int64, the tokens that it scores, ordered by their scorers
    scorer_K: IntArray  # (K,) int64, the places in Q of their scorers
    # Leaves of the layout that are complete here, in groups whose losses are computed one by one. None in the spine.
    leaf_groups: tuple[IntArray, ...]

    @staticmethod
    def of_pack(subtree_end_T: IntArray, *, scorer_T: IntArray) -> "RelayCall":
        """Return the one call of a pack without rows, which scores every token that has a scorer."""
        return _call(
            Cut.whole(subtree_end_T).sections[0],
            token_Q=np.arange(len(scorer_T)),
            context_P=np.empty(0, dtype=np.int64),
            row_of_T=np.full(len(scorer_T), -1),
            cut_row_of_T=np.full(len(scorer_T), -1),
            scored=np.flatnonzero(scorer_T >= 0),
            scorer_T=scorer_T,
            leaf_groups=(),
        )

    @staticmethod
    def of_path(token_Q: IntArray, *, scored: IntArray, shift: int) -> "RelayCall":
        """Return the call of one path alone; `scored` are places in it, each scored `shift` places from it."""
        scorer_Q = np.full(len(token_Q), -1)
        scorer_Q[scored] = scored + shift
        call = RelayCall.of_pack(np.full(len(token_Q), len(token_Q)), scorer_T=scorer_Q)
        return replace(call, token_Q=token_Q, scored_K=token_Q[call.scored_K])

    @property
    def num_context(self) -> int:
        """Tokens of the context, P."""
        return len(self.context_rows_P)


@dataclass(frozen=True, slots=True, eq=False)
class RelayCalls:
    """All calls of one forest. A forest of one section has no spine and is an ordinary pack."""

    sections: tuple[RelayCall, ...]
    spine: tuple[RelayCall, ...]
    num_tokens: int  # T
    num_spine_tokens: int
    num_cut_tokens: int

    @classmethod
    def of_cut(
        cls,
        cut: Cut,
        *,
        spine_cut: Cut,
        scorer_T: IntArray,
        wanted_T: np.ndarray,
        tree_index_F: IntArray,
        leaf_offsets: IntArray,
        max_loss_terms: int | None = None,
    ) -> Self:
        """Plan the calls.

        Args:
            cut: The forest's cut.
            spine_cut: That of its spine, `cut.spine_cut(capacity)`.
            scorer_T: (T,) int64, the token whose output scores each token; -1 where none does.
            wanted_T: (T,) bool, the tokens whose scores are read.
            tree_index_F: (F,) int64, the token of every (leaf, position), leaf after leaf, as in `TreeLayout`.
            leaf_offsets: (S + 1,) int64, where each leaf starts in F.
            max_loss_terms: The most scored (leaf, token) pairs of a group of leaves. None: no limit.
        """
        spine, num_tokens = cut.spine, len(scorer_T)
        scored = np.flatnonzero(wanted_T & (scorer_T >= 0))
        is_scored_T = np.zeros(num_tokens, dtype=bool)
        is_scored_T[scored] = True
        terms_S = np.add.reduceat(is_scored_T[tree_index_F], leaf_offsets[:-1], dtype=np.int64)
        complete_S = _complete_in(cut, scorer_T, scored, tree_index_F=tree_index_F, leaf_offsets=leaf_offsets)
        row_of_T = _rows_of(spine, num_tokens=num_tokens)
        cut_tokens = _cut_tokens(cut, spine_cut)
        cut_row_of_T = _rows_of(cut_tokens, num_tokens=num_tokens)
        early = _read_before_their_section(cut, scorer_T, is_scored_T, complete_S, tree_index_F, leaf_offsets)
        return cls(
            sections=tuple(
                _call(
                    section,
                    token_Q=np.arange(section.start, section.end),
                    context_P=section.context,
                    row_of_T=row_of_T,
                    cut_row_of_T=cut_row_of_T,
                    scored=scored,
                    scorer_T=scorer_T,
                    leaf_groups=_groups(np.flatnonzero(complete_S == number), terms_S, max_terms=max_loss_terms),
                )
                for number, section in enumerate(cut.sections)
            ),
            spine=tuple(
                _call(
                    section,
                    token_Q=spine[section.start : section.end],
                    context_P=spine[section.context],
                    row_of_T=row_of_T,
                    cut_row_of_T=cut_row_of_T,
                    scored=early,
                    scorer_T=scorer_T,
                    leaf_groups=(),
                )
                for section in spine_cut.sections
            ),
            num_tokens=num_tokens,
            num_spine_tokens=len(spine),
            num_cut_tokens=len(cut_tokens),
        )


def _rows_of(tokens: IntArray, *, num_tokens: int) -> IntArray:
    """Return the place of each token among `tokens`, (T,) int64, -1 for the others."""
    row_of_T = np.full(num_tokens, -1)
    row_of_T[tokens] = np.arange(len(tokens))
    return row_of_T


def _cut_tokens(cut: Cut, spine_cut: Cut) -> IntArray:
    """Return the tokens that have a child in another section of the forest or of its spine, ascending."""
    of_sections = [section.context[section.entered] for section in cut.sections]
    of_spine = [cut.spine[section.context[section.entered]] for section in spine_cut.sections]
    return np.unique(np.concatenate([*of_sections, *of_spine]))


def _call(
    section: Section,
    *,
    token_Q: IntArray,
    context_P: IntArray,
    row_of_T: IntArray,
    cut_row_of_T: IntArray,
    scored: IntArray,
    scorer_T: IntArray,
    leaf_groups: tuple[IntArray, ...],
) -> RelayCall:
    """Plan one call. `scored` are the tokens that calls of this kind score. `context_P` counts in the forest's."""
    place_of_T = np.full(len(row_of_T), -1)
    place_of_T[token_Q] = np.arange(len(token_Q))
    scored = scored[place_of_T[scorer_T[scored]] >= 0]
    scored = scored[np.argsort(scorer_T[scored], kind="stable")]  # the children of one token stay in preorder
    spine_places, spine_rows = _own_rows(row_of_T[token_Q])
    cut_places, cut_rows = _own_rows(cut_row_of_T[token_Q])
    return RelayCall(
        token_Q=token_Q,
        subtree_end=section.subtree_end,
        context_rows_P=row_of_T[context_P],
        spine_places=spine_places,
        spine_rows=spine_rows,
        entered_rows_E=cut_row_of_T[context_P[section.entered]],
        cut_places=cut_places,
        cut_rows=cut_rows,
        scored_K=scored,
        scorer_K=place_of_T[scorer_T[scored]],
        leaf_groups=leaf_groups,
    )


def _own_rows(row_of_Q: IntArray) -> tuple[IntArray, slice]:
    """Return the places of a call's tokens that have rows, and these rows.

    They are neighbours: what lies between two tokens of a section lies in the section.
    """
    places = np.flatnonzero(row_of_Q >= 0)
    first = int(row_of_Q[places[0]]) if len(places) else 0
    return places, slice(first, first + len(places))


def _groups(leaves: IntArray, terms_S: IntArray, *, max_terms: int | None) -> tuple[IntArray, ...]:
    """Part leaves into groups of at most `max_terms` loss terms, or of one leaf."""
    if len(leaves) == 0 or max_terms is None:
        return (leaves,) if len(leaves) else ()
    starts, num_terms = [0], 0
    for place, terms in enumerate(terms_S[leaves].tolist()):
        if num_terms and num_terms + terms > max_terms:
            starts.append(place)
            num_terms = 0
        num_terms += terms
    return tuple(np.split(leaves, starts[1:]))


def _complete_in(
    cut: Cut, scorer_T: IntArray, scored: IntArray, *, tree_index_F: IntArray, leaf_offsets: IntArray
) -> IntArray:
    """Return the section in which each leaf is complete, (S,) int64."""
    section_of_score_T = np.full(len(scorer_T), -1)
    section_of_score_T[scored] = cut.section_T[scorer_T[scored]]
    # Sections follow each other along a path, so the last one is the largest. A row of which nothing is scored is
    # complete where it ends.
    last_S = np.maximum.reduceat(section_of_score_T[tree_index_F], leaf_offsets[:-1])
    end_S = cut.section_T[tree_index_F[leaf_offsets[1:] - 1]]
    return np.where(last_S >= 0, last_S, end_S)


def _read_before_their_section(
    cut: Cut,
    scorer_T: IntArray,
    is_scored_T: np.ndarray,
    complete_S: IntArray,
    tree_index_F: IntArray,
    leaf_offsets: IntArray,
) -> IntArray:
    """Return the scored tokens that a row reads which is complete in a later section than that of the score."""
    # Sections run last to first, so the section of such a score has not run when the row is complete.
    read_F = is_scored_T[tree_index_F]
    token = tree_index_F[read_F]
    complete = np.repeat(complete_S, np.diff(leaf_offsets))[read_F]
    return np.unique(token[cut.section_T[scorer_T[token]] != complete])
