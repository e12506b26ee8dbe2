"""The recipe's agent loop: `memory`, with the task's messages as inputs and one reward for the whole session.

Every turn is a leaf, and all leaves of a session get the reward of its answer. If a turn that wrote a note had a reward
for that, the model would be paid for writing, not for what is of use later. If only the answer had a reward, the turns
that decide what there is to read would not be trained.
"""

from typing import Any

from typing_extensions import override

from recipes.memory_qa.tasks import score_answer
from rollout_hooks.loops.memory import MemoryAgentLoop


class MemoryQALoop(MemoryAgentLoop):
    """`memory` on rows with ``extra_info.inputs``, the messages, and ``reward_model.ground_truth``, the answer."""

    # The class has its name from ``loops.yaml`` only: verl's decorator `register` would, when the class is imported,
    # replace that entry by one without options.

    @override
    async def turn_input(self, *, row: dict[str, Any], number: int) -> str | None:
        """Return message `number`, from 1, or None behind the question."""
        inputs = row["extra_info"]["inputs"]
        return str(inputs[number - 1]) if number <= len(inputs) else None

    @override
    async def final_reward(self, *, row: dict[str, Any], answer: str) -> float:
        # Earlier turns have no reward of their own, so they get a copy of this one.
        return score_answer(answer, answer=row["reward_model"]["ground_truth"])
