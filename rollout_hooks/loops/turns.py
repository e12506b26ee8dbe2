"""The parts of a conversation with tools: a turn, what its tool calls gave, a place to go on from, schemas."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from verl.experimental.agent_loop.tool_parser import FunctionCall
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.workers.rollout.replica import TokenOutput

from rollout_hooks.loops.branch import Branch


@dataclass(frozen=True, slots=True)
class ToolTurn:
    """A turn of the model, which may call tools.

    Attributes:
        start: Position at which the turn begins on its branch.
        output: verl's output of the call to the LLM that ended the turn.
        text: The turn's text, special tokens removed.
        content: The text without the calls, as the tool parser leaves it, special tokens removed too.
        calls: The first `max_parallel_calls` tool calls.
    """

    start: int
    output: TokenOutput
    text: str
    content: str
    calls: tuple[FunctionCall, ...]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The outcome of one tool call.

    Attributes:
        response: verl's response; `text` is what the model is told, errors included.
        failure: Why the branch that needs the result shall end; None if it can go on.
        reward: The tool's reward for the call; verl has 0.0 for a function that says nothing. None if the tool took too
            long or gave none.
    """

    response: ToolResponse
    failure: str | None = None
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """A place in a conversation from which another one can go on.

    Attributes:
        number: The number of the turn, from 1.
        messages: The messages before the turn.
        turn: The turn.
        end: A branch with its cursor behind the turn: fork it and rewind to any position of the turn.
    """

    number: int
    messages: list[dict[str, Any]]
    turn: ToolTurn
    end: Branch


def tool_schemas(schemas: Iterable[OpenAIFunctionToolSchema]) -> list[dict[str, Any]]:
    """Return the schemas of tools as chat templates read them."""
    return [schema.model_dump(exclude_unset=True, exclude_none=True) for schema in schemas]


def text_tool(name: str, description: str, argument: str, meaning: str) -> OpenAIFunctionToolSchema:
    """Return the schema of a tool that takes one text."""
    properties = {argument: {"type": "string", "description": meaning}}
    parameters = {"type": "object", "properties": properties, "required": [argument]}
    function = {"name": name, "description": description, "parameters": parameters}
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})
