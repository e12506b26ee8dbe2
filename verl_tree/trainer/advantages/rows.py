"""What the trainer tells an estimator about its rows.

verl gives an estimator the uid of each row, but neither its session nor its place in the tree. The trainer announces
both around verl's own call, so what verl does there (KL in the reward, rollout correction) stays verl's.

A group is what an estimator compares with each other: the rows of a prompt or, where leaves of the prompt have roles,
those of a prompt and a role. Its rows without a role are one group more.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import Tensor

from verl_tree.trainer.advantages.steps import Call
from verl_tree.trainer.row_keys import number_sessions, parse_row_key
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
    roles: Mapping[str, str] = field(default_factory=dict)  # by key; rows without a role are not in it

    def __post_init__(self) -> None:
        assert len(self.keys) == self.shape.num_leaves == len(self.response_lens)

    @property
    def groups(self) -> list[str]:
        """(R,) the group of each row: its prompt, and its role where rows have roles."""
        uids = [parse_row_key(key).uid for key in self.keys]
        if not self.roles:
            return uids
        # No role has this sign in it, so no two groups are joined.
        return [f"{uid}|{self.roles.get(key, '')}" for uid, key in zip(uids, self.keys, strict=True)]

    @property
    def sessions(self) -> list[int]:
        """(R,) the session of each row, a number within the group."""
        return [parse_row_key(key).session for key in self.keys]

    def lone(self, *, of_sessions: bool = False) -> list[int]:
        """Return the rows that have nothing to be compared with in their role: other leaves, or other sessions.

        There are none in prompts without roles, where a leaf that is alone keeps its reward.
        """
        if not self.roles:
            return []
        with_roles = {parse_row_key(key).uid for key in self.roles}
        numbers = number_sessions(self.keys) if of_sessions else range(len(self.keys))
        groups = self.groups
        found: dict[str, set[int]] = defaultdict(set)
        for group, number in zip(groups, numbers, strict=True):
            found[group].add(number)
        return [
            row
            for row, (key, group) in enumerate(zip(self.keys, groups, strict=True))
            if len(found[group]) == 1 and parse_row_key(key).uid in with_roles
        ]

    def without_lone(self, rewards: Tensor, *, of_sessions: bool = False) -> Tensor:
        """Return (R, response length) rewards in which those of the rows of `lone` are 0.

        Estimators give a row that is alone in its group its reward for an advantage. Whether a role has one leaf in a
        prompt is an accident of its sessions, so a reward that no baseline was taken from must not be trained on.
        """
        lone = self.lone(of_sessions=of_sessions)
        if not lone:
            return rewards
        rewards = rewards.clone()
        rewards[lone] = 0.0
        return rewards


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
