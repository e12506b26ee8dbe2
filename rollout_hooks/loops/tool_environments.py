"""Tools of verl with a state of their own, whose instances are environments.

verl makes an instance of a tool for every call, and releases it behind the call. Of a tool with `snapshot` and `fork`,
each branch that calls it has an instance until the session ends.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse


@runtime_checkable
class ForkingTool(Protocol):
    """A `BaseTool` of verl whose instances fork; `release` frees an instance or a snapshot."""

    create: Callable[..., Awaitable[tuple[str, Any]]]
    execute: Callable[..., Awaitable[Any]]
    release: Callable[[str], Awaitable[None]]

    async def snapshot(self, instance_id: str) -> str:
        """Keep the state that an instance is in now, and return the snapshot's id."""
        ...

    async def fork(self, snapshot: str) -> str:
        """Return the id of another instance, in the state of a snapshot."""
        ...


@runtime_checkable
class _SaysWhetherItKeepsState(Protocol):
    keeps_state: bool


def needs_fork(tool: object) -> bool:
    """Return whether branches would share a state of a tool: it makes or releases instances, and does not fork them.

    `keeps_state = False` in its class says that nothing of a call is there in the next one.
    """
    if not isinstance(tool, BaseTool) or isinstance(tool, ForkingTool):
        return False
    if isinstance(tool, _SaysWhetherItKeepsState):
        return tool.keeps_state
    return type(tool).create is not BaseTool.create or type(tool).release is not BaseTool.release


@dataclass(frozen=True, slots=True)
class ToolInstance:
    """An instance of a tool, as the environment that it is."""

    tool: ForkingTool
    instance_id: str

    @classmethod
    async def open(cls, tool: ForkingTool, create_kwargs: Mapping[str, Any]) -> "ToolInstance":
        """Make an instance as verl does."""
        instance_id, _ = await tool.create(create_kwargs=create_kwargs)
        return cls(tool, instance_id)

    async def snapshot(self) -> str:
        """Keep the state of the instance."""
        return await self.tool.snapshot(self.instance_id)

    async def fork(self, id: str, /) -> "ToolInstance":
        """Return another instance, in the state of a snapshot."""
        return ToolInstance(self.tool, await self.tool.fork(id))

    async def release(self, id: str | None = None, /) -> None:
        """Free a snapshot; without an id, the instance."""
        await self.tool.release(self.instance_id if id is None else id)


@dataclass(frozen=True, slots=True)
class ToolOfBranch:
    """What verl calls in place of a forking tool: the instance of a branch."""

    tool: ForkingTool
    environment: Callable[[], Awaitable[Any]]

    async def create(self, **_: Any) -> tuple[str, ToolResponse]:
        """Return no id, so that verl releases nothing behind the call."""
        return "", ToolResponse()

    async def execute(self, _: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Run a call on the instance."""
        return await self.tool.execute((await self.environment()).instance_id, parameters, **kwargs)
