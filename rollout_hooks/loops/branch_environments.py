"""Which state each environment of a session has at the places of a branch.

    tokens        turn ── result ── turn ── result            the tools that a turn calls act behind it
    states      s0 │         s1       │        s2
                   └ first act        └ second act

A state is snapshotted only where another branch holds it, at the moment in which one goes on from it: what is forked
costs a snapshot, and a session without forks costs none.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from rollout_hooks.environments import Environment

logger = logging.getLogger(__name__)

OpenEnvironment = Callable[[], Awaitable[Environment]]


@dataclass(eq=False, slots=True)
class _State:
    """What an environment is between two acts."""

    environment: Environment | None = None  # One that had this state; None before it is opened
    is_current: bool = True  # Whether it has it still
    snapshot: str | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class SessionEnvironments:
    """The environments of a session, by name. They are opened when they are first needed.

    Args:
        openers: What opens each.
        max_snapshots: Most snapshots of a session; None means no limit.
    """

    def __init__(self, openers: Mapping[str, OpenEnvironment], *, max_snapshots: int | None = None) -> None:
        self.openers = dict(openers)
        self.max_snapshots = max_snapshots
        self._first: dict[str, _State] = {}
        self._branches: list[BranchEnvironments] = []
        self._environments: list[Environment] = []
        self._snapshots: list[tuple[Environment, str]] = []

    def new_branch(self) -> "BranchEnvironments":
        """Return the states of a branch that has not acted."""
        branch = BranchEnvironments(self)
        self._branches.append(branch)
        return branch

    async def close(self) -> None:
        """Free all snapshots and environments. What cannot be freed is told in the log."""
        releases = [environment.release(name) for environment, name in self._snapshots]
        releases += [environment.release() for environment in self._environments]
        self._snapshots, self._environments = [], []
        for error in await asyncio.gather(*releases, return_exceptions=True):
            if isinstance(error, BaseException):
                logger.warning("an environment or a snapshot of it was not released: %r", error)

    def _first_of(self, name: str) -> _State:
        return self._first.setdefault(name, _State())

    def _is_held(self, name: str, state: _State, *, beside: "BranchEnvironments") -> bool:
        return any(each is not beside and state in each.states(name) for each in self._branches)

    async def _open(self, name: str) -> Environment:
        environment = await self.openers[name]()
        self._environments.append(environment)
        return environment

    async def _snapshot(self, environment: Environment) -> str:
        if self.max_snapshots is not None and len(self._snapshots) >= self.max_snapshots:
            raise ValueError(
                f"max_snapshots={self.max_snapshots}: the session holds as many snapshots of its environments; raise "
                "the option of the loop, or fork less"
            )
        snapshot = await environment.snapshot()
        self._snapshots.append((environment, snapshot))
        return snapshot

    async def _fork(self, environment: Environment, snapshot: str) -> Environment:
        fork = await environment.fork(snapshot)
        self._environments.append(fork)
        return fork


class BranchEnvironments:
    """The acts of one branch on the environments of its session, each with the state that came of it."""

    def __init__(self, session: SessionEnvironments) -> None:
        self._session = session
        self._acts: dict[str, list[tuple[int, _State]]] = {}  # (position, state behind it), ascending
        self._lock = asyncio.Lock()

    def copy(self) -> "BranchEnvironments":
        """Return those of a fork."""
        fork = self._session.new_branch()
        fork._acts = {name: list(acts) for name, acts in self._acts.items()}
        return fork

    def states(self, name: str) -> list[_State]:
        """Return the states of an environment that the branch can go back to, the present one last."""
        return [self._session._first_of(name), *(state for _, state in self._acts.get(name, []))]

    async def act(self, name: str, *, position: int) -> Environment:
        """Return an environment in the branch's state, to act on it at a position; no other branch sees what it does.

        Raises:
            ValueError: The session may hold no more snapshots; or what an environment itself raises.
        """
        session = self._session
        async with self._lock:
            state = self.states(name)[-1]
            async with state.lock:
                if state.environment is None:
                    state.environment = await session._open(name)
                environment = state.environment
                if not state.is_current:
                    assert state.snapshot is not None, "`rewind` refuses such a state"
                    environment = await session._fork(environment, state.snapshot)
                else:
                    if session._is_held(name, state, beside=self):
                        state.snapshot = await session._snapshot(environment)
                    state.is_current = False
            self._acts.setdefault(name, []).append((position, _State(environment)))
            return environment

    def rewind(self, to: int) -> None:
        """Go back to the states of a position. What a turn called stays with the end of the turn.

        Raises:
            ValueError: A state was not kept, as no branch was forked where it was.
        """
        kept = {name: [act for act in acts if act[0] <= to] for name, acts in self._acts.items()}
        for name, acts in kept.items():
            state = acts[-1][1] if acts else self._session._first_of(name)
            if not state.is_current and state.snapshot is None:
                raise ValueError(
                    f"rewind({to}): what the environment was there has not been kept; fork the branch before it acts, "
                    "and go on from the fork"
                )
        self._acts = kept

    def move(self, to: int) -> None:
        """Keep the states where tokens from a position on are replaced by others."""
        self._acts = {name: [(min(at, to), state) for at, state in acts] for name, acts in self._acts.items()}

    def restart(self) -> None:
        """Go on with the present states behind other tokens."""
        self._acts = {name: [(0, acts[-1][1])] for name, acts in self._acts.items() if acts}
