"""One advantage per step: `gigpo`, which adds to `tree_grpo` a comparison of steps that start from the same state.

A step is a call: tokens that the model sampled at once, after what it had read. Its state is what it was sampled from:
all tokens before it, or a key that the loop gives. Steps of a prompt's sessions that start from the same state are a
group, as in GiGPO (arXiv 2505.10978, equations 6 to 8)::

    session 0:  P a ─┬─ b    r = 1        state P:    a, a
                     └─ c    r = 0        state P a:  b, c, d
    session 1:  P a ─── d    r = 1

    A(step on a leaf) = A_tree_grpo(leaf) + w * GRPO of the steps of its state; 0 for a step that is alone in its state

The value of a step is the discounted sum of the rewards from it on. If several leaves of a session go on from a step,
it counts once, with the mean over these leaves, and has one step advantage on all of them.

Legend: R rows (leaves), W width of a response, V steps as rows have them, S steps.
"""

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from verl_tree.trainer.advantages.leaves import EPSILON, dense_ids, leaf_advantages
from verl_tree.tree.shape import ForestShape


class Call(NamedTuple):
    """One call on a trajectory: it sampled the tokens start..end-1 of prompt and response."""

    start: int
    end: int
    state: str | None = None  # The loop's key of the state. None: the tokens before `start`


class _Visit(NamedTuple):
    """A step on one row; `start` and `end` count from the first token of the response."""

    row: int
    start: int
    end: int
    state: Hashable
    step: Hashable
    value: float


def gigpo_advantages(
    token_rewards: ArrayLike,
    *,
    shape: ForestShape,
    response_lens: Sequence[int],
    calls: Sequence[Sequence[Call]],
    groups: Sequence[Hashable],
    sessions: Sequence[Hashable],
    gamma: float = 1.0,
    step_weight: float = 1.0,
    normalize_by_std: bool = True,
    epsilon: float = EPSILON,
) -> np.ndarray:
    """Add to `leaf_advantages` a comparison with the steps that start from the same state (GiGPO).

    `token_rewards` is (R, W), by token of the response. `shape` is that of a forest of the rows, prompt and response;
    those of different groups share nothing in it. `calls` has the calls of each row in order; those whose tokens all
    lie in the prompt are left out. `gamma` discounts from step to step. `normalize_by_std` holds for both parts. The
    result is (R, W) float64; a step advantage is on the tokens from its step to the next.
    """
    token_rewards_RW = np.asarray(token_rewards, dtype=np.float64)
    leaf_R = leaf_advantages(
        token_rewards_RW.sum(axis=1),
        groups=groups,
        sessions=sessions,
        normalize_by_std=normalize_by_std,
        epsilon=epsilon,
    )
    result_RW = np.repeat(leaf_R[:, None], token_rewards_RW.shape[1], axis=1)
    places = _places(shape)
    visits = [
        visit
        for row in range(len(places))
        for visit in _visits(
            row,
            token_rewards_RW[row],
            row_len=int(shape.sequence_lens[row]),
            places=places[row],
            response_len=response_lens[row],
            calls=calls[row],
            group=groups[row],
            session=sessions[row],
            gamma=gamma,
        )
    ]
    step_V = _step_advantages(visits, normalize_by_std=normalize_by_std, epsilon=epsilon)
    for visit, advantage in zip(visits, step_V.tolist(), strict=True):
        result_RW[visit.row, visit.start : visit.end] += step_weight * advantage
    return result_RW


def _visits(
    row: int,
    token_rewards_W: np.ndarray,
    *,
    row_len: int,
    places: "_Places",
    response_len: int,
    calls: Sequence[Call],
    group: Hashable,
    session: Hashable,
    gamma: float,
) -> Iterator[_Visit]:
    """Yield the steps of a row, the last first."""
    prompt_len = row_len - response_len
    inside = [call for call in calls if call.end > prompt_len]
    end, value = response_len, 0.0
    for call in reversed(inside):
        start = max(call.start - prompt_len, 0)
        value = float(token_rewards_W[start:end].sum()) + gamma * value
        state = (group, places.after(call.start) if call.state is None else call.state)
        yield _Visit(row, start, end, state, (group, session, call.start, places.after(call.end)), value)
        end = start


class _Places(NamedTuple):
    """Where a row runs through the forest: from position starts[i] on with the first row that has these tokens."""

    starts: tuple[int, ...]
    rows: tuple[int, ...]

    def after(self, position: int) -> tuple[int, int]:
        """Return the place behind the row's first `position` tokens, which all rows that begin with them share."""
        index = bisect_left(self.starts, position) - 1
        return (-1 if index < 0 else self.rows[index], position)


def _places(shape: ForestShape) -> list[_Places]:
    """Return the places of each row, (R,)."""
    places: list[_Places] = [_Places((), ())] * shape.num_leaves
    starts: list[int] = []
    rows: list[int] = []
    for row, num_shared in zip(shape.order.tolist(), shape.lcp.tolist(), strict=True):
        # The row goes on with the row before it up to what they share, and from there alone.
        num_kept = bisect_left(starts, num_shared)
        starts, rows = [*starts[:num_kept], num_shared], [*rows[:num_kept], row]
        places[row] = _Places(tuple(starts), tuple(rows))
    return places


def _step_advantages(visits: Sequence[_Visit], *, normalize_by_std: bool, epsilon: float) -> np.ndarray:
    """Return the step advantage of each visit, (V,): GRPO over the steps of its state."""
    if not visits:
        return np.zeros(0)
    step_V = dense_ids([visit.step for visit in visits])
    first_S = np.unique(step_V, return_index=True)[1]
    value_V = np.array([visit.value for visit in visits])
    # Relative to the first visit, equal values have exactly that mean.
    value_S = value_V[first_S] + np.bincount(step_V, value_V - value_V[first_S][step_V]) / np.bincount(step_V)
    states = [visits[visit].state for visit in first_S.tolist()]
    advantage_S = leaf_advantages(
        value_S, groups=states, sessions=range(len(states)), normalize_by_std=normalize_by_std, epsilon=epsilon
    )
    state_S = dense_ids(states)
    return np.where(np.bincount(state_S)[state_S] > 1, advantage_S, 0.0)[step_V]
