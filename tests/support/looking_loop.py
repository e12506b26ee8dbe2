"""verl's loop of one turn, with a reward; images come with the prompt."""

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.utils.tokenizer import get_processor_token_id

ANSWER_LEN = 12


class LookingLoop(SingleTurnAgentLoop):
    """A session's reward is its share of even tokens."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        # Random weights would sample the tokens that stand for images.
        media = [get_processor_token_id(self.processor, name) for name in ("image", "video")]
        bounded = sampling_params | {"max_tokens": ANSWER_LEN, "logit_bias": dict.fromkeys(media, -100.0)}
        output = await super().run(bounded, **row)  # pyright: ignore[reportAbstractUsage] - a decorator hides its type
        output.reward_score = sum(token % 2 == 0 for token in output.response_ids) / len(output.response_ids)
        return output
