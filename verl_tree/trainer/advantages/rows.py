"""What the trainer tells an estimator about its rows.

verl gives an estimator the uid of each row, but neither its session nor its place in the tree. The trainer announces
both around verl's own call, so what verl does there (KL in the reward, rollout correction) stays verl's.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor

from verl_tree.trainer.advantages.steps import Call
from verl_tree.trainer.row_keys import parse_row_key
from verl_tree.tree.shape import ForestShape


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows of one call in verl's order, without padding rows."""

    keys: Sequence[str]  # (R,) `{uid}_{session}_{leaf}`
    shape: ForestShape  # of all rows, prompt and response; rows of different groups share nothing
    response_lens: Sequence[int]  # (R,) tokens of the response, the end of each sequence
    weigh_sessions: bool = False  # Whether every session weighs the same in the loss
    calls: Sequence[Sequence[Call]] | None = None  # (R,) the calls of each row. None: not asked for
    values: Tensor | None = None  # (R, response length) the critic's. None: not asked for

    def __post_init__(self) -> None:
        assert len(self.keys) == self.shape.num_leaves == len(self.response_lens)

    @property
    def groups(self) -> list[str]:
        """(R,) the prompt of each row."""
        return [parse_row_key(key).uid for key in self.keys]

    @property
    def sessions(self) -> list[int]:
        """(R,) the session of each row, a number within the group."""
        return [parse_row_key(key).session for key in self.keys]


_rows: ContextVar[Rows] = ContextVar("rows")


@contextmanager
def announce_rows(rows: Rows) -> Iterator[None]:
    """Announce the rows whose advantages are computed inside the context."""
    token = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(token)


def announced_rows(estimator: str, *, num_rows: int) -> Rows:
    """Return the rows of the estimator that is running.

    Raises:
        ValueError: The announced rows are not the `num_rows` that verl gave to it: the trainer is not ours.
    """
    rows = _rows.get(None)
    num_known = 0 if rows is None else len(rows.keys)
    if rows is None or num_known != num_rows:
        raise ValueError(
            f"algorithm.adv_estimator={estimator} knows sessions and trees of {num_known} rows and got {num_rows}: "
            "train with python -m verl_tree.main_ppo, which announces them"
        )
    return rows
