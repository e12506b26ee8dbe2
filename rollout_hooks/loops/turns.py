"""The parts of a conversation with tools: a turn of the model, what its tool calls gave, a place to go on from."""

from dataclasses import dataclass
from typing import Any

from verl.experimental.agent_loop.tool_parser import FunctionCall
from verl.tools.schemas import ToolResponse
from verl.workers.rollout.replica import TokenOutput

from rollout_hooks.loops.branch import Branch


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the model.

    Attributes:
        start: Position at which the turn begins on its branch.
        output: verl's output of the call that ended the turn.
        text: The turn's text, special tokens removed.
        content: What the tool parser left of the text when it took the calls out, special tokens removed too.
        calls: The first `max_parallel_calls` tool calls.
    """

    start: int
    output: TokenOutput
    text: str
    content: str
    calls: tuple[FunctionCall, ...]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What one tool call gave.

    Attributes:
        response: verl's response; `text` is what the model is told, errors included.
        failure: Why the branch that needs the result shall end; None if it can go on.
        reward: What the tool rewarded the call with; verl has 0.0 for a function that says nothing. None: the tool took
            too long, or gave none.
    """

    response: ToolResponse
    failure: str | None = None
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """A place on a conversation from which another one can go on.

    Attributes:
        number: The number of the turn, from 1.
        messages: The messages before the turn.
        turn: The turn.
        end: A branch with its cursor behind the turn: fork it and rewind to any position of the turn.
    """

    number: int
    messages: list[dict[str, Any]]
    turn: Turn
    end: Branch
