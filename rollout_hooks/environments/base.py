"""The protocol of an environment that forks, and the part of an adapter that does not depend on what is forked."""

import asyncio
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, Protocol, Self, TypeVar
from uuid import uuid4

from typing_extensions import override

State = TypeVar("State")


class Environment(Protocol):
    """What a branch acts on. It changes; a snapshot of it does not.

    What it does after a snapshot is in none taken before, nor in what is forked from that.
    """

    async def snapshot(self) -> str:
        """Keep the state that the environment is in now, and return the snapshot's id."""
        ...

    async def fork(self, id: str, /) -> "Environment":
        """Return another environment, in the state of a snapshot; the snapshot can be forked again."""
        ...

    async def release(self, id: str | None = None, /) -> None:
        """Free a snapshot; without an id, the environment itself. Neither frees anything else."""
        ...


class AdaptedEnvironment(ABC, Generic[State]):
    """An environment whose state can be copied; a subclass says how to copy one, and how to free one.

    Both run in threads. A copy that is no longer waited for is freed when it is there.

    Raises (its three methods):
        ValueError: The snapshot, or the environment, has been released.
    """

    def __init__(self, state: State) -> None:
        self._state: State | None = state
        self._snapshots: dict[str, State] = {}  # One for the environment and all that are forked from it

    @abstractmethod
    def copy_state(self, state: State) -> State:
        """Return a copy of a state."""

    @abstractmethod
    def free_state(self, state: State) -> None:
        """Free what a state holds."""

    @property
    def state(self) -> State:
        """What is acted on.

        Raises:
            ValueError: The environment has been released.
        """
        if self._state is None:
            raise ValueError("this environment has been released: fork a snapshot of it that is kept")
        return self._state

    async def snapshot(self) -> str:
        """Keep the state that the environment is in now, and return the snapshot's id."""
        state = await self._copy(self.state)
        name = uuid4().hex
        self._snapshots[name] = state
        return name

    async def fork(self, id: str, /) -> Self:
        """Return another environment, in the state of a snapshot."""
        fork = copy.copy(self)
        fork._state = await self._copy(self._kept(id))
        return fork

    async def release(self, id: str | None = None, /) -> None:
        """Free a snapshot; without an id, the environment itself."""
        if id is None:
            state, self._state = self.state, None
        else:
            state = self._kept(id)
            del self._snapshots[id]
        await asyncio.to_thread(self.free_state, state)

    def _kept(self, name: str) -> State:
        if name not in self._snapshots:
            raise ValueError(
                f"snapshot {name}: it has been released, or is of another environment; fork before you release it"
            )
        return self._snapshots[name]

    async def _copy(self, state: State) -> State:
        copying = asyncio.ensure_future(asyncio.to_thread(self.copy_state, state))
        try:
            return await asyncio.shield(copying)
        except asyncio.CancelledError:
            # A thread cannot be stopped.
            (made,) = await asyncio.gather(copying, return_exceptions=True)
            if not isinstance(made, BaseException):
                await asyncio.to_thread(self.free_state, made)
            raise


class CopiedEnvironment(AdaptedEnvironment[State]):
    """An object as an environment: a game, a table, anything that `copy` copies.

    Args:
        state: The object.
        copy: Returns a copy that shares nothing with it that changes.
        free: Frees an object, if it holds more than memory.
    """

    def __init__(
        self,
        state: State,
        *,
        copy: Callable[[State], State] = copy.deepcopy,
        free: Callable[[State], Any] = lambda _: None,
    ) -> None:
        super().__init__(state)
        self._copy_object, self._free_object = copy, free

    @override
    def copy_state(self, state: State) -> State:
        return self._copy_object(state)

    @override
    def free_state(self, state: State) -> None:
        self._free_object(state)
