"""The base class of loops that call tools: turns of the model, tool calls through verl, their results as messages.

Tools (function tools, stateful tools, MCP tools), tool parser and truncation of results are those of verl's
`ToolAgentLoop`. A tool may return images, for a model that reads them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from PIL import Image
from typing_extensions import override
from verl.experimental.agent_loop.tool_agent_loop import AgentData, ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.profiler import simple_timer

from rollout_hooks.environments import Environment
from rollout_hooks.loops.base import Branch, BranchingAgentLoop, check_at_least
from rollout_hooks.loops.branch_environments import OpenEnvironment
from rollout_hooks.loops.tool_environments import ForkingTool, ToolInstance, ToolOfBranch, needs_fork
from rollout_hooks.loops.turns import Step, ToolResult, ToolTurn, tool_schemas

TOOL_ERRORS = ("tell", "end")
TOOL_REWARDS = ("report", "add")

RunCalls = Callable[..., Awaitable[list[dict[str, Any]] | None]]
"""A function with the arguments and the result of `ToolTurnsLoop.run_calls`."""


class _AgentData(AgentData):
    _active_tools: dict[str, Any]  # where verl's `_call_tool` looks for the tools of a row
    environment: Callable[[], Awaitable[Environment]]  # that of the branch, for tools that act on it


class ToolTurnsLoop(BranchingAgentLoop, ToolAgentLoop):  # pyright: ignore[reportIncompatibleMethodOverride]  # `run`
    """Base class of the agent loops that call tools. docs/agent_loops.md explains its options.

    Tools and limits of turns are configured by verl's `rollout.multi_turn`. Its `max_parallel_calls` is 1 by default:
    set it to the number of calls that a turn may make.

    To give rewards, subclass a loop, override its reward hooks and name the subclass in `loops.yaml`. Each hook gets
    the dataset row with `uid` and `session_id`, and texts without special tokens. It returns a finite reward or None:
    verl's reward function then scores the final leaf, and another leaf gets a copy of the final leaf's reward.
    """

    own_schemas: tuple[OpenAIFunctionToolSchema, ...] = ()
    """Schemas of the tools that the loop itself brings."""
    endless_because: str | None = None
    """Why a session would not end without `max_assistant_turns`; None if it ends when its context is full."""

    # Set by verl's ToolAgentLoop. Declared here, since the type of `register` hides that class from type checkers.
    tools: dict[str, Any]
    tool_parser: ToolParser
    prompt_length: int
    response_length: int
    max_assistant_turns: int | None
    max_user_turns: int | None
    max_parallel_calls: int
    _call_tool: Callable[..., Awaitable[tuple[ToolResponse, float | None, dict[str, Any]]]]
    _build_assistant_message: Callable[[str, AgentData], dict[str, Any]]

    def __init__(
        self,
        *args: Any,
        tool_errors: str = "tell",
        tool_rewards: str = "report",
        max_turn_len: int | None = None,
        leaf_roles: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(leaf_roles, bool):
            raise ValueError(f"leaf_roles={leaf_roles!r}: must be true or false")
        self.leaf_roles = leaf_roles
        if tool_errors not in TOOL_ERRORS:
            raise ValueError(f"tool_errors={tool_errors!r}: must be one of {TOOL_ERRORS}")
        if tool_rewards not in TOOL_REWARDS:
            raise ValueError(f"tool_rewards={tool_rewards!r}: must be one of {TOOL_REWARDS}")
        self.tool_errors = tool_errors
        self.tool_rewards = tool_rewards
        check_at_least(1, ", or null for no limit", max_turn_len=max_turn_len)
        self.turn_sampling: dict[str, Any] = {} if max_turn_len is None else {"max_tokens": max_turn_len}
        """Overrides of the session's sampling parameters for the turns of the model."""
        taken = sorted({schema.function.name for schema in self.own_schemas} & set(self.tools))
        if taken:
            raise ValueError(f"tools named {taken} in rollout.multi_turn: the agent loop brings its own; rename yours")
        if self.endless_because is not None and not self.max_assistant_turns:
            raise ValueError(
                f"rollout.multi_turn.max_assistant_turns=null: {self.endless_because}; set the number of turns after "
                "which a session ends"
            )

    def role(self, name: str) -> str | None:
        """Return the role of a leaf if the loop names roles (`leaf_roles`); override it for other names."""
        return name if self.leaf_roles else None

    async def final_reward(self, *, row: dict[str, Any], answer: str) -> float | None:
        """Return the reward of the session's final leaf, if the loop has one; override it. `answer` is its text."""

    @override
    def prompt_tools(self, **row: Any) -> list[dict[str, Any]]:
        return tool_schemas([*(tool.tool_schema for tool in self.row_tools(row).values()), *self.own_schemas])

    def row_tools(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configured tools of a row by name: all, or those in `extra_info.tool_selection`, as in verl."""
        selection = (row.get("extra_info") or {}).get("tool_selection")
        if not selection:
            return dict(self.tools)
        return {name: self.tools[name] for name in selection if name in self.tools}

    @override
    def environments(self, row: dict[str, Any]) -> dict[str, OpenEnvironment]:
        given = row.get("tools_kwargs") or {}
        tools = {
            name: partial(ToolInstance.open, tool, (given.get(name) or {}).get("create_kwargs", {}))
            for name, tool in self.row_tools(row).items()
            if isinstance(tool, ForkingTool)
        }
        return {**super().environments(row), **tools}

    def is_last_turn(self, number: int) -> bool:
        """Say whether verl's limits make turn `number` (from 1) the last one. The calls of that turn are not run."""
        return number == self.max_assistant_turns or number > (self.max_user_turns or number)

    async def take_turn(self, branch: Branch, *, tools: Mapping[str, Any], start: int | None = None) -> ToolTurn | None:
        """Let the model take its turn, or the rest of a turn that begins at `start` on the branch.

        Return None if the branch failed. A context that leaves no room to generate fails it too.
        """
        stop = {"stop_token_ids": self.tool_parser.stop_token_ids} if self.tool_parser.stop_token_ids else {}
        before = branch.position
        output = await branch.generate({**self.turn_sampling, **stop})
        if branch.failure is not None:
            return None
        if branch.position == before:
            branch.fail(f"a context of {before} tokens left no room to generate")
            return None
        start = before if start is None else start
        token_ids = branch.token_ids[start:]
        content, calls = await self.tool_parser.extract_tool_calls(token_ids, [t.tool_schema for t in tools.values()])
        # The parser leaves the stop token in. It must go, since the chat template adds one.
        for token in self.tokenizer.all_special_tokens:
            content = content.replace(token, "")
        return ToolTurn(start, output, self.text_of(token_ids), content, tuple(calls[: self.max_parallel_calls]))

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text of some tokens, special ones removed."""
        return cast("str", self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    async def run_call(
        self,
        branch: Branch,
        call: FunctionCall,
        *,
        tools: Mapping[str, Any],
        history: list[dict[str, Any]],
        row: dict[str, Any],
    ) -> ToolResult:
        """Run one tool call through verl, which turns an error of the tool into a text for the model.

        `history` ends with the turn that calls, and the metrics of `branch` count the time. The reward is not given
        here: call `reward_calls` for every branch that reads the result.

        Raises:
            ValueError: If the tool returned a video, or an image for a model of text; or if it keeps a state that does
                not fork, and a branch with another environment has called it.
        """
        # The loop's own tools have no time limit: their time is spent in LLM calls, which have their own limit.
        is_own = call.name in {schema.function.name for schema in self.own_schemas}
        tool = tools.get(call.name)
        if needs_fork(tool) and not branch.is_alone_with(call.name):
            raise ValueError(
                f"tool {call.name!r} keeps a state, and two branches call it: one would act in what the other did; "
                f"give {type(tool).__name__} the methods `snapshot` and `fork`, or `keeps_state = False` if nothing of "
                "a call is there in the next one (docs/own_loop.md, Environments)"
            )
        data = self._agent_data(history, row, tools=tools, images=branch.images)
        data.environment = branch.environment
        if isinstance(tool, ForkingTool):
            data._active_tools[call.name] = ToolOfBranch(tool, partial(branch.environment, call.name))
        with simple_timer("tool_calls", branch.metrics):
            try:
                async with asyncio.timeout(None if is_own else self.call_timeout_s):
                    response, reward, _ = await self._call_tool(call, data.tools_kwargs, data)
            except TimeoutError:
                reason = f"tool {call.name!r} took longer than call_timeout_s={self.call_timeout_s}"
                return ToolResult(ToolResponse(text=f"Error: {reason}"), failure=reason)
        if branch.failure is not None:  # it has no environment; verl told it as an error of the tool
            return ToolResult(ToolResponse(text=f"Error: {branch.failure}"), failure=branch.failure)
        if response.video:
            raise ValueError(f"tool {call.name!r} returned a video: branching agent loops take text and images only")
        self._assert_mm_supported(bool(response.image))
        # verl catches what a tool raises. Only these first words of the text show it.
        has_raised = (response.text or "").startswith(f"Error executing tool '{call.name}': ")
        failure = response.text if has_raised and self.tool_errors == "end" else None
        return ToolResult(response, failure=failure, reward=reward)

    def reward_calls(self, branch: Branch, calls: Iterable[tuple[FunctionCall, ToolResult]]) -> None:
        """Give a branch the rewards of the calls whose results it will read. Its cursor must be right behind the turn.

        `run_calls` does this itself; after `run_call` the caller must.

        Raises:
            ValueError: With `tool_rewards="add"`, if a reward is not a finite number.
        """
        for call, result in calls:
            if result.reward is None:
                continue
            branch.add_tool_reward(result.reward)
            if self.tool_rewards == "add":
                try:
                    branch.add_reward(result.reward)
                except ValueError as error:
                    raise ValueError(f"reward of tool {call.name!r} with tool_rewards=add: {error}") from error

    async def run_calls(
        self,
        branch: Branch,
        turn: ToolTurn,
        *,
        tools: Mapping[str, Any],
        history: list[dict[str, Any]],
        row: dict[str, Any],
    ) -> list[dict[str, Any]] | None:
        """Run the calls of a turn concurrently and give the branch, its cursor behind the turn, their rewards.

        Return the tool messages in the order of the calls, or None if a call ended the branch.
        """
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self.run_call(branch, call, tools=tools, history=history, row=row))
                for call in turn.calls
            ]
        calls = [(call, task.result()) for call, task in zip(turn.calls, running, strict=True)]
        if branch.failure is not None:
            return None
        self.reward_calls(branch, calls)
        reasons = [result.failure for _, result in calls if result.failure is not None]
        if reasons:
            branch.fail("; ".join(reasons))
            return None
        return [self.tool_message(call, result) for call, result in calls]

    async def converse(
        self,
        branch: Branch,
        messages: list[dict[str, Any]],
        *,
        tools: Mapping[str, Any],
        row: dict[str, Any],
        number: int = 1,
        start: int | None = None,
        steps: list[Step] | None = None,
        run_calls: RunCalls | None = None,
    ) -> str | None:
        """Take turns and read tool results on one branch until the model answers, as in verl's tool loop.

        Return the text of the last turn, or None if the branch failed. The branch's tokens stand for `messages`. The
        first turn has the number `number` and begins at `start` (see `take_turn`). Every turn is appended to `steps`,
        and `run_calls` replaces the method of that name.
        """
        schemas = tool_schemas(tool.tool_schema for tool in tools.values())
        while True:
            turn = await self.take_turn(branch, tools=tools, start=start)
            if turn is None:
                return None
            if steps is not None:
                steps.append(Step(number, messages, turn, branch.fork()[0]))
            if not turn.calls or self.is_last_turn(number) or branch.num_remaining == 0:
                return turn.text
            history = [*messages, self.assistant_message(turn, messages, row)]
            results = await (run_calls or self.run_calls)(branch, turn, tools=tools, history=history, row=row)
            if results is None:
                return None
            if not await self.observe_messages(branch, results, history=history, tools=schemas):
                return turn.text
            messages, number, start = [*history, *results], number + 1, None

    def assistant_message(self, turn: ToolTurn, messages: list[dict[str, Any]], row: dict[str, Any]) -> dict[str, Any]:
        """Return the turn as a chat message, its calls in verl's form."""
        data = self._agent_data(messages, row, tools={})
        data.tool_calls = list(turn.calls)
        return self._build_assistant_message(turn.content, data)

    @staticmethod
    def tool_message(call: FunctionCall, result: ToolResult) -> dict[str, Any]:
        """Return the result of a call as a chat message."""
        text, images = result.response.text or "", result.response.image or []
        blocks: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images if image is not None]
        if blocks and text:
            blocks.append({"type": "text", "text": text})
        message = {"role": "tool", "content": blocks or text}
        return message if call.tool_call_id is None else {**message, "tool_call_id": call.tool_call_id}

    def _agent_data(
        self,
        messages: Sequence[dict[str, Any]],
        row: Mapping[str, Any],
        *,
        tools: Mapping[str, Any],
        images: Sequence[Image.Image] = (),
    ) -> _AgentData:
        """Return what verl hands to stateful tools."""
        agent_data = _AgentData(
            messages=list(messages),
            image_data=list(images),
            video_data=[],
            audio_data=None,
            mm_processor_kwargs=None,
            metrics={},
            request_id="",
            tools_kwargs=row.get("tools_kwargs") or {},
        )
        agent_data._active_tools = dict(tools)
        return agent_data
