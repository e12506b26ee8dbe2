"""The task: facts come one message at a time, each is gone one turn later, and the last message asks for two of them.

    Emil is 53.    Hugo is 61.    Nora is 28.    Ada is 94.    The kettle boils.    How old are Emil and Nora?

The answer is ``<answer>Emil is 53 and Nora is 28</answer>``. Which facts will be asked for is not known while they
arrive. Small talk comes before the question, so that the last turn, which a context does show, holds no fact.
"""

import random
from dataclasses import dataclass

from reasoning_gym.utils import extract_answer

DATA_SOURCE = "memory_qa"
SYSTEM_PROMPT = (
    "Messages come one at a time, and you see each of them only once. Keep every fact, such as 'Emil is 53', as a note "
    "of just these words with memory_write; your notes are shown to you later. To a message without a fact reply 'ok'. "
    "Asked 'How old are Emil and Nora?', reply <answer>Emil is 53 and Nora is 28</answer>."
)
REQUEST = "Here they come."
QUESTION = "How old are {}?"
CHATTER = (
    "The kettle boils.",
    "It rains again.",
    "Lunch was late.",
    "Somebody left the window open.",
    "The tram was full.",
    "Good morning.",
)
NAMES = (
    "Ada", "Ben", "Cleo", "Dora", "Emil", "Finn", "Gina", "Hugo",
    "Ines", "Jan", "Kira", "Lars", "Mia", "Nora", "Otto", "Paul",
)  # fmt: skip
NUM_FACTS = 4
NUM_ASKED = 2
PHRASES = (
    *(f"{role}\n" for role in ("user", "assistant")),
    f"system\n{SYSTEM_PROMPT}\nmemory_write\nmemory_search",
    f"user\n{REQUEST}",
    "user\nNotes:\n",
    *CHATTER,
    *NAMES,
    "How old are ",
    " is ",
    " and ",
    ". ",
    '<tool_call>\n{"name": "memory_write", "arguments": {"text": "',
    '"}}\n</tool_call>',
    "user\n<tool_response>\nKept as note ",
    ".\n</tool_response>",
    "ok",
)
"""One token each, so a leaf is 20 to 54 tokens long, and a turn that keeps a note six, of which three are decided."""

_YOUNGEST, _OLDEST = 10, 99


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One session's messages and what is asked.

    Attributes:
        ages: By name, in the order of the messages.
        inputs: The user's messages, one a turn; the last one is the question.
        answer: The facts asked for, in the order of the messages: ``Emil is 53 and Nora is 28``.
    """

    ages: dict[str, int]
    inputs: tuple[str, ...]
    answer: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages that start every context."""
        return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": REQUEST}]


def fact_text(name: str, age: int) -> str:
    """Return a fact as a message says it and a note keeps it: ``Emil is 53``."""
    return f"{name} is {age}"


def make_tasks(num_tasks: int, *, seed: int) -> list[Task]:
    """Draw tasks, a function of `seed`."""
    rng = random.Random(seed)
    return [_make_task(rng) for _ in range(num_tasks)]


def score_answer(completion: str, *, answer: str) -> float:
    """Return 1.0 when the last ``<answer>`` of `completion` is `answer`, white space around it aside, else 0.0."""
    given = extract_answer(completion)
    return float(given is not None and given.strip() == answer)


def _make_task(rng: random.Random) -> Task:
    names: list[str] = rng.sample(NAMES, NUM_FACTS)
    ages = dict(zip(names, rng.sample(range(_YOUNGEST, _OLDEST + 1), NUM_FACTS), strict=True))
    # In the order of arrival, which is that of the notes: the model has to read notes, not to sort them.
    asked = sorted(rng.sample(names, NUM_ASKED), key=names.index)
    facts = [f"{fact_text(name, age)}." for name, age in ages.items()]
    return Task(
        ages=ages,
        inputs=(*facts, rng.choice(CHATTER), QUESTION.format(" and ".join(asked))),
        answer=" and ".join(fact_text(name, ages[name]) for name in asked),
    )
