"""The agent loop `parallel_tools`: every tool call of a turn is also concluded alone, in a branch of its own.

    prompt ── assistant turn with calls 1..k ──┬── result 1 ── conclusion        leaf 1
                                               ├── ...
                                               ├── result k ── conclusion        leaf k
                                               └── results 1..k ── answer        the session's final leaf

The calls of a turn run concurrently. A branch concludes as soon as its own result is there, and the main branch goes on
when all results are there. A conclusion calls no tools.
"""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

from typing_extensions import override
from verl.experimental.agent_loop.agent_loop import register
from verl.experimental.agent_loop.tool_parser import FunctionCall
from verl.tools.schemas import ToolResponse

from rollout_hooks.loops.base import Branch
from rollout_hooks.loops.tool_turns import ToolTurnsLoop
from rollout_hooks.loops.turns import ToolResult, ToolTurn


@register("parallel_tools")
class ParallelToolsAgentLoop(ToolTurnsLoop):
    """Tool-calling agent loop whose tool calls branch. docs/agent_loops.md explains its options.

    A call that takes too long (or raises, with `tool_errors="end"`) ends its own branch. The main branch is told.
    """

    branch_single_call: bool = True
    """Whether a turn with a single call gets a branch too; its prompt then equals the main branch's next prompt."""

    def __init__(self, *args: Any, branch_single_call: bool | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if branch_single_call is not None:
            self.branch_single_call = branch_single_call

    async def branch_reward(
        self, *, row: dict[str, Any], call: FunctionCall, result: ToolResponse, conclusion: str
    ) -> float | None:
        """Return the reward of the leaf that concludes one tool call; override it.

        `call.arguments` is a JSON string as the model wrote it, `result.text` is what the model read, and `conclusion`
        is the text that it wrote after it.
        """

    @override
    async def run_branches(self, root: Branch, **row: Any) -> None:
        # A task group: no branch outlives the session, and an error in a hook ends the session with its cause.
        async with asyncio.TaskGroup() as tasks:
            run_calls = partial(self._run_and_conclude, tasks=tasks)
            messages, tools = list(row["raw_prompt"]), self.row_tools(row)
            answer = await self.converse(root, messages, tools=tools, row=row, run_calls=run_calls)
            if answer is not None:
                root.finish(await self.final_reward(row=row, answer=answer), role=self.role("answer"))

    async def _run_and_conclude(
        self,
        root: Branch,
        turn: ToolTurn,
        *,
        tools: Mapping[str, Any],
        history: list[dict[str, Any]],
        row: dict[str, Any],
        tasks: asyncio.TaskGroup,
    ) -> list[dict[str, Any]]:
        """Run the calls of one turn and start their branches; return the tool messages in the order of the calls."""
        running = [
            tasks.create_task(self.run_call(root, call, tools=tools, history=history, row=row)) for call in turn.calls
        ]
        if len(turn.calls) > 1 or self.branch_single_call:
            # A conclusion acts no more, and the calls whose results it reads are made in the main branch.
            branches = root.fork(len(turn.calls), shares_environment=True)
            for branch, call, tool_task in zip(branches, turn.calls, running, strict=True):
                tasks.create_task(self._conclude(branch, call, tool_task, history, row=row))
        calls = list(zip(turn.calls, await asyncio.gather(*running), strict=True))
        self.reward_calls(root, calls)
        return [self.tool_message(call, result) for call, result in calls]

    async def _conclude(
        self,
        branch: Branch,
        call: FunctionCall,
        tool_task: "asyncio.Task[ToolResult]",
        history: list[dict[str, Any]],
        *,
        row: dict[str, Any],
    ) -> None:
        """Let one branch see its own result, conclude, and become a leaf."""
        result = await tool_task
        self.reward_calls(branch, [(call, result)])
        if result.failure is not None:
            branch.fail(result.failure)
            return
        message = self.tool_message(call, result)
        if not await self.observe_messages(branch, [message], history=history, tools=self.prompt_tools(**row)):
            return
        turn = await self.take_turn(branch, tools=self.row_tools(row))
        if turn is None:
            return
        reward = await self.branch_reward(row=row, call=call, result=result.response, conclusion=turn.text)
        branch.finish(reward, role=self.role("tool"))
