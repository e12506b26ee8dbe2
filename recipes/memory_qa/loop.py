"""The recipe's agent loop: `memory`, with the task's messages as inputs and one reward for the whole session.

Every turn is a leaf of its own, and all leaves of a session get the reward of its answer. A reward of its own for a
turn that wrote something would pay for writing, not for what is of use later; a reward for the answer alone would
train the turn that reads and leave alone those that decide what there is to read.
"""

from typing import Any

from recipes.memory_qa.tasks import score_answer
from rollout_hooks.loops.memory import MemoryAgentLoop


class MemoryQALoop(MemoryAgentLoop):
    """`memory` on rows with ``extra_info.inputs``, the messages, and ``reward_model.ground_truth``, the answer.

    Turns before the last have no reward hook here, so they get a copy of the final leaf's. ``loops.yaml`` alone gives
    the class its name: verl's decorator `register` would, when the class is imported, put in an entry without options.
    """

    async def turn_input(self, *, row: dict[str, Any], number: int) -> str | None:
        """Returns message `number`, from 1, or None behind the question."""
        inputs = row["extra_info"]["inputs"]
        return str(inputs[number - 1]) if number <= len(inputs) else None

    async def final_reward(self, *, row: dict[str, Any], answer: str) -> float:
        """Returns 1.0 when the answer gives the facts asked for, in order, else 0.0."""
        return score_answer(answer, answer=row["reward_model"]["ground_truth"])
