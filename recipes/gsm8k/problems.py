"""The stand-in for machines without GSM8K: word problems of its form, drawn and solved by code.

    Ada has 3 pens. Ben has 4 more than Ada. Cleo has 2 fewer than Ben. Dora has 8 more than Cleo. How many has Dora?

    Ben: 3 + 4 = 7
    Cleo: 7 - 2 = 5
    Dora: 5 + 8 = 13
    #### 13

The instruction behind the question and the marker before the answer are those of verl's preparation of GSM8K
(`examples/data_preprocess/gsm8k.py`). The problems are far easier, and none is of GSM8K.
"""

import random
from dataclasses import dataclass

DATA_SOURCE = "gsm8k_stand_in"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
NAMES = ("Ada", "Ben", "Cleo", "Dora", "Emil", "Finn", "Gina", "Hugo")
NUM_CHANGES = 3
MOST = 20
"""The most pens that anyone has. Everyone has one at least."""
MOST_MORE = 9
PHRASES = (
    *NAMES,
    f" {INSTRUCTION}",
    " has ",
    " pens. ",
    " more than ",
    " fewer than ",
    ". ",
    "How many has ",
    ": ",
    "#### ",
)
"""One token each, so a prompt is 34 tokens long and a solution 27."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A chain of people, each with some pens more or fewer than the one before.

    Attributes:
        names: In the order of the question.
        start: What the first one has.
        changes: What each of the others has more than the one before; negative for fewer.
    """

    names: tuple[str, ...]
    start: int
    changes: tuple[int, ...]

    @property
    def question(self) -> str:
        """The user's message without the instruction."""
        texts = [f"{self.names[0]} has {self.start} pens."]
        for before, name, change in zip(self.names, self.names[1:], self.changes, strict=False):
            texts.append(f"{name} has {abs(change)} {'more' if change > 0 else 'fewer'} than {before}.")
        return " ".join([*texts, f"How many has {self.names[-1]}?"])

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages that start a session."""
        return [{"role": "user", "content": f"{self.question} {INSTRUCTION}"}]

    @property
    def answer(self) -> str:
        """What the last one has."""
        return str(self.start + sum(self.changes))


def make_problems(num_problems: int, *, seed: int) -> list[Problem]:
    """Draw problems, a function of `seed`."""
    rng = random.Random(seed)
    return [_make_problem(rng) for _ in range(num_problems)]


def solve(problem: Problem, *, slip_rate: float, rng: random.Random) -> str:
    """Return a solution, a line for each change; with probability `slip_rate` a line is one or two too high.

    The lines after a slip go on from its result, so that the answer is wrong.
    """
    lines, value = [], problem.start
    for name, change in zip(problem.names[1:], problem.changes, strict=True):
        result = value + change
        if rng.random() < slip_rate:
            result += rng.randint(1, 2)
        lines.append(f"{name}: {value} {'+' if change > 0 else '-'} {abs(change)} = {result}")
        value = result
    return "\n".join([*lines, f"#### {value}"])


def _make_problem(rng: random.Random) -> Problem:
    names = tuple(rng.sample(NAMES, NUM_CHANGES + 1))
    start = value = rng.randint(1, MOST)
    changes = []
    for _ in range(NUM_CHANGES):
        change = rng.choice([each for each in range(-MOST_MORE, MOST_MORE + 1) if each and 1 <= value + each <= MOST])
        changes.append(change)
        value += change
    return Problem(names=names, start=start, changes=tuple(changes))
