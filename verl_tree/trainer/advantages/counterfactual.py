"""One advantage per turn: `tree_counterfactual`, which asks what the right answer would have been without the turn.

The sessions of a prompt are asked the same, and the best of them has the *right answer*. A turn has brought something
into the context in which its session answered: the results of its calls, or words that the context quotes, as a note, a
summary or a sub-agent's report. The turn is owed what this does for the right answer (in nats)::

    owed(turn) = log p(right answer | context) - log p(right answer | context without what the turn brought)

    A(token) = A_tree_grpo(leaf) + w |A_tree_grpo(leaf)| tanh(owed)      on a turn, else A_tree_grpo(leaf)

So a turn that helped the right answer is praised more where the session was right, and blamed less where it was wrong;
one that stood in its way, the other way round. With w <= 1 no sign changes.

Legend: R rows (leaves), W width of a response.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from rollout_hooks.capture.token_arrays import common_prefix_len
from verl_tree.trainer.advantages.leaves import EPSILON, leaf_advantages
from verl_tree.tree.rows import stretches

SHORTEST_QUOTE = 3
"""Tokens. Fewer are often equal by chance."""


class Turn(NamedTuple):
    """A turn of a session, and what it brought into the context of the answer."""

    row: int  # on which it is credited
    start: int  # its sampled tokens in that row
    end: int
    brought: tuple[tuple[int, int], ...]  # places in the row of the answer, ascending


class Answer(NamedTuple):
    """Where a session answered: on its last row, with its last sampled tokens."""

    row: int
    start: int
    end: int
    turns: tuple[Turn, ...]


class Owed(NamedTuple):
    """What a turn, the tokens start..end-1 of a row, did for the right answer, in nats."""

    row: int
    start: int
    end: int
    nats: float


def counterfactual_advantages(
    rewards: ArrayLike,
    *,
    owed: Sequence[Owed],
    row_lens: Sequence[int],
    response_lens: Sequence[int],
    width: int,
    groups: Sequence[Hashable],
    sessions: Sequence[Hashable],
    weight: float = 1.0,
    normalize_by_std: bool = True,
    epsilon: float = EPSILON,
) -> np.ndarray:
    """Add to `leaf_advantages` what turns are owed.

    `rewards` is (R,). `row_lens` and `response_lens` are the tokens of each row and of its response, the end of it.
    `weight` is w. The result is (R, W) float64, by token of the response; turns in a prompt have none.
    """
    leaf_R = leaf_advantages(
        rewards, groups=groups, sessions=sessions, normalize_by_std=normalize_by_std, epsilon=epsilon
    )
    result_RW = np.repeat(leaf_R[:, None], width, axis=1)
    for row, start, end, nats in owed:
        prompt_len = row_lens[row] - response_lens[row]
        part = slice(max(0, start - prompt_len), max(0, end - prompt_len))
        result_RW[row, part] += weight * abs(leaf_R[row]) * np.tanh(nats)
    return result_RW


def find_answers(
    tokens: Sequence[np.ndarray], is_trained: Sequence[np.ndarray], *, sessions: Sequence[Hashable]
) -> list[Answer]:
    """Find where the sessions of a prompt answered, and what their turns brought there.

    `tokens` and `is_trained` are those of R rows, each (L,), with the rows of a session in the order of its leaves. A
    turn on the row of the answer brought itself and what follows up to the next one. A turn elsewhere brought what the
    context quotes of it, behind what both rows begin with: the longest stretch that is in both, and others of half its
    length or more. Fewer than `SHORTEST_QUOTE` tokens are no quotation.
    """
    rows_of: dict[Hashable, list[int]] = defaultdict(list)
    for row, session in enumerate(sessions):
        if is_trained[row].any():
            rows_of[session].append(row)
    return [_answer_of(rows, tokens=tokens, is_trained=is_trained) for rows in rows_of.values()]


def contexts_of(answer: Answer, token_ids: np.ndarray) -> list[np.ndarray]:
    """Return the context of an answer, and the same without what each of its turns brought; of its row's tokens."""
    is_there = np.ones((1 + len(answer.turns), answer.start), dtype=bool)
    for number, turn in enumerate(answer.turns, 1):
        for start, end in turn.brought:
            is_there[number, start:end] = False
    return [token_ids[: answer.start][kept] for kept in is_there]


def _answer_of(rows: Sequence[int], *, tokens: Sequence[np.ndarray], is_trained: Sequence[np.ndarray]) -> Answer:
    *others, last = rows
    own = tokens[last]
    sampled = stretches(is_trained[last])
    answer, end = sampled[-1]
    found = [Turn(last, *turn, ((turn[0], after[0]),)) for turn, after in pairwise(sampled)]
    for row in others:
        num_shared = common_prefix_len(tokens[row], own)
        for turn in stretches(is_trained[row]):
            if turn[0] < num_shared:
                continue  # on the way to the answer, too
            quotes = list(_quotes(tokens[row][slice(*turn)], own[:answer], since=max(1, num_shared)))
            if quotes:
                # Words that are equal by chance are shorter than what was quoted.
                longest = max(stop - start for start, stop in quotes)
                found.append(Turn(row, *turn, tuple(each for each in quotes if 2 * (each[1] - each[0]) >= longest)))
    return Answer(last, answer, end, tuple(found))


def _quotes(part: np.ndarray, context: np.ndarray, *, since: int) -> Iterator[tuple[int, int]]:
    """Yield where a context quotes a part, behind its first `since` tokens: the longest stretches, from the left."""
    places = defaultdict(list)
    for place in range(len(part) - SHORTEST_QUOTE + 1):
        places[part[place : place + SHORTEST_QUOTE].tobytes()].append(place)
    start = since
    while start <= len(context) - SHORTEST_QUOTE:
        longest = 0
        for place in places.get(context[start : start + SHORTEST_QUOTE].tobytes(), ()):
            longest = max(longest, common_prefix_len(part[place:], context[start:]))
        if longest:
            yield start, start + longest
        start += max(1, longest)
