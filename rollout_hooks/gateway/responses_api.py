"""Responses: a turn as OpenAI's response object, or as its stream of events."""

import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from uuid import uuid4

from rollout_hooks.gateway.errors import ApiError
from rollout_hooks.gateway.requests import ResponsesBody
from rollout_hooks.gateway.running_call import RunningCall
from rollout_hooks.gateway.session import GatewaySession
from rollout_hooks.gateway.turn import ModelTurn, ToolCall

Event = dict[str, Any]

_GIVEN = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}
"""Of each kind of call: the field with what it is given, and the name of the events that bring it."""


@dataclass(frozen=True, slots=True)
class ResponsesAnswer:
    """The answer to one request to `POST /v1/responses`."""

    session: GatewaySession
    body: ResponsesBody
    call: RunningCall
    _id: str = field(default_factory=lambda: f"resp_{uuid4().hex}")
    _message_id: str = field(default_factory=lambda: f"msg_{uuid4().hex}")
    _created: int = field(default_factory=lambda: int(time.time()))
    _event_numbers: Iterator[int] = field(default_factory=count)

    async def whole(self) -> dict[str, Any]:
        """Return the response once it is complete."""
        return self._finished(await self.session.whole_turn(self.call))

    async def events(self) -> AsyncIterator[Event]:
        """Yield the events of the response, the first one once the engine has given something."""
        has_begun = is_open = False
        async for part in self.session.follow(self.call):
            if not has_begun:
                for kind in ("response.created", "response.in_progress"):
                    yield self._event(kind, response=self._response("in_progress"))
                has_begun = True
            if isinstance(part, ModelTurn):
                for event in self._last_events(part, is_open=is_open):
                    yield event
            elif part.text:
                for event in [] if is_open else self._open_message():
                    yield event
                is_open = True
                yield self._text_event("response.output_text.delta", delta=part.text, logprobs=[])

    @staticmethod
    def line(event: Event) -> str:
        """Return an event as a server-sent event."""
        return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"

    @staticmethod
    def is_last(event: Event) -> bool:
        """Say whether the stream ends with an event."""
        return event["type"] in ("response.completed", "response.incomplete")

    def _last_events(self, turn: ModelTurn, *, is_open: bool) -> Iterator[Event]:
        for index, item in enumerate(self._items(turn)):
            if item["type"] != "message":
                yield from self._call_events(index, item)
            else:
                yield from [] if is_open else self._open_message()
                yield from self._close_message(turn.content, item=item)
        response = self._finished(turn)
        kind = "response.incomplete" if response["status"] == "incomplete" else "response.completed"
        yield self._event(kind, response=response)

    def failed(self, error: ApiError) -> Event:
        """Return the event that ends a stream after an error."""
        details = {"code": "server_error", "message": str(error)}
        return self._event("response.failed", response={**self._response("failed"), "error": details})

    def _finished(self, turn: ModelTurn) -> dict[str, Any]:
        self.session.calls_of_response[self._id] = (turn.call,)
        if self.body.store:
            previous, skip = self.body.previous_response_id, int(self.body.instructions is not None)
            self.session.keep(self._id, self.call.request, turn, previous=previous, skip=skip)
        is_cut = turn.finish_reason == "length"
        num_output = len(turn.token_ids)
        return {
            **self._response("incomplete" if is_cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items(turn),
            "usage": {
                "input_tokens": turn.num_prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": num_output,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": turn.num_prompt + num_output,
            },
        }

    def _response(self, status: str) -> dict[str, Any]:
        """Return the response object without its outcome; it repeats what the request said."""
        body = self.body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "model": body.model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "max_output_tokens": body.max_output_tokens,
            "tool_choice": body.tool_choice,
            "tools": [{"type": "function", **tool["function"], "strict": False} for tool in self.call.request.tools],
            "truncation": "disabled",
            "text": body.text.model_dump(by_alias=True) if body.text else {"format": {"type": "text"}},
            "store": body.store,
        }

    def _items(self, turn: ModelTurn) -> list[dict[str, Any]]:
        status = "incomplete" if turn.finish_reason == "length" else "completed"
        message = self._message_item([_text_part(turn.content)], status=status)
        has_message = bool(turn.content) or not turn.tool_calls
        return ([message] if has_message else []) + [self._call_item(call) for call in turn.tool_calls]

    def _message_item(self, content: list[dict[str, Any]], *, status: str) -> dict[str, Any]:
        return {"id": self._message_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _open_message(self) -> list[Event]:
        item = self._message_item([], status="in_progress")
        return [
            self._event("response.output_item.added", output_index=0, item=item),
            self._text_event("response.content_part.added", part=_text_part("")),
        ]

    def _close_message(self, text: str, *, item: dict[str, Any]) -> list[Event]:
        return [
            self._text_event("response.output_text.done", text=text, logprobs=[]),
            self._text_event("response.content_part.done", part=_text_part(text)),
            self._event("response.output_item.done", output_index=0, item=item),
        ]

    def _call_events(self, index: int, item: dict[str, Any]) -> list[Event]:
        place = {"output_index": index, "item_id": item["id"]}
        given, kind = _GIVEN[item["type"]]
        started = {**item, given: "", "status": "in_progress"}
        done = {given: item[given], **({"name": item["name"]} if given == "arguments" else {})}
        return [
            self._event("response.output_item.added", output_index=index, item=started),
            self._event(f"response.{kind}.delta", **place, delta=item[given]),
            self._event(f"response.{kind}.done", **place, **done),
            self._event("response.output_item.done", output_index=index, item=item),
        ]

    def _call_item(self, call: ToolCall) -> dict[str, Any]:
        return {"id": f"fc_{call.id}", "call_id": call.id, "status": "completed", **self.body.item_of(call)}

    def _text_event(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, item_id=self._message_id, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "sequence_number": next(self._event_numbers), **fields}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
