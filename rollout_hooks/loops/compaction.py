"""The agent loop `compaction`: a tool-calling agent that summarises its history when a token budget is reached.

    prompt ──┬── turn 1 ── results ── turn 2 ── results ── "summarise" ── summary     leaf 1
             └── summary (read) ── turn 3 ── results ── turn 4, the answer            the session's final leaf

The summary is generated and trained on the old branch, after all that it sums up; that leaf ends with it. The next
branch shares the root prompt and reads the row's messages and the summary as text. By default the leaf of a summary
gets the reward of the answer.
"""

from typing import Any

from typing_extensions import override
from verl.experimental.agent_loop.agent_loop import register

from rollout_hooks.loops.base import Branch, check_at_least
from rollout_hooks.loops.tool_turns import ToolTurnsLoop

REQUEST = (
    "The context is full. Summarise what was found and done so far and what is left to do. "
    "Only this summary and the task will be known from here on. Do not call tools."
)
PREFACE = "Summary of the work so far:\n"


@register("compaction")
class CompactionAgentLoop(ToolTurnsLoop):
    """Tool-calling agent loop that compacts its history. docs/agent_loops.md explains its options.

    A session ends with a turn that calls no tool, with turn `rollout.multi_turn.max_assistant_turns` (summaries do not
    count), or when the results and the request for a summary do not fit.
    """

    endless_because = "compaction lets a session go on for ever"

    def __init__(
        self,
        *args: Any,
        max_context_len: int | None = None,
        max_summary_len: int | None = None,
        request: str = REQUEST,
        preface: str = PREFACE,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        limit = self.prompt_length + self.response_length
        if max_context_len is None:
            max_context_len = self.prompt_length + self.response_length // 2
        if not 0 < max_context_len < limit:
            raise ValueError(
                f"max_context_len={max_context_len}: must be at least 1 and below rollout.prompt_length + "
                f"rollout.response_length = {limit}, so that there is room for a summary"
            )
        check_at_least(1, ", or null for no limit", max_summary_len=max_summary_len)
        self.max_context_len, self.max_summary_len = max_context_len, max_summary_len
        self.request, self.preface = request, preface

    async def summary_reward(self, *, row: dict[str, Any], summary: str, number: int) -> float | None:
        """Return the reward of the leaf that ends with summary `number` (from 1); override it."""

    @override
    async def run_branches(self, root: Branch, **row: Any) -> None:
        tools, schemas = self.row_tools(row), self.prompt_tools(**row)
        messages = list(row["raw_prompt"])
        number = num_summaries = 0
        while True:
            number += 1
            turn = await self.take_turn(root, tools=tools)
            if turn is None:
                return
            if not turn.calls or self.is_last_turn(number) or root.num_remaining == 0:
                break
            history = [*messages, self.assistant_message(turn, messages, row)]
            results = await self.run_calls(root, turn, tools=tools, history=history, row=row)
            if results is None:
                return
            fits = await self.observe_messages(
                root, results, history=history, tools=schemas, max_position=self.max_context_len
            )
            if fits:
                messages = [*history, *results]
                continue
            asked = [*results, {"role": "user", "content": self.request}]
            if not await self.observe_messages(root, asked, history=history, tools=schemas):
                break
            output = await root.generate({"max_tokens": self.max_summary_len} if self.max_summary_len else None)
            if root.failure is not None:
                return
            summary = self.text_of(output.token_ids)
            num_summaries += 1
            (leaf,) = root.fork(shares_environment=True)
            reward = await self.summary_reward(row=row, summary=summary, number=num_summaries)
            leaf.finish(reward, role=self.role("summary"))
            messages = [*row["raw_prompt"], {"role": "user", "content": self.preface + summary}]
            images = await self.prompt_images(messages)
            prompt_ids = await self.prompt_tokens(messages, tools=schemas, images=images)
            root.restart(prompt_ids, images=images, keep_tool_rewards=True)
        root.finish(await self.final_reward(row=row, answer=turn.text), role=self.role("answer"))
