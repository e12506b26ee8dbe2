"""The task: two sums in random order, one with an operand that only a lookup memory knows.

    84 + 23; k41 - 17

``k41`` is a key of the memory, which holds every two-digit number once under a shuffled key. If it holds 53 there, the
answer is ``<answer>107 36</answer>``. Numbers, answers and the verifier are those of reasoning-gym's ``chain_sum``.
"""

import random
import re
from dataclasses import dataclass
from typing import Any

from reasoning_gym import create_dataset
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.utils import extract_answer

DATA_SOURCE = "arithmetic_tools"
CONCLUSION = "Partial result: "
SYSTEM_PROMPT = (
    "Find the value of both expressions. calculator adds and subtracts numbers, lookup gives the number stored "
    "under a key such as k41. Call the tools that you can call now in one turn, in the order of the expressions. "
    "Shown the result of only one of several calls, reply 'Partial result: ' and its value. "
    "With both values known reply <answer>first second</answer>."
)

_FIRST_NUMBER, _LAST_NUMBER = 10, 99
_CONCLUSION_PATTERN = re.compile(re.escape(CONCLUSION) + r"(-?\d+)\.?\s*$")


@dataclass(frozen=True, slots=True)
class Part:
    """One expression of a task.

    Attributes:
        shown: What the prompt says, such as ``k41 - 17``.
        expression: The same with the stored number filled in, ``53 - 17``.
        answer: Its value as text, ``36``.
        key: The key that `shown` mentions, or None.
    """

    shown: str
    expression: str
    answer: str
    key: str | None


@dataclass(frozen=True, slots=True)
class Task:
    """Two expressions, exactly one of them with a stored operand."""

    parts: tuple[Part, Part]

    @property
    def question(self) -> str:
        """The user's message."""
        return "; ".join(part.shown for part in self.parts)

    @property
    def answer(self) -> str:
        """The values in the order of the expressions, separated by a space."""
        return " ".join(part.answer for part in self.parts)

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages that start a session."""
        return self.chat(SYSTEM_PROMPT)

    def chat(self, system_prompt: str) -> list[dict[str, str]]:
        """Return the messages that start a session, with another system prompt."""
        return [{"role": "system", "content": system_prompt}, {"role": "user", "content": self.question}]


def make_memory(*, seed: int) -> dict[str, int]:
    """Return the stored numbers: keys ``k10`` to ``k99`` with a permutation of 10 to 99."""
    numbers = list(range(_FIRST_NUMBER, _LAST_NUMBER + 1))
    values = numbers.copy()
    random.Random(seed).shuffle(values)
    return {f"k{number}": value for number, value in zip(numbers, values, strict=True)}


def make_tasks(num_tasks: int, *, memory: dict[str, int], seed: int) -> list[Task]:
    """Draw tasks, a function of the arguments.

    reasoning-gym seeds its entry i with ``seed + i``, and a task takes two entries: two calls share no entry when their
    seeds differ by at least twice the larger `num_tasks`.
    """
    key_of = {value: key for key, value in memory.items()}
    entries = _chain_sums(size=2 * num_tasks, seed=seed)
    rng = random.Random(seed)
    tasks = []
    for index in range(num_tasks):
        stored_part = rng.randrange(2)
        first, second = (_make_part(entries[2 * index + i], key_of=key_of, stored=i == stored_part) for i in range(2))
        tasks.append(Task(parts=(first, second)))
    return tasks


def score_answer(completion: str, *, answer: str) -> float:
    """Return 1.0 when the last ``<answer>`` of `completion` gives the values of `answer` in their order, else 0.0."""
    given = extract_answer(completion)
    if given is None:
        return 0.0
    expected_values, given_values = answer.split(), re.split(r"[,;\s]+", given)
    if len(given_values) != len(expected_values):
        return 0.0
    verifier = _chain_sums(size=1, seed=0)
    scores = [
        verifier.score_answer(value, {"answer": expected})
        for value, expected in zip(given_values, expected_values, strict=True)
    ]
    return float(all(score == 1.0 for score in scores))


def score_conclusion(conclusion: str, *, result: str) -> float:
    """Return 1.0 when `conclusion` states the value of a tool's `result`, else 0.0; an error has no value.

    For the result ``84 + 23 = 107`` the conclusion ``Partial result: 107`` is right.
    """
    stated = _CONCLUSION_PATTERN.search(conclusion)
    _, equals, value = result.rpartition(" = ")
    return float(stated is not None and equals != "" and stated.group(1) == value)


def _chain_sums(*, size: int, seed: int) -> ProceduralDataset:
    return create_dataset("chain_sum", min_terms=2, max_terms=2, min_digits=2, max_digits=2, size=size, seed=seed)


def _make_part(entry: dict[str, Any], *, key_of: dict[int, str], stored: bool) -> Part:
    expression = entry["metadata"]["expression"]
    if not stored:
        return Part(shown=expression, expression=expression, answer=entry["answer"], key=None)
    stored_number, rest = expression.split(" ", 1)
    key = key_of[int(stored_number)]
    return Part(shown=f"{key} {rest}", expression=expression, answer=entry["answer"], key=key)
