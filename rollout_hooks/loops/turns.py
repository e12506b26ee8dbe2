"""The parts of a conversation with tools: a turn, the result of a tool call, a place to go on from, schemas."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from verl.experimental.agent_loop.tool_parser import FunctionCall
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.workers.rollout.replica import TokenOutput

from rollout_hooks.loops.branch import Branch


@dataclass(frozen=True, slots=True)
class ToolTurn:
    """A turn of the model, which may call tools."""

    start: int  # Position at which the turn begins on its branch
    output: TokenOutput  # verl's output of the call to the LLM that ended the turn
    text: str  # The turn's text, without special tokens
    content: str  # The text that the tool parser leaves beside the calls, without special tokens
    calls: tuple[FunctionCall, ...]  # The first `max_parallel_calls` tool calls


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The outcome of one tool call."""

    response: ToolResponse  # verl's response; the model reads its `text`, errors included
    failure: str | None = None  # Why a branch that needs the result must end; None if it can go on
    # The tool's reward, None if it gave none or took too long. verl's function tools give 0.0 by default.
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """A place in a conversation from which another one can go on: turn `number` (from 1), after `messages`.

    `end` is a branch with its cursor behind the turn: fork it and rewind to any position of the turn.
    """

    number: int
    messages: list[dict[str, Any]]
    turn: ToolTurn
    end: Branch


def text_of_content(content: str | Iterable[dict[str, Any]]) -> str:
    """Return the text of a message's content, which may be a list of blocks of text and images."""
    return content if isinstance(content, str) else " ".join(block.get("text", "") for block in content)


def tool_schemas(schemas: Iterable[OpenAIFunctionToolSchema]) -> list[dict[str, Any]]:
    """Return the schemas of tools as chat templates read them."""
    return [schema.model_dump(exclude_unset=True, exclude_none=True) for schema in schemas]


def text_tool(name: str, description: str, argument: str, meaning: str) -> OpenAIFunctionToolSchema:
    """Return the schema of a tool that takes one text."""
    properties = {argument: {"type": "string", "description": meaning}}
    parameters = {"type": "object", "properties": properties, "required": [argument]}
    function = {"name": name, "description": description, "parameters": parameters}
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})
