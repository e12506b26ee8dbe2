"""A scripted solver whose turns are the supervised data of the warm start.

It decides from what a context shows and nothing else, as the model has to, and `Habits` says how often it decides
rightly. The contexts of its sessions are those of the agent loop: notes come from the same store by the same words.
"""

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from recipes.arithmetic_tools.solver import Leaf, TokenBuilder, write_turn
from recipes.memory_qa.settings import MAX_NOTES, Habits
from recipes.memory_qa.tasks import NAMES, REQUEST, Task, fact_text
from rollout_hooks.loops.memory_store import MemoryStore, Note

_FACT = re.compile(rf"({'|'.join(NAMES)}) is (\d\d)")
_NAME = re.compile("|".join(NAMES))


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn.

    Attributes:
        context: The messages that the turn sees.
        text: What the model is to write, without the end-of-turn token.
    """

    context: list[dict[str, str]]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Solver:
    """Solves tasks with notes.

    Attributes:
        habits: How often the decisions are right.
        rng: Decides, and guesses.
    """

    habits: Habits
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    async def solve(self, task: Task) -> list[Turn]:
        """Returns the session's turns, one for each of the task's inputs."""
        store = MemoryStore()
        turns: list[Turn] = []
        last_turn: list[dict[str, str]] = []
        for given in task.inputs:
            query = " ".join([given, REQUEST, turns[-1].text if turns else ""])
            notes = await _choose_notes(store, query)
            context = [*task.messages, *_shown(notes), *last_turn, {"role": "user", "content": given}]
            turns.append(Turn(context, self.reply(given, notes=[note.text for note in notes])))
            last_turn = [{"role": "assistant", "content": turns[-1].text}]
            kept = _kept(turns[-1].text)
            if kept is not None:
                note = await store.write(kept)
                last_turn.append({"role": "tool", "content": f"Kept as note {note.number}."})
        store.close()
        return turns

    def reply(self, given: str, *, notes: Sequence[str]) -> str:
        """Returns the text of a turn.

        Args:
            given: The turn's message: a fact, chatter or the question.
            notes: The notes that its context shows.
        """
        fact = _FACT.search(given)
        if fact is not None:
            return self._keep(*fact.groups())
        asked = _NAME.findall(given)
        return self._answer(asked, notes) if asked else "ok"

    def _keep(self, name: str, age: str) -> str:
        if self._is_right(self.habits.note):
            return _write_call(fact_text(name, int(age)))
        return "ok" if self.rng.random() < 0.5 else _write_call(name)

    def _answer(self, asked: Sequence[str], notes: Sequence[str]) -> str:
        known = dict(fact.groups() for note in notes if (fact := _FACT.fullmatch(note)))
        if not self._is_right(self.habits.answer):
            known = {}
        facts = [fact_text(name, int(known.get(name) or self.rng.randint(10, 99))) for name in asked]
        return f"<answer>{' and '.join(facts)}</answer>"

    def _is_right(self, probability: float) -> bool:
        return self.rng.random() < probability


def trace_leaves(
    turns: Sequence[Turn], *, builder: TokenBuilder, tokenizer: Any, tools: list[dict[str, Any]]
) -> Iterator[Leaf]:
    """Renders turns as the agent loop would have produced them, each the leaf of a context of its own.

    Args:
        turns: All of a session's turns, or some.
        builder: verl's Continuous Token builder of the model.
        tokenizer: The model's tokenizer.
        tools: The schemas that the prompt shows.

    Yields:
        Leaves in the order of the turns; trained is what the model writes, its end of turn included.
    """
    for turn in turns:
        seen = builder.build_initial_tokens(turn.context, tools=tools)
        yield write_turn(Leaf(token_ids=seen, trained=[0] * len(seen)), turn.text, tokenizer=tokenizer)


async def _choose_notes(store: MemoryStore, query: str) -> list[Note]:
    """The notes of a context in the order of writing: by words, then the newest, as `MemoryAgentLoop` chooses them."""
    ranked = [*await store.search(query, limit=MAX_NOTES), *await store.newest(limit=MAX_NOTES)]
    return sorted(list(dict.fromkeys(ranked))[:MAX_NOTES], key=lambda note: note.number)


def _shown(notes: Sequence[Note]) -> list[dict[str, str]]:
    lines = ["Notes:", *(f"{note.number}. {note.text}" for note in notes)]
    return [{"role": "user", "content": "\n".join(lines)}] if notes else []


def _write_call(text: str) -> str:
    call = {"name": "memory_write", "arguments": {"text": text}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def _kept(text: str) -> str | None:
    """The note that a turn writes, or None."""
    call = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", text)
    return None if call is None else json.loads(call[1])["arguments"]["text"]
