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


class RunningCall:
    """One call to the engine, as a task that runs to its end even if nobody listens.

    `max_tokens` is the limit of the call, None if the engine decides. `num_prompt` counts the tokens of its prompt.
    `tree` is where the engine records it.
    """

    def __init__(
        self,
        chunks: AsyncIterator[TokenChunk],
        request: TurnRequest,
        *,
        max_tokens: int | None,
        num_prompt: int,
        tree: SessionTree,
    ) -> None:
        self.request = request
        self.max_tokens = max_tokens
        self.num_prompt = num_prompt
        self.is_abandoned = False
        self._chunks = chunks
        self._tree = tree
        self._index: int | None = None  # in the tree, known with the first chunk
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

    @property
    def gave_no_answer(self) -> bool:
        """Whether the call is abandoned or has failed."""
        has_failed = self.task.done() and (self.task.cancelled() or self.task.exception() is not None)
        return self.is_abandoned or has_failed

    def abandon(self) -> None:
        """Note that nobody reads the answer to its end."""
        self.is_abandoned = True
        if self._index is not None:
            self._tree.leave_out(self._index, LeftOut.ABANDONED)

    async def _run(self) -> None:
        async for chunk in self._chunks:
            self._index = chunk.call
            if self.is_abandoned:
                self.abandon()
            self._queue.put_nowait(chunk)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled():
            task.exception()  # the tree has the cause; asyncio would warn of an exception that nobody reads
        self._queue.put_nowait(None)
