"""The agent loop `memory`: a long task in which every turn has a small context of its own.

    system, task ──┬── g ── turn 1 (writes notes)                                        leaf 1
                   ├── notes 1 ── turn 1, its results ── input 2 ── g ── turn 2          leaf 2
                   └── notes 2 ── turn 2, its results ── input 3 ── g ── answer          the session's final leaf

A turn sees the row's messages (system prompt and task), the notes that fit best, the last turn with its results, and
what the environment says next; nothing else. So no context grows with the task, and all contexts share the root prompt
up to where the notes begin. The model keeps what it will need with two tools, `memory_write` and `memory_search`,
beside the tools of the configuration. A turn that is copied into the next context is only read there: it is trained
once, on its own leaf.
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
from rollout_hooks.loops.turns import ToolTurn, text_tool

WRITE = text_tool("memory_write", "Keep a note. Anything that is not noted is forgotten.", "text", "The note.")
SEARCH = text_tool("memory_search", "Find notes that were kept earlier.", "query", "Words to look for.")


@register("memory")
class MemoryAgentLoop(ToolTurnsLoop):
    """Agent loop with a context per turn; see the module for the picture.

    A session ends with a turn that calls no tool when the environment has no more input, or with turn
    `rollout.multi_turn.max_assistant_turns`.

    Args:
        max_notes: Most notes that a context holds; fewer where they would not fit into `rollout.prompt_length`.
        max_found: Most notes that one `memory_search` returns.
        embed: Texts to vectors, for a search by meaning beside the one by words; see `memory_store`. None: words only.
        **kwargs: The options of `ToolTurnsLoop`, and what verl's worker gives.
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
        """Return what the environment says before a turn, say a chunk of a long text; override it.

        Args:
            row: The dataset row, `uid` and `session_id`.
            number: The number of the turn, from 1.

        Returns:
            The text of a user message, or None if there is nothing more to say.
        """

    async def turn_reward(self, *, row: dict[str, Any], turn: ToolTurn, number: int) -> float | None:
        """Return the reward of the leaf of a turn that is not the last; override it."""

    async def choose_notes(
        self, store: MemoryStore, *, row: dict[str, Any], last: ToolTurn | None, given: str | None
    ) -> list[Note]:
        """Return the notes of the next context, most useful first; override it for another choice.

        Here: those that fit the task, the last turn and the input by their words, then the newest ones.

        Args:
            store: The notes of the session.
            row: The dataset row, `uid` and `session_id`.
            last: The last turn, None before the first one.
            given: The input of the next turn, or None.
        """
        if self.max_notes == 0:
            return []
        task = str(row["raw_prompt"][-1]["content"])
        query = " ".join([given or "", task, last.text if last is not None else ""])
        found = await store.search(query, limit=self.max_notes)
        return list(dict.fromkeys([*found, *await store.newest(limit=self.max_notes)]))[: self.max_notes]

    def context(
        self, notes: Sequence[Note], *, row: dict[str, Any], last_turn: Sequence[dict[str, Any]], given: str | None
    ) -> list[dict[str, Any]]:
        """Return the messages of one context, what all contexts share first; override it for another form.

        Args:
            notes: The notes that were chosen, most useful first; shown in the order of writing.
            row: The dataset row, `uid` and `session_id`.
            last_turn: The last turn and the results of its calls, as messages; empty before the first turn.
            given: The input of this turn, or None.
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
                root.finish(await self.final_reward(row=row, answer=last.text))
                break
            answer = self.assistant_message(last, messages, row)
            results = await self.run_calls(root, last, tools=tools, history=[*messages, answer], row=row)
            if results is None:
                break
            last_turn = [answer, *results]
            (leaf,) = root.fork()
            leaf.finish(await self.turn_reward(row=row, turn=last, number=number))
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
            prompt_ids = await self.prompt_tokens(messages, tools=tools)
            # The least useful notes are left out until the context fits. The rest is kept whole: what is longer uses up
            # the response, and ends the branch if it leaves no room.
            if len(prompt_ids) <= self.prompt_length or not notes:
                root.restart(prompt_ids, keep_tool_rewards=True)
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
