"""The agent loop `parallel_tools` with rewards: of the final answer, and of what branches conclude.

The session's final leaf earns the verifier's reward. A branch that concluded its tool call rightly earns the same
reward, any other branch 0. Conclusions are easy: with a reward of their own, branches would lift the group's baseline
above what the final leaf earns, and more calls would mean more reward.
"""

from typing import Any

from typing_extensions import override
from verl.experimental.agent_loop.tool_parser import FunctionCall
from verl.tools.schemas import ToolResponse

from recipes.demo.tasks import score_answer, score_conclusion
from rollout_hooks.capture.outputs import TreeAgentLoopOutput
from rollout_hooks.loops.parallel_tools import ParallelToolsAgentLoop


class RewardedToolsLoop(ParallelToolsAgentLoop):
    """`parallel_tools` with rewards; the dataset row brings the right answer as ``reward_model.ground_truth``."""

    # The branch of a single call would see what the main branch sees, yet should conclude instead of going on.
    branch_single_call = False

    @override
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[TreeAgentLoopOutput]:
        *branches, final = await super().run(sampling_params, **row)
        return [*(_share_reward(branch, final=final) for branch in branches), final]

    @override
    async def branch_reward(
        self, *, row: dict[str, Any], call: FunctionCall, result: ToolResponse, conclusion: str
    ) -> float:
        return score_conclusion(conclusion, result=result.text or "")

    @override
    async def final_reward(self, *, row: dict[str, Any], answer: str) -> float:
        return score_answer(answer, answer=row["reward_model"]["ground_truth"])


def _share_reward(branch: TreeAgentLoopOutput, *, final: TreeAgentLoopOutput) -> TreeAgentLoopOutput:
    """Return `branch` with the product of its own and the final leaf's reward."""
    assert branch.leaf_reward is not None
    assert final.leaf_reward is not None
    reward = branch.leaf_reward * final.leaf_reward
    return branch.model_copy(update={"leaf_reward": reward, "reward_score": reward})
