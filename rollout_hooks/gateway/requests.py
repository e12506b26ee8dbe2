"""The bodies of `POST /v1/chat/completions` and `POST /v1/responses`: what is accepted, and what it asks for.

A parameter that is not here is refused by its name: nothing is ignored silently. null and empty lists count as not
given. Accepted without effect on what is generated, as with OpenAI: `user`, `metadata`, `safety_identifier`,
`prompt_cache_key`, `service_tier`, and `strict` of a function (the model's words are recorded, not constrained).
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from rollout_hooks.gateway.turn import Message, ToolCall, TurnRequest


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_unset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None and value != []}


class _TextPart(_Body):
    type: Literal["text", "input_text", "output_text"]
    text: str


Content = str | list[_TextPart]


def _text(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class _Function(_Body):
    name: str
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False

    def as_tool(self) -> dict[str, Any]:
        """As chat templates read it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class _Tool(_Body):
    type: Literal["function"]
    function: _Function


class _CalledFunction(_Body):
    name: str
    arguments: str


class _ToolCall(_Body):
    id: str
    type: Literal["function"]
    function: _CalledFunction


class _ChatMessage(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = ""
    name: str | None = None
    tool_calls: list[_ToolCall] = []
    tool_call_id: str | None = None


class _StreamOptions(_Body):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class _TextFormat(_Body):
    type: Literal["text"]


class _Shared(_Body):
    model: str
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool = False
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: Literal[True] = True
    store: Literal[False] = False
    top_logprobs: Literal[0] = 0
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] = "auto"

    def _sampling(self, **more: Any) -> dict[str, Any]:
        wanted = {"temperature": self.temperature, "top_p": self.top_p, **more}
        return {name: value for name, value in wanted.items() if value is not None}


class ChatBody(_Shared):
    """`POST /v1/chat/completions`."""

    messages: list[_ChatMessage]
    tools: list[_Tool] = []
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] = []
    n: int = Field(1, ge=1, le=128)
    seed: int | None = None
    logprobs: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    response_format: _TextFormat | None = None
    presence_penalty: Literal[0] = 0
    frequency_penalty: Literal[0] = 0

    @model_validator(mode="after")
    def _one_stream(self) -> "ChatBody":
        if self.stream and self.n > 1:
            raise ValueError(f"n={self.n} with stream=true: stream one choice at a time, or do not stream")
        return self

    def turn_request(self) -> TurnRequest:
        """What it asks for."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return TurnRequest(
            messages=[_chat_message(message) for message in self.messages],
            tools=[tool.function.as_tool() for tool in self.tools],
            parses_tools=bool(self.tools) and self.tool_choice == "auto",
            sampling=self._sampling(max_tokens=limit, stop=list(stop) or None, seed=self.seed),
            stop=stop,
            num_choices=self.n,
            wants_log_probs=self.logprobs,
        )


def _chat_message(message: _ChatMessage) -> Message:
    result: Message = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(message.content),
    }
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


class _FlatTool(_Function):
    type: Literal["function"]


class _MessageItem(_Body):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content = ""
    id: str | None = None
    status: str | None = None


class _CallItem(_Body):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class _OutputItem(_Body):
    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    status: str | None = None


def _item_type(value: Any) -> str | None:
    kind = value.get("type", "message") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else None


Item = Annotated[
    Annotated[_MessageItem, Tag("message")]
    | Annotated[_CallItem, Tag("function_call")]
    | Annotated[_OutputItem, Tag("function_call_output")],
    Discriminator(_item_type),
]


class _TextOptions(_Body):
    format: _TextFormat | None = None


class ResponsesBody(_Shared):
    """`POST /v1/responses`, the part of it that agents use; a response is not kept, its items are sent back."""

    input: str | list[Item]
    instructions: str | None = None
    tools: list[_FlatTool] = []
    max_output_tokens: int | None = Field(None, ge=1)
    text: _TextOptions | None = None
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False

    def turn_request(self) -> TurnRequest:
        """What it asks for."""
        messages: list[Message] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        items = [_MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        for item in items:
            _add_item(messages, item)
        return TurnRequest(
            messages=messages,
            tools=[tool.as_tool() for tool in self.tools],
            parses_tools=bool(self.tools) and self.tool_choice == "auto",
            sampling=self._sampling(max_tokens=self.max_output_tokens),
        )


def _add_item(messages: list[Message], item: _MessageItem | _CallItem | _OutputItem) -> None:
    """Append an item; the text and the calls of one turn of the model are several items and one message."""
    if isinstance(item, _MessageItem):
        role = "system" if item.role == "developer" else item.role
        messages.append({"role": role, "content": _text(item.content)})
    elif isinstance(item, _OutputItem):
        messages.append({"role": "tool", "content": _text(item.output), "tool_call_id": item.call_id})
    else:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        call = ToolCall(item.call_id, item.name, item.arguments).as_message_part()
        messages[-1].setdefault("tool_calls", []).append(call)
