"""The agent loop `parallel_tools`: every tool call of a turn is also concluded alone, in a branch of its own.

    prompt ── assistant turn with calls 1..k ──┬── result 1 ── conclusion        leaf 1
                                               ├── ...
                                               ├── result k ── conclusion        leaf k
                                               └── results 1..k ── answer        the session's final leaf

Tools, tool parser and truncation of results are verl's own (`ToolAgentLoop`). The calls of a turn run concurrently; a
branch concludes as soon as its own result is there, and the main branch goes on as soon as all are. Left out: tools
that return images, and tool calls inside a conclusion.
"""

import asyncio
from typing import Any

from verl.experimental.agent_loop.agent_loop import register
from verl.experimental.agent_loop.tool_agent_loop import AgentData, ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall
from verl.tools.schemas import ToolResponse
from verl.utils.profiler import simple_timer
from verl.workers.rollout.replica import TokenOutput

from rollout_hooks.branching import Branch, BranchingAgentLoop


@register("parallel_tools")
class ParallelToolsAgentLoop(BranchingAgentLoop, ToolAgentLoop):
    """Tool-calling agent loop whose tool calls branch; see the module for the picture.

    Configuration is verl's: `rollout.multi_turn.{tool_config_path, function_tool_path, format, max_parallel_calls,
    max_assistant_turns, max_user_turns, max_tool_response_length, tool_response_truncate_side}`. Note that
    `max_parallel_calls` is 1 by default: set it to the number of calls that a turn may make.

    To give rewards, subclass, register under a name of your own (verl's `register`) and override the two hooks.

    Args:
        branch_single_call: Whether a turn with a single call gets a branch too. None takes the class attribute.
    """

    branch_single_call: bool = True
    """Whether a turn with a single call gets a branch too (its prompt is then the main branch's next prompt)."""

    def __init__(self, *args: Any, branch_single_call: bool | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if branch_single_call is not None:
            self.branch_single_call = branch_single_call

    async def branch_reward(
        self, *, row: dict[str, Any], call: FunctionCall, result: ToolResponse, conclusion: str
    ) -> float | None:
        """Reward of the leaf that concludes one tool call. Override it.

        Args:
            row: The dataset row (`raw_prompt`, `extra_info`, `reward_model`, ...), `uid` and `session_id`.
            call: The call: `name` and `arguments`, a JSON string as the model wrote it.
            result: What the tool answered; `result.text` is what the model saw.
            conclusion: The model's text after that result, special tokens removed.

        Returns:
            A finite reward, or None: the leaf then gets a copy of the final leaf's reward.
        """
        del row, call, result, conclusion
        return None

    async def final_reward(self, *, row: dict[str, Any], answer: str) -> float | None:
        """Reward of the session's final leaf. Override it.

        Args:
            row: As in `branch_reward`.
            answer: The text of the main branch's last turn, special tokens removed.

        Returns:
            A finite reward, or None: verl's reward function decides.
        """
        del row, answer
        return None

    def prompt_tools(self, **row: Any) -> list[dict[str, Any]]:
        """Schemas of the tools of this row (all, or those named in `extra_info.tool_selection`, as in verl)."""
        tools = self._row_tools(row)
        return [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in tools.values()]

    async def run_branches(self, root: Branch, **row: Any) -> None:
        """Run the main branch to its answer; conclusions of the side branches run beside it."""
        tools = self._row_tools(row)
        messages = list(row["raw_prompt"])
        # A task group: no branch outlives the session, and an error in a hook ends the session with its cause.
        async with asyncio.TaskGroup() as tasks:
            for turn in range(1, (self.max_assistant_turns or root.num_remaining) + 1):
                output = await self._generate(root)
                if root.failure is not None:
                    return
                content, calls = await self.tool_parser.extract_tool_calls(
                    output.token_ids, [tool.tool_schema for tool in tools.values()]
                )
                is_last = turn == self.max_assistant_turns or turn > (self.max_user_turns or turn)
                if not calls or is_last or root.num_remaining == 0:
                    break
                calls = calls[: self.max_parallel_calls]
                results, messages = await self._run_calls(root, calls, content, messages, row=row, tasks=tasks)
                results_fit = await self.observe_messages(
                    root, results, history=messages, tools=self.prompt_tools(**row)
                )
                if not results_fit:
                    break
                messages = [*messages, *results]
            answer = self._text(output)
            root.finish(await self.final_reward(row=row, answer=answer))

    async def _run_calls(
        self,
        root: Branch,
        calls: list[FunctionCall],
        content: str,
        messages: list[dict[str, Any]],
        *,
        row: dict[str, Any],
        tasks: asyncio.TaskGroup,
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Run the calls of one turn and start their branches.

        Returns:
            The tool messages in the order of the calls, and the messages up to and with the assistant turn.
        """
        agent_data = self._agent_data(messages, row)
        agent_data.tool_calls = calls
        history = [*messages, self._build_assistant_message(content, agent_data)]
        agent_data.messages = history
        running = [tasks.create_task(self._run_tool(root, call, agent_data)) for call in calls]
        if len(calls) > 1 or self.branch_single_call:
            for branch, call, tool_task in zip(root.fork(len(calls)), calls, running, strict=True):
                tasks.create_task(self._conclude(branch, call, tool_task, history, row=row))
        responses = await asyncio.gather(*running)
        results = [self._tool_message(call, response) for call, response in zip(calls, responses, strict=True)]
        return results, history

    async def _run_tool(self, root: Branch, call: FunctionCall, agent_data: AgentData) -> ToolResponse:
        """Run one tool through verl, which turns an error of the tool into a text for the model."""
        with simple_timer("tool_calls", root.metrics):
            response, reward, _ = await self._call_tool(call, agent_data.tools_kwargs, agent_data)
        if response.image or response.video:
            raise ValueError(f"tool {call.name!r} returned an image or video: parallel_tools takes text only")
        if reward is not None:
            root.tool_rewards.append(reward)
        return response

    async def _conclude(
        self,
        branch: Branch,
        call: FunctionCall,
        tool_task: "asyncio.Task[ToolResponse]",
        history: list[dict[str, Any]],
        *,
        row: dict[str, Any],
    ) -> None:
        """Let one branch see its own result, conclude, and become a leaf."""
        response = await tool_task
        message = self._tool_message(call, response)
        if not await self.observe_messages(branch, [message], history=history, tools=self.prompt_tools(**row)):
            return
        output = await self._generate(branch)
        if branch.failure is not None:
            return
        conclusion = self._text(output)
        branch.finish(await self.branch_reward(row=row, call=call, result=response, conclusion=conclusion))

    async def _generate(self, branch: Branch) -> TokenOutput:
        stop_token_ids = self.tool_parser.stop_token_ids
        return await branch.generate({"stop_token_ids": stop_token_ids} if stop_token_ids else None)

    def _agent_data(self, messages: list[dict[str, Any]], row: dict[str, Any]) -> AgentData:
        """What verl's stateful tools are handed."""
        agent_data = AgentData(
            messages=messages,
            image_data=[],
            video_data=[],
            audio_data=None,
            mm_processor_kwargs=None,
            metrics={},
            request_id="",
            tools_kwargs=row.get("tools_kwargs") or {},
        )
        agent_data._active_tools = self._row_tools(row)  # where verl's `_call_tool` looks for them
        return agent_data

    def _row_tools(self, row: dict[str, Any]) -> dict[str, Any]:
        selection = (row.get("extra_info") or {}).get("tool_selection")
        if not selection:
            return self.tools
        return {name: self.tools[name] for name in selection if name in self.tools}

    @staticmethod
    def _tool_message(call: FunctionCall, response: ToolResponse) -> dict[str, Any]:
        message = {"role": "tool", "content": response.text or ""}
        return message if call.tool_call_id is None else {**message, "tool_call_id": call.tool_call_id}

    def _text(self, output: TokenOutput) -> str:
        return self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
