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

from transformers import PreTrainedTokenizerFast
from typing_extensions import override

from recipes.demo.leaves import Leaf, Renderer
from recipes.demo.solver import Solver, Turn, value_of
from recipes.demo.tasks import Part, Task
from recipes.demo.tokenizer import CHAT_TEMPLATE, build_tokenizer
from recipes.demo.tools import OneArgumentTool
from recipes.multi_turn_thinking.template import drop_thinking

SYSTEM_PROMPT = (
    "Find the value of both expressions, one after the other. calculator adds and subtracts numbers, lookup gives the "
    "number stored under a key such as k41. In every turn think of what you know and what comes next, then call one "
    "tool. With both values known reply <answer>first second</answer>."
)
_THOUGHT = "<think>\n{}.\n</think>\n\n"
_PHRASES = (SYSTEM_PROMPT, "<think>", "</think>", "Known: ", "Next: ", "\n\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingSolver(Solver):
    """Solves tasks with one call a turn; a wrong habit makes it guess a value instead of working it out.

    The habit `plan` says whether a key is looked up, `go_on` whether a sum is calculated; nothing is concluded.
    """

    @override
    def demonstrate(self, task: Task, renderer: Renderer) -> list[Leaf]:
        return trace_leaves(task, self.solve(task), renderer)

    @override
    def solve(self, task: Task) -> list[Turn]:
        turns: list[Turn] = []
        known: list[str] = []
        for part in task.parts:
            known.append(self._work_out(part, turns))
        turns.append(_with_thought(self._answer(known), "Known: " + ", ".join(known)))
        return turns

    def _work_out(self, part: Part, turns: list[Turn]) -> str:
        """Append the turns for one sum and return its value."""
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


def trace_leaves(task: Task, turns: Sequence[Turn], renderer: Renderer) -> list[Leaf]:
    """Return one leaf per turn: the chat before it, rendered anew, and the turn, which alone is trained."""
    messages = task.chat(SYSTEM_PROMPT)
    leaves = []
    for turn in turns:
        leaves.append(renderer.write(renderer.read(messages), turn.text))
        messages.append({"role": "assistant", "content": turn.text})
        messages.extend({"role": "tool", "content": result} for result in turn.results)
    return leaves


def build_thinking_tokenizer() -> PreTrainedTokenizerFast:
    """Return the demo's tokenizer with this recipe's phrases and a template that drops earlier thinking."""
    tokenizer = build_tokenizer(_PHRASES)
    tokenizer.chat_template = drop_thinking(CHAT_TEMPLATE)
    return tokenizer


def _with_thought(turn: Turn, thought: str) -> Turn:
    return replace(turn, text=_THOUGHT.format(thought) + turn.text)
