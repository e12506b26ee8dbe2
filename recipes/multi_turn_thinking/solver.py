"""A scripted solver that thinks before every call; its sessions, turn by turn, are the supervised data.

One call a turn, one sum after the other::

    <think>
    Next: 84 + 23.
    </think>

    <tool_call>
    {"name": "calculator", "arguments": {"expression": "84 + 23"}}
    </tool_call>

A thought decides what its turn does. Later turns find all they need in the calls and results, so it can be dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from recipes.arithmetic_tools.solver import Leaf, Solver, TokenBuilder, Turn, value_of, write_turn
from recipes.arithmetic_tools.tasks import Part, Task
from recipes.arithmetic_tools.tools import OneArgumentTool
from recipes.multi_turn_thinking.tokenizer import SYSTEM_PROMPT, THOUGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingSolver(Solver):
    """Solves tasks with one call a turn; a wrong habit makes it guess a value instead of working it out."""

    def solve(self, task: Task) -> list[Turn]:
        """Returns the session's turns, the last one an answer."""
        turns: list[Turn] = []
        known: list[str] = []
        for part in task.parts:
            known.append(self._work_out(part, turns))
        turns.append(_with_thought(self._answer(known), "Known: " + ", ".join(known)))
        return turns

    def _work_out(self, part: Part, turns: list[Turn]) -> str:
        """Appends the turns for one sum and returns its value."""
        if part.key is not None and self._is_right(self.habits.plan):
            turns.append(self._step(self.lookup, part.key))
        elif part.key is not None:
            if self.rng.random() < 0.5:
                turns.append(self._step(self.calculator, part.shown))
            return self._guess()
        if not self._is_right(self.habits.go_on):
            return self._guess()
        turns.append(self._step(self.calculator, part.expression))
        return value_of(turns[-1].results[0])

    def _step(self, tool: OneArgumentTool, value: str) -> Turn:
        return _with_thought(self._call([(tool, value)]), "Next: " + value)


def trace_leaves(
    task: Task, turns: Sequence[Turn], *, builder: TokenBuilder, tokenizer: Any, tools: list[dict[str, Any]]
) -> list[Leaf]:
    """Renders a session as the agent loop would have produced it.

    Args:
        task: what the prompt asks.
        turns: the session.
        builder: verl's Continuous Token builder of the model.
        tokenizer: the model's tokenizer, with a template that drops earlier thinking.
        tools: the schemas that the prompt shows.

    Returns:
        One leaf per turn: the chat before it, rendered anew, and the turn, which alone is trained.
    """
    messages: list[dict[str, Any]] = list(task.chat(SYSTEM_PROMPT))
    leaves = []
    for turn in turns:
        prompt = builder.build_initial_tokens(messages, tools=tools)
        leaves.append(write_turn(Leaf(prompt, [0] * len(prompt)), turn.text, tokenizer=tokenizer))
        messages.append({"role": "assistant", "content": turn.text})
        messages.extend({"role": "tool", "content": result} for result in turn.results)
    return leaves


def _with_thought(turn: Turn, thought: str) -> Turn:
    return replace(turn, text=THOUGHT.format(thought) + turn.text)
