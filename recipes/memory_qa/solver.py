"""A scripted solver whose turns are the supervised data of the warm start.

It decides from what a context shows and nothing else, as the model has to, and `Habits` says how often it decides
rightly. The contexts of its sessions are those of the agent loop: notes come from the same store by the same words.
"""

import asyncio
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from recipes.demo.leaves import Leaf, Message, Renderer
from recipes.demo.settings import Settings
from recipes.demo.solver import write_call
from recipes.demo.tokenizer import build_tokenizer
from recipes.demo.warm_start import save_taught_model
from recipes.memory_qa.tasks import NAMES, PHRASES, REQUEST, Task, fact_text, make_tasks
from rollout_hooks.loops.memory import MemoryAgentLoop
from rollout_hooks.loops.memory_store import MemoryStore, Note

MAX_NOTES = 2
"""Notes in a context, as in ``loops.yaml``."""
SIDE_FRACTION = 0.25
"""Share of the turns before the answer that are learnt from."""

_FACT = re.compile(rf"({'|'.join(NAMES)}) is (\d\d)")
_NAME = re.compile("|".join(NAMES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """Probability that each of the solver's decisions is right.

    Attributes:
        note: Whether a fact is kept, and kept whole.
        answer: Whether the answer is read off the notes.
    """

    note: float
    answer: float


SKILLED = Habits(note=1.0, answer=1.0)
MIXED = Habits(note=0.65, answer=0.9)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn: the messages that it sees, and what the model is to write, without the end-of-turn token."""

    context: list[Message]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Solver:
    """Solves tasks with notes."""

    habits: Habits
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    async def solve(self, task: Task) -> list[Turn]:
        """Return the session's turns, one for each of the task's inputs."""
        store = MemoryStore()
        turns: list[Turn] = []
        last_turn: list[Message] = []
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
        """Return the reply to a message (a fact, chatter or the question) in a context that shows `notes`."""
        fact = _FACT.search(given)
        if fact is not None:
            return self._keep(*fact.groups())
        asked = _NAME.findall(given)
        return self._answer(asked, notes) if asked else "ok"

    def _keep(self, name: str, age: str) -> str:
        if self._is_right(self.habits.note):
            return write_note(fact_text(name, int(age)))
        return "ok" if self.rng.random() < 0.5 else write_note(name)

    def _answer(self, asked: Sequence[str], notes: Sequence[str]) -> str:
        known = {fact[1]: fact[2] for note in notes if (fact := _FACT.fullmatch(note))}
        if not self._is_right(self.habits.answer):
            known = {}
        facts = [fact_text(name, int(known.get(name) or self.rng.randint(10, 99))) for name in asked]
        return f"<answer>{' and '.join(facts)}</answer>"

    def _is_right(self, probability: float) -> bool:
        return self.rng.random() < probability


def write_note(text: str) -> str:
    """Return the call that keeps a note, as the model writes it."""
    return write_call("memory_write", {"text": text})


def trace_leaves(turns: Sequence[Turn], renderer: Renderer) -> list[Leaf]:
    """Return the leaf of each turn, which ends a context of its own; only what the model writes is trained."""
    return [renderer.write(renderer.read(turn.context), turn.text) for turn in turns]


def teach(folder: Path, *, settings: Settings) -> None:
    """Make the model by a warm start on the solver's sessions."""
    warm = settings.warm_start
    assert warm is not None
    tokenizer = build_tokenizer(PHRASES)
    renderer = Renderer(tokenizer, MemoryAgentLoop.own_schemas)

    async def solve(solver: Solver, tasks: Sequence[Task]) -> list[list[Turn]]:
        return [await solver.solve(task) for task in tasks]

    def make_batch(step: int, is_skilled: bool) -> list[Leaf]:
        solver = Solver(habits=SKILLED if is_skilled else MIXED, rng=random.Random(step))
        tasks = make_tasks(warm.num_sessions, seed=settings.warm_start_seed + step)
        chosen: list[Turn] = []
        for *before, answer in asyncio.run(solve(solver, tasks)):
            chosen += [turn for turn in before if solver.rng.random() < SIDE_FRACTION]
            chosen.append(answer)
        return trace_leaves(chosen, renderer)

    save_taught_model(folder, tokenizer, settings=settings, make_batch=make_batch)


async def _choose_notes(store: MemoryStore, query: str) -> list[Note]:
    """Return a context's notes in the order of writing: by words, then the newest, as `MemoryAgentLoop` does."""
    ranked = [*await store.search(query, limit=MAX_NOTES), *await store.newest(limit=MAX_NOTES)]
    return sorted(list(dict.fromkeys(ranked))[:MAX_NOTES], key=lambda note: note.number)


def _shown(notes: Sequence[Note]) -> list[Message]:
    lines = ["Notes:", *(f"{note.number}. {note.text}" for note in notes)]
    return [{"role": "user", "content": "\n".join(lines)}] if notes else []


def _kept(text: str) -> str | None:
    """Return the note that a turn writes, or None."""
    call = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", text)
    return None if call is None else json.loads(call[1])["arguments"]["text"]
