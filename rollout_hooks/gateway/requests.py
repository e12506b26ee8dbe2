"""The bodies of `POST /v1/chat/completions` and `POST /v1/responses`: what is accepted, and what it asks for.

Any other parameter is refused by its name; none is ignored silently. As with OpenAI, `user`, `metadata`,
`safety_identifier`, `prompt_cache_key`, `service_tier` and `client_metadata` are accepted without effect on the turn.
So is what `request_parts.WITHOUT_EFFECT` has, and `strict` of a function: arguments follow their schema wherever
`constraints` prescribes a form, and only there.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from rollout_hooks.gateway.errors import refused
from rollout_hooks.gateway.limits import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_SEED,
    MAX_STOP_LEN,
    MAX_STOPS,
    MAX_TOKENS,
    MAX_TOOLS,
)
from rollout_hooks.gateway.request_parts import (
    Body,
    Content,
    Function,
    NamedSchema,
    PlainFormat,
    SharedBody,
    content_of,
    thinking_text,
)
from rollout_hooks.gateway.turn import Message, ToolCall, TurnRequest


class _Tool(Body):
    type: Literal["function"]
    function: Function


class _CalledFunction(Body):
    name: str
    arguments: str


class _ToolCall(Body):
    id: str
    type: Literal["function"]
    function: _CalledFunction


class _ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = ""
    reasoning_content: str | None = None  # of clients that cut a turn at `</think>`, such as litellm
    name: str | None = None
    tool_calls: list[_ToolCall] = Field(default_factory=list, max_length=MAX_PARTS, fail_fast=True)
    tool_call_id: str | None = None


class _StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class _SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: NamedSchema

    def schema_of_text(self) -> dict[str, Any] | None:
        return self.json_schema.json_schema


_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LEN)]
_AnswerLen = Annotated[int, Field(ge=1, le=MAX_TOKENS)]


class ChatBody(SharedBody):
    """`POST /v1/chat/completions`."""

    messages: list[_ChatMessage] = Field(max_length=MAX_MESSAGES, fail_fast=True)
    tools: list[_Tool] = Field(default_factory=list, max_length=MAX_TOOLS, fail_fast=True)
    max_tokens: _AnswerLen | None = None
    max_completion_tokens: _AnswerLen | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS, fail_fast=True)] = Field(default_factory=list)
    n: int = Field(1, ge=1, le=128)
    seed: int | None = Field(None, ge=-MAX_SEED, le=MAX_SEED)
    logprobs: bool = False
    reasoning_effort: str | None = None
    stream_options: _StreamOptions = _StreamOptions()
    response_format: Annotated[PlainFormat | _SchemaFormat, Field(discriminator="type")] | None = None
    store: Literal[False] = False
    presence_penalty: Literal[0] = 0
    frequency_penalty: Literal[0] = 0

    @model_validator(mode="after")
    def _one_stream(self) -> "ChatBody":
        if self.stream and self.n > 1:
            raise ValueError(f"n={self.n} with stream=true: stream one choice at a time, or do not stream")
        return self

    def turn_request(self) -> TurnRequest:
        """Return the turn that the request asks for. Raise ApiError (400) if it forces a tool that `tools` lacks."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return TurnRequest(
            messages=[_chat_message(message) for message in self.messages],
            **self.call_rules([tool.function.as_tool() for tool in self.tools]),
            text_schema=self.response_format and self.response_format.schema_of_text(),
            sampling=self.sampling(max_tokens=limit, stop=list(stop) or None, seed=self.seed),
            stop=stop,
            num_choices=self.n,
            wants_log_probs=self.logprobs,
        )


def _chat_message(message: _ChatMessage) -> Message:
    result: Message = {
        "role": "system" if message.role == "developer" else message.role,
        "content": content_of(message.content, role=message.role),
    }
    if message.reasoning_content is not None:
        if message.role != "assistant":
            raise refused(f"a message of the role {message.role} has reasoning_content: leave it out", param="messages")
        result["content"] = thinking_text(message.reasoning_content) + result["content"]
    if message.name is not None:
        result["name"] = message.name
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        result["tool_calls"] = [
            ToolCall(call.id, call.function.name, call.function.arguments).as_message_part()
            for call in message.tool_calls
        ]
    return result


class _FlatTool(Function):
    type: Literal["function"]

    def as_tools(self) -> list[dict[str, Any]]:
        return [self.as_tool()]


class _Namespace(Body):
    """Functions whose names have that of the namespace before them, where the model reads and writes them."""

    type: Literal["namespace"]
    name: str
    description: str = ""
    tools: list[_FlatTool] = Field(default_factory=list, max_length=MAX_TOOLS, fail_fast=True)

    def as_tools(self) -> list[dict[str, Any]]:
        named = [tool.model_copy(update={"name": _in_namespace(self.name, tool.name)}) for tool in self.tools]
        return [tool.as_tool() for tool in named]

    def item_of(self, call: ToolCall) -> dict[str, Any] | None:
        """Return a call of one of its functions as an item of a response, without ids."""
        name = next((each.name for each in self.tools if _in_namespace(self.name, each.name) == call.name), None)
        named = {"type": "function_call", "namespace": self.name, "name": name, "arguments": call.arguments}
        return None if name is None else named


