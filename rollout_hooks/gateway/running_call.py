"""A call to the engine, as a task of its own.

It runs to its end and is recorded even if its client has gone away. So a client that goes away loses text, but no
sampled token is lost.
"""

import asyncio
from collections.abc import AsyncIterator

from rollout_hooks.capture.errors import describe_error
from rollout_hooks.gateway.engine import TokenChunk
from rollout_hooks.gateway.errors import EngineFailure
from rollout_hooks.gateway.turn import TurnRequest


class RunningCall:
    """One call to the engine, as a task that runs to its end even if nobody listens.

    `max_tokens` is the limit of the call, None if the engine decides. `num_prompt` counts the tokens of its prompt.
    """

    def __init__(
        self, chunks: AsyncIterator[TokenChunk], request: TurnRequest, *, max_tokens: int | None, num_prompt: int
    ) -> None:
        self.request = request
        self.max_tokens = max_tokens
        self.num_prompt = num_prompt
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
            self._queue.put_nowait(chunk)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled():
            task.exception()  # the tree has the cause; asyncio would warn of an exception that nobody reads
        self._queue.put_nowait(None)
