"""The bodies of `POST /v1/messages` and `/v1/messages/count_tokens`, Anthropic's protocol.

As with OpenAI's, any other parameter is refused by its name. What changes nothing of what is sampled is accepted: marks
of a cache (`cache_control`), since the engine has one of its own, and `request_parts.WITHOUT_EFFECT`.
"""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import override

from rollout_hooks.gateway.errors import refused
from rollout_hooks.gateway.limits import MAX_MESSAGES, MAX_PARTS, MAX_STOP_LEN, MAX_STOPS, MAX_TOKENS, MAX_TOOLS
from rollout_hooks.gateway.request_parts import (
    Body,
    Function,
    ImagePart,
    JsonObject,
    Parameters,
    TextPart,
    call_rules,
    content_of,
    thinking_text,
)
from rollout_hooks.gateway.turn import Message, ToolCall, TurnRequest

OPENED, UNOPENED = "opened", "unopened"
"""Signatures of thinking blocks: whether the turn has the tag that begins the thinking, or the prompt has it."""


class _Block(Body):
    cache_control: Any = None


class _Text(_Block, TextPart):
    type: Literal["text"]


class _Source(Body):
    type: Literal["base64"]
    media_type: Literal["image/png", "image/jpeg"]
    data: str


class _Image(_Block, ImagePart):
    type: Literal["image"]
    source: _Source

    @property
    @override
    def url(self) -> str:
        return f"data:{self.source.media_type};base64,{self.source.data}"


class _Thinking(Body):
    type: Literal["thinking"]
    thinking: str
    signature: str = OPENED

    @property
    def text(self) -> str:
        """What the model wrote."""
        return thinking_text(self.thinking).removeprefix("<think>" if self.signature == UNOPENED else "")


class _ToolUse(_Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject = Field(default_factory=dict)
    caller: Any = None  # "direct" from clients that send back what they got


_Shown = Annotated[_Text | _Image, Field(discriminator="type")]


class _ToolResult(_Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[_Shown], Field(max_length=MAX_PARTS, fail_fast=True)] = ""
    is_error: bool = False  # the text says it


_AnyBlock = Annotated[_Text | _Image | _Thinking | _ToolUse | _ToolResult, Field(discriminator="type")]


class _Message(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[_AnyBlock], Field(max_length=MAX_PARTS, fail_fast=True)] = ""


class _Tool(Function):
    type: Literal["custom"] = "custom"
    parameters: Parameters = Field(alias="input_schema")
    cache_control: Any = None
    eager_input_streaming: Any = None


class _Choice(Body):
    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool = False


class _ThinkingConfig(Body):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Any = None


class _SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonObject = Field(alias="schema")


class _OutputConfig(Body):
    effort: str | None = None
    format: _SchemaFormat | None = None


class CountBody(Body):
    """`POST /v1/messages/count_tokens`."""

    model: str
    messages: list[_Message] = Field(max_length=MAX_MESSAGES, fail_fast=True)
    system: str | Annotated[list[_Text], Field(max_length=MAX_PARTS, fail_fast=True)] = ""
    tools: list[_Tool] = Field(default_factory=list, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: _Choice = _Choice()
    thinking: _ThinkingConfig | None = None
    output_config: _OutputConfig = _OutputConfig()
    cache_control: Any = None
    context_management: Any = None
    speed: Any = None

    @property
    def wants_thinking(self) -> bool:
        """Whether the thinking comes in blocks of its own, and not as the beginning of the text."""
        return self.thinking is not None and self.thinking.type != "disabled"

    def turn_request(self, **more: Any) -> TurnRequest:
        """Return the turn that the request asks for; see `ChatBody`."""
        system = content_of(self.system, role="system")
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        for message in self.messages:
            messages += _as_read(message)
        if messages and messages[-1]["role"] == "assistant":
            raise refused("the last message is the model's: no turn is continued; end with a user's", param="messages")
        choice, text_format = self.tool_choice, self.output_config.format
        rules = call_rules(
            [tool.as_tool() for tool in self.tools],
            choice=choice.model_dump(exclude_defaults=True),
            may_call=choice.type != "none",
            must_call=choice.type == "any",
            named=choice.name or "" if choice.type == "tool" else None,
            single=choice.disable_parallel_tool_use,
        )
        schema = text_format.json_schema if text_format is not None else None
        return TurnRequest(messages, **rules, text_schema=schema, text_param="output_config.format", **more)


class MessagesBody(CountBody):
    """`POST /v1/messages`."""

    max_tokens: int = Field(ge=1, le=MAX_TOKENS)
    stream: bool = False
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    stop_sequences: list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LEN)]] = Field(
        default_factory=list, max_length=MAX_STOPS, fail_fast=True
    )
    metadata: Any = None
    service_tier: Literal["auto", "standard_only"] = "auto"
    inference_geo: Any = None
    diagnostics: Any = None

    @override
    def turn_request(self, **more: Any) -> TurnRequest:
        stop = tuple(self.stop_sequences)
        wanted = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stop": list(stop) or None,
        }
        sampling = {name: value for name, value in wanted.items() if value is not None}
        return super().turn_request(sampling=sampling, stop=stop, **more)


def _as_read(message: _Message) -> Iterator[Message]:
    """Yield a message as chat templates read it; results of tools are messages of their own."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
    elif message.role == "assistant":
        yield _as_written(message.content)
    else:
        shown: list[_Text | _Image] = []
        for block in message.content:
            if isinstance(block, _ToolResult):
                if shown:
                    yield {"role": message.role, "content": content_of(shown, role=message.role)}
                shown = []
                content = content_of(block.content, role="tool")
                yield {"role": "tool", "content": content, "tool_call_id": block.tool_use_id}
            elif isinstance(block, _Text) or (isinstance(block, _Image) and message.role == "user"):
                shown.append(block)
            else:
                raise _misplaced(block, message)
        if shown:
            yield {"role": message.role, "content": content_of(shown, role=message.role)}


def _as_written(blocks: "list[_Text | _Image | _Thinking | _ToolUse | _ToolResult]") -> Message:
    """Return a turn of the model: its text with its thinking, and its calls."""
    content, calls = "", []
    for block in blocks:
        if isinstance(block, _Text | _Thinking):
            content += block.text
        elif isinstance(block, _ToolUse):
            calls.append(ToolCall(block.id, block.name, json.dumps(block.input)).as_message_part())
        else:
            raise _misplaced(block, _Message(role="assistant"))
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


def _misplaced(block: Body, message: _Message) -> Exception:
    kind = getattr(block, "type", "")
    return refused(
        f"a message of the role {message.role} has a block {kind}: put it where it belongs", param="messages"
    )
