"""One turn of the model, as a request and as an answer, for both APIs."""

import json
from dataclasses import dataclass, field
from typing import Any

from rollout_hooks.gateway.json_values import is_nested_too_deeply

Message = dict[str, Any]
"""A message as chat templates read it: role, content, and tool_calls or tool_call_id."""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """The history that the model reads, and how it must answer."""

    messages: list[Message]
    # Function tools in the form of Chat Completions; rendered by the chat template.
    tools: list[dict[str, Any]] = field(default_factory=list)
    parses_tools: bool = False  # Whether the answer is searched for tool calls
    forced_tools: tuple[str, ...] = ()  # The answer must call one of these tools; empty leaves the model free
    single_call: bool = False  # Whether the answer may make one call at most
    text_schema: dict[str, Any] | None = None  # JSON schema that the text must follow, None for any text
    text_param: str = "response_format"  # The API's name of the parameter with that schema
    sampling: dict[str, Any] = field(default_factory=dict)  # The client's sampling parameters, under vLLM's names
    stop: tuple[str, ...] = ()  # Strings that end the answer; the client's text does not have them
    num_choices: int = 1
    wants_log_probs: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function call of the model; `arguments` is JSON as the tool parser read it."""

    id: str
    name: str
    arguments: str

    def as_message_part(self) -> dict[str, Any]:
        """Return it as chat templates read it. Arguments that are a JSON object are parsed, as in verl's tool loop.

        Not so what Python, a template or a tokenizer could not write again: very deep ones, numbers of thousands of
        digits, and escapes of half a character.
        """
        try:
            parsed = json.loads(self.arguments)
            json.dumps(parsed, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            parsed = None
        can_be_written = isinstance(parsed, dict) and not is_nested_too_deeply(parsed)
        arguments = parsed if can_be_written else self.arguments
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class ModelTurn:
    """One answer of the model."""

    call: int  # Index of the call in the session's tree
    token_ids: list[int]  # The generated tokens, the stop token included
    log_probs: list[float] | None
    content: str  # The text for the client: no tool calls, no stop token, no stop string
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str  # OpenAI's "stop", "length" or "tool_calls"
    num_prompt: int  # Tokens of the prompt
