"""Which state each environment of a session has at the places of a branch.

    tokens        turn ── result ── turn ── result            the tools that a turn calls act behind it
    states      s0 │         s1       │        s2
                   └ first act        └ second act

A state is snapshotted where a branch goes on from it that another one holds, too. So a session without forks has no
snapshots.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from rollout_hooks.environments import Environment

logger = logging.getLogger(__name__)

OpenEnvironment = Callable[[], Awaitable[Environment]]


@dataclass(eq=False, slots=True)
class _State:
    """What an environment is between two acts."""

    environment: Environment | None = None  # One that had this state; None before it is opened
    is_current: bool = True  # Whether it has it still
    snapshot: str | None = None


class SessionEnvironments:
    """The environments of a session, opened when they are first needed.

    Args:
        openers: What opens each, by name.
        max_snapshots: Most snapshots of a session; None means no limit.
    """

    def __init__(self, openers: Mapping[str, OpenEnvironment], *, max_snapshots: int | None = None) -> None:
        self.openers = dict(openers)
        self.max_snapshots = max_snapshots
        self.first: dict[str, _State] = {}
        self.branches: list[BranchEnvironments] = []
        self.lock = asyncio.Lock()  # Branches act one after the other
        self._kept: list[tuple[Environment, str | None]] = []  # Snapshots; and environments, which have no id

    async def go_on(self, name: str, state: _State, *, is_held: bool) -> Environment:
        """Return an environment in a state, which it then leaves. A state that others hold is kept for them."""
        if state.environment is None:
            state.environment = await self.openers[name]()
            self._kept.append((state.environment, None))
        environment = state.environment
        if not state.is_current:
            assert state.snapshot is not None, "`rewind` refuses such a state"
            environment = await environment.fork(state.snapshot)
            self._kept.append((environment, None))
        elif is_held:
            num_snapshots = sum(snapshot is not None for _, snapshot in self._kept)
            if self.max_snapshots is not None and num_snapshots >= self.max_snapshots:
                raise ValueError(
                    f"max_snapshots={self.max_snapshots}: the session holds as many snapshots of its environments; "
                    "raise the option of the loop, or fork less"
                )
            state.snapshot = await environment.snapshot()
            self._kept.append((environment, state.snapshot))
        state.is_current = False
        return environment

    async def close(self) -> None:
        """Free all snapshots and environments. What cannot be freed is told in the log."""
        kept, self._kept = self._kept, []
        releases = [environment.release(*([] if name is None else [name])) for environment, name in reversed(kept)]
        for error in await asyncio.gather(*releases, return_exceptions=True):
            if isinstance(error, BaseException):
                logger.warning("an environment or a snapshot of it was not released: %r", error)


class BranchEnvironments:
    """The acts of one branch on the environments of its session, each with the state that came of it."""

    def __init__(self, session: SessionEnvironments) -> None:
        self._session = session
        self._acts: dict[str, list[tuple[int, _State]]] = {}  # (position, state behind it), ascending
        session.branches.append(self)

    def copy(self) -> "BranchEnvironments":
        """Return those of a fork."""
        fork = BranchEnvironments(self._session)
        fork._acts = {name: list(acts) for name, acts in self._acts.items()}
        return fork

    async def act(self, name: str, *, position: int) -> Environment:
        """Return an environment in the branch's state, to act on it at a position.

        Raises:
            ValueError: The session may hold no more snapshots; or what an environment itself raises.
        """
        async with self._session.lock:
            state = self._states(name)[-1]
            is_held = any(state in each._states(name) for each in self._session.branches if each is not self)
            environment = await self._session.go_on(name, state, is_held=is_held)
            self._acts.setdefault(name, []).append((position, _State(environment)))
            return environment

    def rewind(self, to: int) -> None:
        """Go back to the states of a position. What a turn called stays with the end of the turn.

        Raises:
            ValueError: A state was not kept, as no branch was forked where it was.
        """
        acts = self._acts
        self._acts = {name: [act for act in each if act[0] <= to] for name, each in acts.items()}
        for name in acts:
            state = self._states(name)[-1]
            if not state.is_current and state.snapshot is None:
                raise ValueError(
                    f"rewind({to}): what the environment was there has not been kept; fork the branch before it acts, "
                    "and go on from the fork"
                )

    def move(self, to: int) -> None:
        """Keep the states where tokens from a position on are replaced by others."""
        self._acts = {name: [(min(at, to), state) for at, state in acts] for name, acts in self._acts.items()}

    def _states(self, name: str) -> list[_State]:
        first = self._session.first.setdefault(name, _State())
        return [first, *(state for _, state in self._acts.get(name, []))]
