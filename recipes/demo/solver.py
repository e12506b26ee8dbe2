"""A scripted solver whose sessions, branches included, are the supervised data of the warm start.

It uses the real tools and decides as a model would: what to call, what to conclude in a branch, whether a second call
is needed, what to answer. `Habits` says how often each decision is right. So the same solver shows the skill (always
right) and the mixed behaviour that reinforcement learning can choose from.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from recipes.demo.leaves import Leaf, Message, Renderer
from recipes.demo.tasks import CONCLUSION, Part, Task
from recipes.demo.tools import OneArgumentTool

BRANCH_FRACTION = 0.25
"""Share of the branches that are learnt from: a branch costs a whole row and trains few tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """Probability that each of the solver's decisions is right.

    Attributes:
        plan: What to call first.
        conclude: What a branch states.
        go_on: Whether another call is needed once the first results are there.
        answer: What the final answer says.
    """

    plan: float
    conclude: float
    go_on: float
    answer: float


SKILLED = Habits(plan=1.0, conclude=1.0, go_on=1.0, answer=1.0)
MIXED = Habits(plan=0.5, conclude=0.7, go_on=0.7, answer=0.7)


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant turn.

    Attributes:
        text: What the model is to write, without the end-of-turn token.
        results: The tools' texts, one for each call in `text`.
        conclusions: What each call's branch is to write; empty unless there are several calls.
    """

    text: str
    results: tuple[str, ...] = ()
    conclusions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Solver:
    """Solves tasks with the two tools."""

    calculator: OneArgumentTool
    lookup: OneArgumentTool
    habits: Habits
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def demonstrate(self, task: Task, renderer: Renderer) -> list[Leaf]:
        """Return what is to be learnt from one session: its main leaf and some of its branches."""
        *branches, main = trace_leaves(task.messages, self.solve(task), renderer)
        return [main, *(branch for branch in branches if self._is_right(BRANCH_FRACTION))]

    def solve(self, task: Task) -> list[Turn]:
        """Return the session's turns, the last one an answer."""
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
        texts = [write_call(tool.name, {tool.argument: value}) for tool, value in calls]
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


def trace_leaves(messages: Sequence[Message], turns: Sequence[Turn], renderer: Renderer) -> list[Leaf]:
    """Return the leaves of a session that starts with `messages`: one per branch and, last, the main one.

    A token that several leaves share is trained in the main leaf only.
    """
    main = renderer.read(messages)
    branches = []
    for turn in turns:
        main = renderer.write(main, turn.text)
        if not turn.results:
            break
        messages = [*messages, {"role": "assistant", "content": turn.text}]
        answers: list[Message] = [{"role": "tool", "content": result} for result in turn.results]
        shared = Leaf(main.token_ids, [0] * len(main.token_ids))
        for answer, conclusion in zip(answers, turn.conclusions, strict=False):
            branches.append(renderer.write(renderer.read_on(shared, messages, [answer]), conclusion))
        main = renderer.read_on(main, messages, answers)
        messages = [*messages, *answers]
    return [*branches, main]


def write_call(name: str, arguments: dict[str, str]) -> str:
    """Return a call of a tool as the model writes it."""
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def value_of(result: str) -> str:
    """Return the value in a tool's text, ``107`` in ``84 + 23 = 107``."""
    return result.rpartition(" = ")[2]
