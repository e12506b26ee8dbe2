"""A scripted solver whose sessions, branches included, are the supervised data of the warm start.

It uses the real tools and decides like a model would: what to call, what to conclude in a branch, whether a
second call is needed, what to answer. `Habits` says how often each decision is right, so the same solver shows
the skill (nearly always right) and the mixed behaviour from which reinforcement learning has something to
choose. A session becomes token sequences through verl's Continuous Token builder, as in the agent loop.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from recipes.arithmetic_tools.settings import Habits
from recipes.arithmetic_tools.tasks import CONCLUSION, Part, Task
from recipes.arithmetic_tools.tools import OneArgumentTool


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant turn.

    Attributes:
        text: what the model is to write, without the end-of-turn token.
        results: the tools' texts, one for each call in `text`.
        conclusions: what each call's branch is to write; empty unless there are several calls.
    """

    text: str
    results: tuple[str, ...] = ()
    conclusions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Leaf:
    """One trajectory; `trained` marks the tokens that the model is to learn (1) and the others (0)."""

    token_ids: list[int]
    trained: list[int]


class TokenBuilder(Protocol):
    """The part of verl's Continuous Token builder that is used here."""

    def build_initial_tokens(self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]]) -> list[int]:
        """Renders the prompt."""

    def merge_context_tokens(
        self,
        previous_messages: list[dict[str, Any]],
        updated_messages: list[dict[str, Any]],
        runtime_token_ids: list[int],
        *,
        tools: list[dict[str, Any]],
    ) -> Any:
        """Appends messages; the result's ``token_ids`` is the whole sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solver:
    """Solves tasks with the calculator and the lookup memory.

    Attributes:
        calculator: the real tool.
        lookup: the real tool.
        habits: how often the decisions are right.
    """

    calculator: OneArgumentTool
    lookup: OneArgumentTool
    habits: Habits
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def solve(self, task: Task) -> list[Turn]:
        """Returns the session's turns, the last one an answer."""
        if not self._is_right(self.habits.plan):
            return self._plan_badly(task)
        calls = [
            (self.lookup, part.key) if part.key is not None else (self.calculator, part.shown) for part in task.parts
        ]
        turns = [self._call(calls)]
        values = [value_of(result) for result in turns[0].results]
        stored = next(i for i, part in enumerate(task.parts) if part.key is not None)
        if self._is_right(self.habits.go_on):
            turns.append(self._call([(self.calculator, task.parts[stored].expression)]))
            values[stored] = value_of(turns[-1].results[0])
        turns.append(self._answer(values))
        return turns

    def _plan_badly(self, task: Task) -> list[Turn]:
        choice = self.rng.randrange(3)
        if choice == 0:
            return [self._answer([self._guess(), self._guess()])]
        if choice == 1:
            turn = self._call([(self.calculator, part.shown) for part in task.parts])
        else:
            plain = next(part for part in task.parts if part.key is None)
            turn = self._call([(self.calculator, plain.shown)])
        known = next(result for result in turn.results if not result.startswith("error"))
        values = [self._value_or_guess(part, known) for part in task.parts]
        return [turn, self._answer(values)]

    def _call(self, calls: Sequence[tuple[OneArgumentTool, str]]) -> Turn:
        texts = [
            _TOOL_CALL.format(json.dumps({"name": tool.name, "arguments": {tool.argument: value}}))
            for tool, value in calls
        ]
        results = tuple(tool.answer({tool.argument: value}) for tool, value in calls)
        conclusions = tuple(self._conclude(result) for result in results) if len(calls) > 1 else ()
        return Turn(text="\n".join(texts), results=results, conclusions=conclusions)

    def _conclude(self, result: str) -> str:
        is_right = self._is_right(self.habits.conclude) and not result.startswith("error")
        return CONCLUSION + (value_of(result) if is_right else self._guess())

    def _answer(self, values: list[str]) -> Turn:
        if not self._is_right(self.habits.answer):
            values = values[::-1] if self.rng.random() < 0.5 else [self._guess(), values[1]]
        return Turn(text=f"<answer>{' '.join(values)}</answer>")

    def _value_or_guess(self, part: Part, known: str) -> str:
        return value_of(known) if part.key is None else self._guess()

    def _guess(self) -> str:
        return str(self.rng.randint(-60, 160))

    def _is_right(self, probability: float) -> bool:
        return self.rng.random() < probability


def trace_leaves(
    task: Task, turns: Sequence[Turn], *, builder: TokenBuilder, tokenizer: Any, tools: list[dict[str, Any]]
) -> list[Leaf]:
    """Renders a session as the agent loop would have produced it.

    Args:
        task: what the prompt asks.
        turns: the session.
        builder: verl's Continuous Token builder of the model.
        tokenizer: the model's tokenizer.
        tools: the schemas that the prompt shows.

    Returns:
        The leaves, in order of appearance: one per branch and, last, the main one. A token that several leaves
        share is trained in the main leaf only.
    """
    messages: list[dict[str, Any]] = list(task.messages)
    main = Leaf(token_ids=builder.build_initial_tokens(messages, tools=tools), trained=[])
    main.trained.extend([0] * len(main.token_ids))
    leaves = []
    for turn in turns:
        main = write_turn(main, turn.text, tokenizer=tokenizer)
        if not turn.results:
            break
        asked = [*messages, {"role": "assistant", "content": turn.text}]
        answers = [{"role": "tool", "content": result} for result in turn.results]
        for answer, conclusion in zip(answers, turn.conclusions, strict=False):
            seen = builder.merge_context_tokens(asked, [*asked, answer], main.token_ids, tools=tools).token_ids
            branch = Leaf(token_ids=seen, trained=[0] * len(seen))
            leaves.append(write_turn(branch, conclusion, tokenizer=tokenizer))
        messages = [*asked, *answers]
        seen = builder.merge_context_tokens(asked, messages, main.token_ids, tools=tools).token_ids
        main = Leaf(token_ids=seen, trained=main.trained + [0] * (len(seen) - len(main.trained)))
    return [*leaves, main]


_TOOL_CALL = "<tool_call>\n{}\n</tool_call>"


def value_of(result: str) -> str:
    """The value in a tool's text, ``107`` in ``84 + 23 = 107``."""
    return result.rpartition(" = ")[2]


def write_turn(leaf: Leaf, text: str, *, tokenizer: Any) -> Leaf:
    """Returns the leaf with a turn of the model and its end token behind it, both to be learnt."""
    written = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    return Leaf(token_ids=leaf.token_ids + written, trained=leaf.trained + [1] * len(written))
