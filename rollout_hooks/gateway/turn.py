"""One turn of the model, asked for and given, whichever API it came through."""

import json
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
"""A message as chat templates read it: role, content, and tool_calls or tool_call_id."""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """The history that the model shall read, and how it shall answer.

    Attributes:
        messages: The history, in the words of chat templates.
        tools: Function tools in the form of Chat Completions; rendered by the chat template.
        parses_tools: Whether the answer is searched for tool calls.
        forced_tools: Names of the tools of which the answer must call one; empty for an answer as the model likes.
        single_call: Whether the answer may make one call at most.
        text_schema: JSON schema that the text must follow, None for any text.
        text_param: The API's name of the parameter with that schema.
        sampling: The sampling parameters that the client gave, under vLLM's names.
        stop: Strings that end the answer; they are not part of the text that the client gets.
        num_choices: Answers to sample.
        wants_log_probs: Whether the client gets the log-probs of the tokens.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    parses_tools: bool = False
    forced_tools: tuple[str, ...] = ()
    single_call: bool = False
    text_schema: dict[str, Any] | None = None
    text_param: str = "response_format"
    sampling: dict[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    num_choices: int = 1
    wants_log_probs: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function call of the model; `arguments` is JSON as the tool parser read it."""

    id: str
    name: str
    arguments: str

    def as_message_part(self) -> dict[str, Any]:
        """Return it as chat templates read it: arguments that are a JSON object become one, as in verl's tool loop."""
        try:
            parsed = json.loads(self.arguments)
        except json.JSONDecodeError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else self.arguments
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class ModelTurn:
    """One answer of the model.

    Attributes:
        call: Index of the call in the session's tree.
        token_ids: The generated tokens, the stop token included.
        log_probs: One per token, or None.
        content: The text for the client: no tool calls, no stop token, no stop string.
        tool_calls: The calls that were found.
        finish_reason: OpenAI's "stop", "length" or "tool_calls".
        num_prompt: Tokens of the prompt.
    """

    call: int
    token_ids: list[int]
    log_probs: list[float] | None
    content: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    num_prompt: int
