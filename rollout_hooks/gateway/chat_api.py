"""Chat Completions: turns as OpenAI's completion object, or as its stream of chunks."""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from rollout_hooks.gateway.errors import ApiError
from rollout_hooks.gateway.requests import ChatBody
from rollout_hooks.gateway.running_call import RunningCall
from rollout_hooks.gateway.session import GatewaySession
from rollout_hooks.gateway.turn import ModelTurn

Event = dict[str, Any]

_DONE: Event = {}
"""What ends a stream that did not fail."""

_LEAST_LOG_PROB = -9999.0
"""What vLLM's server writes for the log-prob of what cannot be sampled; JSON has no -inf and no NaN."""


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The answer to one request to `POST /v1/chat/completions`, with one call for each choice."""

    session: GatewaySession
    body: ChatBody
    calls: Sequence[RunningCall]
    _id: str = field(default_factory=lambda: f"chatcmpl-{uuid4().hex}")
    _created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self) -> dict[str, Any]:
        """Return the completion once all its choices are complete."""
        turns = [await self.session.whole_turn(call) for call in self.calls]
        self.session.calls_of_response[self._id] = tuple(turn.call for turn in turns)
        for index, turn in enumerate(turns):
            self.session.calls_of_response[f"{self._id}/{index}"] = (turn.call,)
        choices: list[dict[str, Any]] = []
        for index, turn in enumerate(turns):
            log_probs = self._log_probs(turn.token_ids, turn.log_probs)
            finish_reason = turn.finish_reason
            choices.append(
                {"index": index, "message": _message(turn), "finish_reason": finish_reason, "logprobs": log_probs}
            )
            await asyncio.sleep(0)  # the log-probs of many choices may take a second, and other requests go on
        return {**self._head("chat.completion"), "choices": choices, "usage": _usage(turns)}

    async def events(self) -> AsyncIterator[Event]:
        """Yield the chunks of the one choice, the first one once the engine has given something."""
        (call,) = self.calls
        has_begun = False
        async for part in self.session.follow(call):
            if not has_begun:
                yield self._chunk({"role": "assistant", "content": ""})
                has_begun = True
            if isinstance(part, ModelTurn):
                for chunk in self._last_chunks(part):
                    yield chunk
                yield _DONE
            elif part.text or (self.body.logprobs and part.token_ids):
                yield self._chunk({"content": part.text}, log_probs=self._log_probs(part.token_ids, part.log_probs))

    @staticmethod
    def line(event: Event) -> str:
        """Return a chunk as a server-sent event."""
        return f"data: {json.dumps(event) if event else '[DONE]'}\n\n"

    @staticmethod
    def is_last(event: Event) -> bool:
        """Say whether the stream ends with an event."""
        return event == _DONE

    @staticmethod
    def failed(error: ApiError) -> Event:
        """Return the event that ends a stream after an error."""
        return error.body()

    def _last_chunks(self, turn: ModelTurn) -> Iterator[Event]:
        self.session.calls_of_response[self._id] = (turn.call,)
        if turn.tool_calls:
            calls = [{"index": index, **part} for index, part in enumerate(_message(turn)["tool_calls"])]
            yield self._chunk({"tool_calls": calls})
        yield self._chunk({}, finish_reason=turn.finish_reason)
        if self.body.stream_options.include_usage:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": _usage([turn])}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self.body.model}

    def _chunk(
        self, delta: dict[str, Any], *, finish_reason: str | None = None, log_probs: dict[str, Any] | None = None
    ) -> Event:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": log_probs}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _log_probs(self, token_ids: Sequence[int], log_probs: Sequence[float] | None) -> dict[str, Any] | None:
        if not self.body.logprobs or log_probs is None:
            return None
        text_of = {token: self.session.chat_format.decode([token]) for token in set(token_ids)}
        content = [
            {"token": text, "logprob": _as_json(value), "bytes": list(text.encode()), "top_logprobs": []}
            for text, value in zip(map(text_of.__getitem__, token_ids), log_probs, strict=True)
        ]
        return {"content": content, "refusal": None}


def _as_json(log_prob: float) -> float:
    return max(log_prob, _LEAST_LOG_PROB) if math.isfinite(log_prob) else _LEAST_LOG_PROB


def _message(turn: ModelTurn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": turn.content, "refusal": None}
    if turn.tool_calls:
        message["content"] = turn.content or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in turn.tool_calls
        ]
    return message


def _usage(turns: Sequence[ModelTurn]) -> dict[str, int]:
    num_prompt, num_output = turns[0].num_prompt, sum(len(turn.token_ids) for turn in turns)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}
