"""A loop whose tool never answers from a chosen prompt on."""

import asyncio
from typing import Any

from typing_extensions import override

from rollout_hooks.loops.base import Branch, BranchingAgentLoop

FIRST_HANGING = 4
"""`extra_info.index` of the first prompt whose tool hangs: those of the first step end."""


class HangingLoop(BranchingAgentLoop):
    """A loop that generates, asks its tool, and generates again."""

    @override
    async def run_branches(self, root: Branch, **row: Any) -> None:
        await root.generate({"max_tokens": 4})
        if row["extra_info"]["index"] >= FIRST_HANGING:
            await asyncio.Event().wait()
        root.observe([3])
        await root.generate({"max_tokens": 4})
        root.finish(float(row["session_id"]))
