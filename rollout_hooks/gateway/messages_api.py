"""Anthropic Messages: a turn as the message object, or as its stream of events."""

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from rollout_hooks.gateway.errors import ApiError
from rollout_hooks.gateway.messages_body import OPENED, UNOPENED, MessagesBody
from rollout_hooks.gateway.running_call import RunningCall
from rollout_hooks.gateway.session import GatewaySession
from rollout_hooks.gateway.turn import ModelTurn, ToolCall

Event = dict[str, Any]

_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}
"""Type and field of the event that adds to a block, by the block's type."""


@dataclass(frozen=True, slots=True)
class MessagesAnswer:
    """The answer to one request to `POST /v1/messages`."""

    session: GatewaySession
    body: MessagesBody
    call: RunningCall
    _id: str = field(default_factory=lambda: f"msg_{uuid4().hex}")

    async def whole(self) -> dict[str, Any]:
        """Return the message once it is complete."""
        turn = await self.session.whole_turn(self.call)
        return {**self._begun(), "content": self._blocks(turn), **self._ended(turn), "usage": _usage(turn)}

    async def events(self) -> AsyncIterator[Event]:
        """Yield the events of the message, the first one once the engine has given something."""
        has_begun = is_open = False
        async for part in self.session.follow(self.call):
            if not has_begun:
                yield {"type": "message_start", "message": self._begun()}
                has_begun = True
            if isinstance(part, ModelTurn):
                for event in self._last_events(part, is_open=is_open):
                    yield event
            elif part.text and not self.body.wants_thinking:
                if not is_open:
                    yield _start(0, {"type": "text", "text": ""})
                is_open = True
                yield _delta(0, {"type": "text_delta", "text": part.text})

    @staticmethod
    def line(event: Event) -> str:
        """Return an event as a server-sent event."""
        return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"

    @staticmethod
    def is_last(event: Event) -> bool:
        """Say whether the stream ends with an event."""
        return event["type"] == "message_stop"

    @staticmethod
    def failed(error: ApiError) -> Event:
        """Return the event that ends a stream after an error."""
        return error.anthropic_body()

    def _last_events(self, turn: ModelTurn, *, is_open: bool) -> Iterator[Event]:
        for index, block in enumerate(self._blocks(turn)):
            if index > 0 or not is_open:
                yield from _whole_block(index, block)
            yield {"type": "content_block_stop", "index": index}
        yield {"type": "message_delta", "delta": self._ended(turn), "usage": _usage(turn)}
        yield {"type": "message_stop"}

    def _begun(self) -> dict[str, Any]:
        """Return the message object without its outcome."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.body.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": self.call.num_prompt, "output_tokens": 0},
        }

    def _ended(self, turn: ModelTurn) -> dict[str, Any]:
        self.session.calls_of_response[self._id] = (turn.call,)
        if turn.tool_calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if turn.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        # The text ends before the stop string.
        behind = self.session.chat_format.decode(turn.token_ids)[len(turn.content) :]
        stop = next((each for each in self.call.request.stop if behind.startswith(each)), None)
        return {"stop_reason": "end_turn" if stop is None else "stop_sequence", "stop_sequence": stop}

    def _blocks(self, turn: ModelTurn) -> list[dict[str, Any]]:
        blocks, text = [], turn.content
        before, tag, behind = text.partition("</think>")
        if tag and self.body.wants_thinking:
            thinking, text = before.removeprefix("<think>"), behind
            signature = UNOPENED if thinking == before else OPENED
            blocks.append({"type": "thinking", "thinking": thinking, "signature": signature})
        if text:
            blocks.append({"type": "text", "text": text})
        return blocks + [_tool_use(call) for call in turn.tool_calls]


def _tool_use(call: ToolCall) -> dict[str, Any]:
    arguments = call.as_message_part()["function"]["arguments"]
    # What is no JSON object is a text: the protocol has no place for it but an object.
    value = arguments if isinstance(arguments, dict) else {"arguments": arguments}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": value}


def _usage(turn: ModelTurn) -> dict[str, int]:
    return {
        "input_tokens": turn.num_prompt,
        "output_tokens": len(turn.token_ids),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _whole_block(index: int, block: dict[str, Any]) -> Iterator[Event]:
    if block["type"] == "tool_use":
        yield _start(index, {**block, "input": {}})
        yield _delta(index, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])})
        return
    kind, name = _DELTAS[block["type"]]
    yield _start(index, {**block, name: ""} | ({"signature": ""} if "signature" in block else {}))
    yield _delta(index, {"type": kind, name: block[name]})
    if "signature" in block:
        yield _delta(index, {"type": "signature_delta", "signature": block["signature"]})


def _start(index: int, block: dict[str, Any]) -> Event:
    return {"type": "content_block_start", "index": index, "content_block": block}


def _delta(index: int, delta: dict[str, Any]) -> Event:
    return {"type": "content_block_delta", "index": index, "delta": delta}
