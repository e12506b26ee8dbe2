"""`tree_counterfactual`: what turns brought into the context of an answer, by hand."""

import numpy as np
import pytest

pytest.importorskip("verl")

from verl_tree.trainer.advantages import (
    SHORTEST_QUOTE,
    Owed,
    Turn,
    contexts_of,
    counterfactual_advantages,
    find_answers,
    leaf_advantages,
)


def rows_of(*rows: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return tokens, one for each letter, and which of them were sampled: the capital ones."""
    tokens = [np.array([ord(letter) for letter in row.lower()]) for row in rows]
    return tokens, [np.array([letter.isupper() for letter in row]) for row in rows]


def brought(*rows: str, sessions: list[int] | None = None) -> list[tuple[Turn, str]]:
    """Return the turns of one session, and the context of its answer without each."""
    tokens, is_trained = rows_of(*rows)
    (answer,) = find_answers(tokens, is_trained, sessions=sessions or [0] * len(rows))
    _, *without = contexts_of(answer, tokens[answer.row])
    return [(turn, "".join(map(chr, context))) for turn, context in zip(answer.turns, without, strict=True)]


def test_a_turn_of_the_path_brought_itself_and_its_results() -> None:
    assert brought("pqABrsCtDE") == [
        (Turn(0, 2, 4, ((2, 6),)), "pqct"),
        (Turn(0, 6, 7, ((6, 8),)), "pqabrs"),
    ]


def test_a_turn_elsewhere_brought_what_is_quoted_everywhere_and_longest() -> None:
    note, answer = "pSTUVWXYZe", "pnstuvwxyzmvwxyostuvkstuABC"
    turn = Turn(0, 1, 9, ((2, 10), (11, 15), (16, 20)))  # and not the last, of three tokens
    assert brought(note, answer) == [(turn, "pnmokstu")]


@pytest.mark.parametrize(
    ("note", "answer"),
    [
        ("pWXe", "pnwxmABC"),  # two tokens are too few
        ("wxyzWXYZe", "wxyzmABC"),  # both begin with them, before the note was written
        ("pWXYZe", "pnzyxwABC"),
        ("pWXYZe", "pABCwxyz"),  # what the answer says is no context
    ],
)
def test_what_is_no_quotation(note: str, answer: str) -> None:
    assert brought(note, answer) == []
    assert SHORTEST_QUOTE == 3


def test_a_turn_on_the_way_to_the_answer_is_credited_on_its_row_alone() -> None:
    assert brought("pABrCDEF", "pABrsG") == [(Turn(1, 1, 3, ((1, 5),)), "p")]


def test_sessions_answer_on_their_last_sampled_row() -> None:
    tokens, is_trained = rows_of("pAB", "pCD", "pqr", "pE", "pxy")
    answers = find_answers(tokens, is_trained, sessions=[0, 0, 0, 1, 2])
    assert [(answer.row, answer.start, answer.end) for answer in answers] == [(1, 1, 3), (3, 1, 2)]


def test_advantages_have_bounds_and_turns_in_a_prompt_none() -> None:
    tree = {"groups": ["u"] * 3, "sessions": [0, 1, 2], "normalize_by_std": False}
    rewards = [1.0, 0.0, 0.0]
    lone = leaf_advantages(rewards, **tree)
    owed = [Owed(0, 1, 3, 50.0), Owed(1, 2, 3, 50.0), Owed(2, 3, 5, -50.0)]
    got = counterfactual_advantages(
        rewards, owed=owed, row_lens=[5] * 3, response_lens=[3] * 3, width=4, weight=0.5, **tree
    )
    expected = np.repeat(lone[:, None], 4, axis=1)
    expected[0, 0] *= 3 / 2  # of token 2; token 1 is in the prompt
    expected[1, 0] *= 1 / 2  # blamed less
    expected[2, 1:3] *= 3 / 2  # blamed more
    np.testing.assert_allclose(got, expected, rtol=1e-12)