class _CustomTool(Body):
    """A tool that takes a text: for the model a function with the argument `input`."""

    type: Literal["custom"]
    name: str
    description: str = ""
    format: dict[str, Any] | None = None  # a grammar that OpenAI's models keep to

    def as_tools(self) -> list[dict[str, Any]]:
        grammar = (self.format or {}).get("definition")
        description = self.description if grammar is None else f"{self.description}\n\n`input` has the form:\n{grammar}"
        parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
        return [Function(name=self.name, description=description, parameters=parameters).as_tool()]

    def item_of(self, call: ToolCall) -> dict[str, Any] | None:
        """Return a call of it as an item of a response, without ids."""
        if call.name != self.name:
            return None
        given = call.as_message_part()["function"]["arguments"]
        text = given.get("input") if isinstance(given, dict) else given
        return {
            "type": "custom_tool_call",
            "name": call.name,
            "input": text if isinstance(text, str) else call.arguments,
        }


class _ServerTool(Body):
    """A tool that OpenAI's servers run. The model is not told of it."""

    model_config = ConfigDict(extra="allow")
    type: Literal["web_search", "web_search_preview"]

    def as_tools(self) -> list[dict[str, Any]]:
        return []


_AnyTool = Annotated[_FlatTool | _Namespace | _CustomTool | _ServerTool, Field(discriminator="type")]


def _in_namespace(namespace: str | None, name: str) -> str:
    return name if namespace is None else f"{namespace}.{name}"


class _Item(Body):
    id: str | None = None
    status: str | None = None


class _MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content = ""


class _CallItem(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str

    def as_call(self) -> ToolCall:
        return ToolCall(self.call_id, _in_namespace(self.namespace, self.name), self.arguments)


class _CustomCallItem(_Item):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str

    def as_call(self) -> ToolCall:
        return ToolCall(self.call_id, self.name, json.dumps({"input": self.input}))


class _OutputItem(_Item):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Content


def _item_type(value: Any) -> str | None:
    kind = value.get("type", "message") if isinstance(value, dict) else None
    return ("output" if kind.endswith("_output") else kind) if isinstance(kind, str) else None


Item = Annotated[
    Annotated[_MessageItem, Tag("message")]
    | Annotated[_CallItem, Tag("function_call")]
    | Annotated[_CustomCallItem, Tag("custom_tool_call")]
    | Annotated[_OutputItem, Tag("output")],
    Discriminator(_item_type),
]


class _FlatSchemaFormat(NamedSchema):
    type: Literal["json_schema"]

    def schema_of_text(self) -> dict[str, Any] | None:
        return self.json_schema


class _TextOptions(Body):
    format: Annotated[PlainFormat | _FlatSchemaFormat, Field(discriminator="type")] | None = None


class ResponsesBody(SharedBody):
    """`POST /v1/responses`, the part of it that agents use.

    A response is kept while its session is open, for `previous_response_id` only; `store=False` keeps nothing.
    """

    input: str | Annotated[list[Item], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    tools: list[_AnyTool] = Field(default_factory=list, max_length=MAX_TOOLS, fail_fast=True)
    reasoning: dict[str, Any] | None = None
    client_metadata: dict[str, str] | None = None
    max_output_tokens: _AnswerLen | None = None
    text: _TextOptions | None = None
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    store: bool = True
    previous_response_id: str | None = None
    # No reasoning items are given, so there is nothing to encrypt.
    include: list[Literal["reasoning.encrypted_content"]] = Field(default_factory=list, max_length=1, fail_fast=True)

    @property
    def server_tools(self) -> list[str] | None:
        """The kinds of tools that OpenAI's servers would run, None without any; see `WITHOUT_EFFECT`."""
        return [tool.type for tool in self.tools if isinstance(tool, _ServerTool)] or None

    def item_of(self, call: ToolCall) -> dict[str, Any]:
        """Return what a call is among the items of a response: its type, its name and what it is given."""
        items = (tool.item_of(call) for tool in self.tools if isinstance(tool, _Namespace | _CustomTool))
        plain = {"type": "function_call", "name": call.name, "arguments": call.arguments}
        return next((item for item in items if item is not None), plain)

    def turn_request(self, history: Sequence[Message] = ()) -> TurnRequest:
        """Return the turn that the request asks for, after the messages up to the previous response; see `ChatBody`.

        As with OpenAI, the instructions of the previous response are not in `history`.
        """
        messages: list[Message] = [dict(message) for message in history]
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        items = [_MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        for item in items:
            _add_item(messages, item)
        tools = [each for tool in self.tools for each in tool.as_tools()]
        if len(tools) > MAX_TOOLS:
            raise refused(f"tools: {len(tools)} with those of namespaces, and {MAX_TOOLS} are the most", param="tools")
        return TurnRequest(
            messages=messages,
            **self.call_rules(tools),
            text_schema=self.text and self.text.format and self.text.format.schema_of_text(),
            text_param="text.format",
            sampling=self.sampling(max_tokens=self.max_output_tokens),
        )


def _add_item(messages: list[Message], item: _MessageItem | _CallItem | _CustomCallItem | _OutputItem) -> None:
    """Append an item. The text and the calls of one turn of the model are several items, but one message."""
    if isinstance(item, _MessageItem):
        role = "system" if item.role == "developer" else item.role
        messages.append({"role": role, "content": content_of(item.content, role=role)})
    elif isinstance(item, _OutputItem):
        content = content_of(item.output, role="tool")
        messages.append({"role": "tool", "content": content, "tool_call_id": item.call_id})
    else:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        call = item.as_call().as_message_part()
        # A new list, since the session may keep this message.
        messages[-1]["tool_calls"] = [*messages[-1].get("tool_calls", []), call]
