"""The agent loop `memory`: a long task in which every turn has a small context of its own.

    system, task ──┬── g ── turn 1 (writes notes)                                        leaf 1
                   ├── notes 1 ── turn 1, its results ── input 2 ── g ── turn 2          leaf 2
                   └── notes 2 ── turn 2, its results ── input 3 ── g ── answer          the session's final leaf

A turn sees only the row's messages (system prompt and task), the notes that fit best, the last turn with its results,
and the next input of the environment. So contexts do not grow with the task, and they share the root prompt up to the
notes. The model keeps what it will need with two tools, `memory_write` and `memory_search`. A turn that the next
context quotes is only read there: it is trained once, on its own leaf.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from typing_extensions import override
from verl.experimental.agent_loop.agent_loop import register
from verl.tools.function_tool import FunctionTool

from rollout_hooks.loops.base import Branch, check_at_least
from rollout_hooks.loops.memory_store import Embed, MemoryStore, Note
from rollout_hooks.loops.tool_turns import ToolTurnsLoop
from rollout_hooks.loops.turns import ToolTurn, text_of_content, text_tool

WRITE = text_tool("memory_write", "Keep a note. Anything that is not noted is forgotten.", "text", "The note.")
SEARCH = text_tool("memory_search", "Find notes that were kept earlier.", "query", "Words to look for.")


@register("memory")
class MemoryAgentLoop(ToolTurnsLoop):
    """Agent loop with a context per turn. docs/agent_loops.md explains its options.

    A session ends with turn `rollout.multi_turn.max_assistant_turns`, or before it with a turn that calls no tool when
    the environment has no more input.
    """

    own_schemas = (WRITE, SEARCH)
    endless_because = "the contexts of the memory loop never grow full"

    def __init__(
        self, *args: Any, max_notes: int = 4, max_found: int = 4, embed: Embed | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        check_at_least(0, " (0 leaves notes to memory_search)", max_notes=max_notes)
        check_at_least(1, max_found=max_found)
        self.max_notes, self.max_found, self.embed = max_notes, max_found, embed

    async def turn_input(self, *, row: dict[str, Any], number: int) -> str | None:
        """Return the user message before turn `number` (from 1), say a chunk of a long text, or None; override it."""

    async def turn_reward(self, *, row: dict[str, Any], turn: ToolTurn, number: int) -> float | None:
        """Return the reward of the leaf of a turn that is not the last; override it."""

    async def choose_notes(
        self, store: MemoryStore, *, row: dict[str, Any], last: ToolTurn | None, given: str | None
    ) -> list[Note]:
        """Return the notes of the next context, most useful first; override it for another choice.

        Here: the notes that best fit the words of the task, the last turn and the input `given`, then the newest ones.
        `last` is None before the first turn.
        """
        if self.max_notes == 0:
            return []
        task = text_of_content(row["raw_prompt"][-1]["content"])
        query = " ".join([given or "", task, last.text if last is not None else ""])
        found = await store.search(query, limit=self.max_notes)
        return list(dict.fromkeys([*found, *await store.newest(limit=self.max_notes)]))[: self.max_notes]

    def context(
        self, notes: Sequence[Note], *, row: dict[str, Any], last_turn: Sequence[dict[str, Any]], given: str | None
    ) -> list[dict[str, Any]]:
        """Return the messages of one context, what all contexts share first; override it for another form.

        `notes` come most useful first and are shown in the order of writing. `last_turn` is the last turn with the
        results of its calls, empty before the first turn. `given` is the input of this turn.
        """
        lines = [f"{note.number}. {note.text}" for note in sorted(notes, key=lambda note: note.number)]
        messages = list(row["raw_prompt"])
        if lines:
            messages.append({"role": "user", "content": "\n".join(["Notes:", *lines])})
        messages += last_turn
        return messages if given is None else [*messages, {"role": "user", "content": given}]

    @override
    async def run_branches(self, root: Branch, **row: Any) -> None:
        store = MemoryStore(embed=self.embed)
        tools = self.row_tools(row) | self._own_tools(store)
        last: ToolTurn | None = None
        last_turn: list[dict[str, Any]] = []
        given = await self.turn_input(row=row, number=1)
        for number in itertools.count(1):
            notes = await self.choose_notes(store, row=row, last=last, given=given)
            messages = await self._restart(root, notes, row=row, last_turn=last_turn, given=given)
            last = await self.take_turn(root, tools=tools)
            if last is None:
                break
            given = await self.turn_input(row=row, number=number + 1)
            if self.is_last_turn(number) or not (last.calls or given):
                root.finish(await self.final_reward(row=row, answer=last.text), role=self.role("answer"))
                break
            answer = self.assistant_message(last, messages, row)
            results = await self.run_calls(root, last, tools=tools, history=[*messages, answer], row=row)
            if results is None:
                break
            last_turn = [answer, *results]
            (leaf,) = root.fork(shares_environment=True)
            leaf.finish(await self.turn_reward(row=row, turn=last, number=number), role=self.role("turn"))
        store.close()

    async def _restart(
        self,
        root: Branch,
        notes: list[Note],
        *,
        row: dict[str, Any],
        last_turn: list[dict[str, Any]],
        given: str | None,
    ) -> list[dict[str, Any]]:
        """Put the branch at the end of the next context and return its messages."""
        tools = self.prompt_tools(**row)
        while True:
            messages = self.context(notes, row=row, last_turn=last_turn, given=given)
            images = await self.prompt_images(messages)
            prompt_ids = await self.prompt_tokens(messages, tools=tools, images=images)
            # Leave out the least useful notes until the context fits. Nothing else is cut: a longer context uses up the
            # response, and the branch ends if no room is left.
            if len(prompt_ids) <= self.prompt_length or not notes:
                root.restart(prompt_ids, images=images, keep_tool_rewards=True)
                return messages
            notes = notes[:-1]

    def _own_tools(self, store: MemoryStore) -> dict[str, FunctionTool]:
        async def write(text: str) -> str:
            note = await store.write(str(text))
            return f"Kept as note {note.number}."

        async def search(query: str) -> str:
            found = await store.search(str(query), limit=self.max_found)
            return "\n".join(f"{note.number}. {note.text}" for note in found) or "No note has any of these words."

        return {
            "memory_write": FunctionTool("memory_write", write, WRITE, is_async=True),
            "memory_search": FunctionTool("memory_search", search, SEARCH, is_async=True),
        }
