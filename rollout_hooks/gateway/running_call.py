"""A call to the engine, as a task of its own.

It runs to its end and is recorded even if its client has gone away. But then it is abandoned: what it samples is
trained only if the agent goes on from it.
"""

import asyncio
from collections.abc import AsyncIterator

from rollout_hooks.capture.errors import describe_error
from rollout_hooks.capture.recorded import LeftOut
from rollout_hooks.capture.session_tree import SessionTree
from rollout_hooks.gateway.engine import TokenChunk
from rollout_hooks.gateway.errors import EngineFailure
from rollout_hooks.gateway.turn import TurnRequest


class CallFate:
    """What became of the answer of a call. It is small, so a session keeps that of each of its calls.

    Attributes:
        index: The call's index in the tree, known with its first chunk.
        is_abandoned: Whether nobody reads the answer to its end.
        has_failed: Whether there is none.
    """

    def __init__(self, tree: SessionTree) -> None:
        self._tree = tree
        self.index: int | None = None
        self.is_abandoned = self.has_failed = False

    def begin(self, index: int) -> None:
        """Take the call's index in the tree."""
        self.index = index
        if self.is_abandoned:
            self.abandon()

    def abandon(self) -> None:
        """Note that nobody reads the answer to its end."""
        self.is_abandoned = True
        if self.index is not None:
            self._tree.leave_out(self.index, LeftOut.ABANDONED)


class RunningCall:
    """One call to the engine, as a task that runs to its end even if nobody listens.

    `max_tokens` is the limit of the call, None if the engine decides. `num_prompt` counts the tokens of its prompt.
    `tree` is where the engine records it, with the `role` of the leaf that it may end, and the agent's key of the
    environment's `state`, if it gave them.
    """

    def __init__(
        self,
        chunks: AsyncIterator[TokenChunk],
        request: TurnRequest,
        *,
        max_tokens: int | None,
        num_prompt: int,
        tree: SessionTree,
        role: str | None = None,
        state: str | None = None,
    ) -> None:
        self.request = request
        self.max_tokens = max_tokens
        self.num_prompt = num_prompt
        self.fate = CallFate(tree)
        self._tree, self._said = tree, {"role": role, "state": state}
        self._chunks = chunks
        self._queue: asyncio.Queue[TokenChunk | None] = asyncio.Queue()
        self.task = asyncio.create_task(self._run())
        self.task.add_done_callback(self._ended)

    async def __aiter__(self) -> AsyncIterator[TokenChunk]:
        """Yield the chunks as they come, to one listener only. Raise EngineFailure as in `GatewaySession.follow`."""
        while (chunk := await self._queue.get()) is not None:
            yield chunk
            if chunk.is_aborted:
                raise EngineFailure("the engine gave the call up", is_aborted=True)
        if self.task.cancelled():
            raise EngineFailure("the session was closed while the call ran", is_aborted=True)
        error = self.task.exception()
        if error is not None:
            raise EngineFailure(describe_error(error)) from error

    async def _run(self) -> None:
        async for chunk in self._chunks:
            if self.fate.index is None:
                self.fate.begin(chunk.call)
                self._tree.describe(chunk.call, **self._said)
            self._queue.put_nowait(chunk)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        # The tree has the cause; asyncio would warn of an exception that nobody reads.
        self.fate.has_failed = task.cancelled() or task.exception() is not None
        self._queue.put_nowait(None)
