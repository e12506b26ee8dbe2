"""An agent loop worker whose sessions wait for ever; Ray's processes import it from here."""

import asyncio
import os
import time
from typing import Any

import ray
from typing_extensions import override
from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
from worker_cases import InProcessWorker, prompt_of

from rollout_hooks.loops.base import Branch, BranchingAgentLoop


class AskingLoop(BranchingAgentLoop):
    """A loop whose tool never answers; with `blocks`, it never gives the event loop back either."""

    def __init__(self, *args: Any, blocks: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.blocks = blocks

    @override
    async def run_branches(self, root: Branch, **row: Any) -> None:
        await root.generate()
        if self.blocks:
            time.sleep(300)
        await asyncio.Event().wait()


class BackgroundWorkerBase(InProcessWorker):
    """A worker that starts sessions and returns, as verl's does with those of its batch."""

    def __init__(self) -> None:
        super().__init__(lambda _: "a")
        print("the worker wrote this", flush=True)

    async def generate_sequences(self, *, num_sessions: int, blocks: bool) -> int:
        """Return the process's id; the sessions go on."""
        _agent_loop_registry["asking"] = {"_target_": f"{__name__}.AskingLoop", "blocks": blocks}
        self.task = asyncio.create_task(prompt_of(self, num_sessions=num_sessions, agent_name="asking"))
        return os.getpid()


BackgroundWorker = ray.remote(BackgroundWorkerBase)
