"""The agent loop `subagents`: a turn spawns child agents, whose answers return as tool results.

    prompt ──────── turn 1: spawn(a), spawn(b) ── answer a, answer b ── answer       the session's final leaf
    child prompt ──┬── task a ── turns and results ── answer a                       leaf 1
                   └── task b ── turns and results ── answer b                       leaf 2

A child sees only its own system prompt and its task, and reports only its answer. The children of one turn run
concurrently. Each is a leaf of the same session tree, and their prompts share what they have in common. Children have
the row's tools, and `spawn` too above the depth limit.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from typing_extensions import override
from verl.experimental.agent_loop.agent_loop import register
from verl.tools.function_tool import FunctionTool

from rollout_hooks.loops.base import Branch, check_at_least
from rollout_hooks.loops.tool_turns import ToolTurnsLoop
from rollout_hooks.loops.turns import text_tool, tool_schemas

SPAWN = text_tool(
    "spawn",
    "Give a task to a subagent, which sees nothing but the task, and get its answer.",
    "task",
    "All that the subagent has to know.",
)
CHILD_SYSTEM_PROMPT = "You are a subagent. Do the task and answer briefly; only your last message is reported."


@dataclass(slots=True)
class _Session:
    """What the agents of one session share: the row, the task group that runs the children, and their number."""

    row: dict[str, Any]
    tasks: asyncio.TaskGroup
    num_children: int = 0


@register("subagents")
class SubagentsAgentLoop(ToolTurnsLoop):
    """Tool-calling agent loop with a tool `spawn(task)`. docs/agent_loops.md explains its options.

    A child that fails is no leaf, and its parent reads the failure as the result.
    """

    own_schemas = (SPAWN,)

    def __init__(
        self,
        *args: Any,
        max_depth: int = 1,
        max_children: int = 8,
        child_system_prompt: str = CHILD_SYSTEM_PROMPT,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        remedy = "; for an agent without children use tool_agent"
        check_at_least(1, remedy, max_depth=max_depth, max_children=max_children)
        self.max_depth, self.max_children = max_depth, max_children
        self.child_system_prompt = child_system_prompt

    def child_messages(self, *, row: dict[str, Any], task: str, depth: int) -> list[dict[str, Any]]:
        """Return the first messages of a child; override it. `depth` is 1 for a child of the first agent."""
        del row, depth  # for those who override it
        return [{"role": "system", "content": self.child_system_prompt}, {"role": "user", "content": task}]

    async def child_reward(self, *, row: dict[str, Any], task: str, answer: str, depth: int) -> float | None:
        """Return the reward of a child's leaf; override it. `depth` is that of `child_messages`."""

    @override
    async def run_branches(self, root: Branch, **row: Any) -> None:
        # With a task group, an error in a child's hook ends the session; verl alone would show it to the model.
        async with asyncio.TaskGroup() as tasks:
            session = _Session(row, tasks)
            answer = await self.converse(root, list(row["raw_prompt"]), tools=self._tools(root, session, 0), row=row)
        if answer is not None:
            root.finish(await self.final_reward(row=row, answer=answer), role=self.role("answer"))

    def _tools(self, branch: Branch, session: _Session, depth: int) -> dict[str, Any]:
        tools = self.row_tools(session.row)
        if depth < self.max_depth:
            spawn = self._spawn_from(branch, session, depth + 1)
            tools["spawn"] = FunctionTool("spawn", spawn, SPAWN, is_async=True)
        return tools

    def _spawn_from(self, parent: Branch, session: _Session, depth: int) -> Callable[[str], Awaitable[str]]:
        async def spawn(task: str) -> str:
            if session.num_children >= self.max_children:
                return f"Not done: this session may have no more than {self.max_children} subagents."
            session.num_children += 1
            (child,) = parent.fork(shares_environment=True)  # what it does is done for its parent
            return await session.tasks.create_task(self._run_child(child, session, task=str(task), depth=depth))

        return spawn

    async def _run_child(self, child: Branch, session: _Session, *, task: str, depth: int) -> str:
        """Run a child to its leaf and return what its parent is told."""
        messages = self.child_messages(row=session.row, task=task, depth=depth)
        tools = self._tools(child, session, depth)
        schemas = tool_schemas(tool.tool_schema for tool in tools.values())
        images = await self.prompt_images(messages)
        child.restart(await self.prompt_tokens(messages, tools=schemas, images=images), images=images)
        answer = await self.converse(child, messages, tools=tools, row=session.row)
        if answer is None:
            return f"The subagent failed: {child.failure}"
        reward = await self.child_reward(row=session.row, task=task, answer=answer, depth=depth)
        child.finish(reward, role=self.role("subagent"))
        return answer
