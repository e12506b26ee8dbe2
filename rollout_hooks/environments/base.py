"""The protocol of an environment that forks, and an environment of anything that can be copied."""

import asyncio
import copy
from collections.abc import Callable
from typing import Any, Generic, Protocol, Self, TypeVar
from uuid import uuid4

State = TypeVar("State")


class Environment(Protocol):
    """What a branch acts on. What it does after a snapshot is in none taken before, nor in what is forked from that."""

    async def snapshot(self) -> str:
        """Keep the state that the environment is in now, and return the snapshot's id."""
        ...

    async def fork(self, id: str, /) -> "Environment":
        """Return another environment, in the state of a snapshot."""
        ...

    async def release(self, id: str | None = None, /) -> None:
        """Free a snapshot; without an id, the environment itself. Neither frees anything else."""
        ...


class CopiedEnvironment(Generic[State]):
    """An object as an environment, `state`: a game, a table, anything that can be copied.

    Args:
        state: The object.
        copy: Returns a copy that shares nothing with it that changes. It runs in a thread.
        free: Frees an object, if it holds more than memory. In a thread, too.

    Raises (its methods):
        ValueError: The snapshot has been released.
    """

    def __init__(
        self,
        state: State,
        *,
        copy: Callable[[State], State] = copy.deepcopy,
        free: Callable[[State], Any] = lambda _: None,
    ) -> None:
        self.state = state
        self._copy_state, self._free_state = copy, free
        self._snapshots: dict[str, State] = {}  # of the environment and all that are forked from it

    async def snapshot(self) -> str:
        """Keep the state that the environment is in now, and return the snapshot's id."""
        name, state = uuid4().hex, await self._copy(self.state)
        self._snapshots[name] = state
        return name

    async def fork(self, id: str, /) -> Self:
        """Return another environment, in the state of a snapshot."""
        fork = copy.copy(self)
        fork.state = await self._copy(self._kept(id))
        return fork

    async def release(self, id: str | None = None, /) -> None:
        """Free a snapshot; without an id, the environment itself."""
        state = self.state if id is None else self._kept(id)
        if id is not None:
            del self._snapshots[id]
        await asyncio.to_thread(self._free_state, state)

    def _kept(self, name: str) -> State:
        if name not in self._snapshots:
            raise ValueError(f"snapshot {name}: released, or of another environment; fork before you release it")
        return self._snapshots[name]

    async def _copy(self, state: State) -> State:
        copying = asyncio.ensure_future(asyncio.to_thread(self._copy_state, state))
        try:
            return await asyncio.shield(copying)
        except asyncio.CancelledError:
            # A thread cannot be stopped, and nobody would free what it makes.
            (made,) = await asyncio.gather(copying, return_exceptions=True)
            if not isinstance(made, BaseException):
                await asyncio.to_thread(self._free_state, made)
            raise
