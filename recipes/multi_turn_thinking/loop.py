"""verl's tool loop, but each prompt is the whole chat, rendered anew by the chat template.

verl 0.9.1's `ToolAgentLoop` never renders its history again: it appends the tokens of new messages to the tokens that
were sampled (`verl/utils/tokenizer/continuous_token.py`), so earlier thinking stays in the context, whatever the
template says. Most agents in use keep messages, not tokens, and send all of them through the template every time. Two
methods of the loop decide this and are overridden. Turns, tools, parser, limits and the output stay verl's.
"""

import asyncio
from itertools import takewhile
from typing import Any

from typing_extensions import override
from verl.experimental.agent_loop.tool_agent_loop import AgentData, ToolAgentLoop
from verl.utils.tokenizer.continuous_token import MergeResult


class RenderedToolsLoop(ToolAgentLoop):
    """verl's `tool_agent` with a history that is rendered anew before every call.

    Its own output is the last context with the last turn. The earlier contexts are in the record of the session's calls
    and become rows of their own (`rollout_hooks.capture.rows`).
    """

    @override
    def _build_assistant_message(self, content: str, agent_data: AgentData) -> dict[str, Any]:
        """Return the turn as a message in the model's own words, calls included.

        verl's message has the calls in parsed form, which the template would write in its own spelling, and behind
        them the text of the stop token, which the template writes itself.
        """
        text = self.tokenizer.decode(
            agent_data.response_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return {"role": "assistant", "content": text}

    @override
    async def ct_merge_context_msg(
        self,
        previous_messages: list[dict[str, Any]],
        updated_messages: list[dict[str, Any]],
        runtime_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> tuple[MergeResult, list[int], list[float] | None]:
        """Render all messages; the tokens from the first change on count as read, not as sampled.

        Returns:
            What verl's method returns: the merge, and mask and log-probs of the tokens behind the prompt.
        """
        builder = self.continuous_token_builder
        rendered = await asyncio.to_thread(builder.build_initial_tokens, updated_messages, tools=tools)
        pairs = zip(runtime_token_ids, rendered, strict=False)
        num_kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        merged = MergeResult(
            token_ids=rendered,
            appended_token_count=len(rendered) - num_kept,
            removed_prefix_token_count=len(runtime_token_ids) - num_kept,
        )
        return merged, *builder.align_response_metadata(merged, response_mask, response_logprobs)
