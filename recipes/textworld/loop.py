"""The agent loop: one command a turn, and a context that begins anew when the history is rewritten.

All leaves of a session earn what its last one does: 1 if the task was done.
"""

import asyncio
from pathlib import Path
from typing import Any

from typing_extensions import override

from recipes.textworld.games import NUM_KEPT, Play, Step, chat
from rollout_hooks.loops.base import Branch, BranchingAgentLoop


class TextWorldLoop(BranchingAgentLoop):
    """Plays the game at ``extra_info.game`` of a row, with at most ``extra_info.max_commands``.

    Args:
        max_command_len: Tokens of a command.
    """

    def __init__(self, *args: Any, max_command_len: int = 24, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.max_command_len = max_command_len

    @override
    async def run_branches(self, root: Branch, **row: Any) -> None:
        path, max_commands = Path(row["extra_info"]["game"]), row["extra_info"]["max_commands"]
        with await asyncio.to_thread(Play, path) as play:
            steps: list[Step] = []
            while True:
                output = await root.generate({"max_tokens": self.max_command_len})
                if root.failure is not None:
                    return
                command = self.tokenizer.decode(output.token_ids, skip_special_tokens=True).strip()
                steps.append(Step(play.seen, command))
                await asyncio.to_thread(play.give, command)
                if play.is_won or len(steps) == max_commands or not await self._go_on(root, play, steps):
                    return root.finish(float(play.is_won))

    async def _go_on(self, root: Branch, play: Play, steps: list[Step]) -> bool:
        """Let the branch read what the player sees; return whether there is room for another command."""
        messages = chat(play.task, steps, seen=play.seen)
        if len(steps) % NUM_KEPT:
            return await self.observe_messages(root, messages[-1:], history=messages[:-1])
        (leaf,) = root.fork()
        leaf.finish()
        root.restart(await self.prompt_tokens(messages))
        return True
