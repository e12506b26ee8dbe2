"""The tasks: sums of four numbers and products of two from reasoning-gym, and how a solver takes them.

A sum is halved. Both halves are called in one turn, then the calculator adds what came back:

    What is 54 - 13 + 87 + 22?      54 - 13 and 87 + 22, then 41 + 109
    What is 38 * 27?                38 * 27
"""

from collections.abc import Iterator
from dataclasses import dataclass

from reasoning_gym import create_dataset

from recipes.calculator.system_prompt import SYSTEM_PROMPT
from recipes.demo.solver import Turn, value_of, write_call
from recipes.demo.tasks import CONCLUSION
from recipes.demo.tools import Calculator

LEVELS = {
    "sums_2_digits": ("chain_sum", 4, 2),
    "products_2_digits": ("products", 2, 2),
    "sums_3_digits": ("chain_sum", 4, 3),
    "products_3_digits": ("products", 2, 3),
}
"""reasoning-gym's name, numbers of a task and digits of a number."""
TRAINED = ("sums_2_digits", "products_2_digits")
"""Levels of the solved trees and of reinforcement. Validations ask every level."""


@dataclass(frozen=True, slots=True)
class Task:
    """An expression of numbers with ``+`` and ``-``, or with ``*``, and its value."""

    level: str
    expression: str
    answer: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages that start a session."""
        user = {"role": "user", "content": f"What is {self.expression}?"}
        return [{"role": "system", "content": SYSTEM_PROMPT}, user]


def make_tasks(num_tasks: int, *, level: str, seed: int) -> Iterator[Task]:
    """Yield tasks of one level, a function of the arguments.

    reasoning-gym seeds its entry i with ``seed + i``, so two calls share no entry when their seeds differ by at least
    the larger `num_tasks`.
    """
    name, num_terms, num_digits = LEVELS[level]
    sizes = {"min_terms": num_terms, "max_terms": num_terms, "min_digits": num_digits, "max_digits": num_digits}
    for entry in create_dataset(name, **sizes, size=num_tasks, seed=seed):
        yield Task(level, entry["metadata"]["expression"], entry["answer"])


def solve(task: Task, *, calculator: Calculator) -> list[Turn]:
    """Return the turns of a session that is right, the last one an answer."""
    turns = [_call(_halves(task.expression), calculator=calculator)]
    if len(turns[0].results) == 2:
        first, second = map(value_of, turns[0].results)
        turns.append(_call([f"{first} + {second}"], calculator=calculator))
    return [*turns, Turn(text=f"<answer>{value_of(turns[-1].results[0])}</answer>")]


def _halves(expression: str) -> list[str]:
    """Return the halves of a sum of four, a leading plus left out, or the expression if it has two numbers."""
    parts = expression.split()
    if len(parts) == 3:
        return [expression]
    *first, sign, third, last_sign, fourth = parts
    return [" ".join(first), f"{'-' if sign == '-' else ''}{third} {last_sign} {fourth}"]


def _call(expressions: list[str], *, calculator: Calculator) -> Turn:
    arguments = [{calculator.argument: each} for each in expressions]
    results = tuple(map(calculator.answer, arguments))
    return Turn(
        text="\n".join(write_call(calculator.function_name, each) for each in arguments),
        results=results,
        conclusions=tuple(f"{CONCLUSION}{value_of(each)}" for each in results) if len(results) > 1 else (),
    )
