"""What the trainer tells an estimator about its rows.

verl hands an estimator the uid of each row: not its session, not its tokens. The trainer announces both around the
call; what verl does around an estimator (KL in the reward, rollout correction) stays verl's.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np

from verl_tree.trainer.batching import RowKey, parse_row_key


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows of one call, in verl's order, padding rows left out.

    Attributes:
        keys: (R,) row keys, `{uid}_{session}_{leaf}`.
        sequences: (R,) token ids of prompt and response; empty where the estimator reads no tokens.
        response_lens: (R,) tokens of the response, the end of each sequence; empty with `sequences`.
    """

    keys: Sequence[str]
    sequences: Sequence[np.ndarray] = ()
    response_lens: Sequence[int] = ()

    def __post_init__(self) -> None:
        assert len(self.sequences) == len(self.response_lens) and len(self.sequences) in (0, len(self.keys))

    def parsed_keys(self) -> list[RowKey]:
        """The parts of the keys."""
        return [parse_row_key(key) for key in self.keys]


_rows: ContextVar[Rows] = ContextVar("rows")


@contextmanager
def announce_rows(rows: Rows) -> Iterator[None]:
    """Announces the rows whose advantages are computed inside the context."""
    token = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(token)


def announced_rows(estimator: str, *, num_rows: int, with_tokens: bool) -> Rows:
    """The rows of the estimator that is running.

    Args:
        estimator: its name, for the error.
        num_rows: rows that verl gave to it.
        with_tokens: whether it reads `sequences`.

    Returns:
        What the trainer announced.

    Raises:
        ValueError: nothing was announced for these rows: the trainer is not ours.
    """
    rows = _rows.get(Rows(keys=()))
    num_known = len(rows.sequences) if with_tokens else len(rows.keys)
    if num_known != num_rows:
        raise ValueError(
            f"algorithm.adv_estimator={estimator} knows the {'tokens' if with_tokens else 'sessions'} of {num_known} "
            f"rows and got {num_rows}: train with python -m verl_tree.main_ppo, which announces them"
        )
    return rows
