"""One leaf of a session, as verl's agent loop worker writes it to a row: an output that keeps its own reward.

verl 0.9.1 scores only the last output of a session and then copies that score to all the others
(`trainer/ppo/v1/agent_loop_tq.py`, `_agent_loop_postprocess`). `TreeAgentLoopOutput` carries a leaf reward which that
copy does not touch and which `as_dict` writes to `rm_scores`; everything else is verl's `AgentLoopOutput`.
"""

import math
from typing import Any

import torch
from pydantic import field_validator
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput


class TreeAgentLoopOutput(AgentLoopOutput):
    """A leaf of a session: verl's output with a reward of its own.

    An agent loop that returns outputs of this class has named its leaves itself; the worker then makes no further
    rows from recorded calls. A leaf without a reward of its own gets what verl gives it: the score of its reward
    function if it is the last leaf of the session, else a copy of the last leaf's reward.
    """

    leaf_reward: float | None = None
    """The leaf's own reward; None leaves the reward to verl."""
    leaf_reward_extra_info: dict[str, Any] | None = None
    """What to report with that reward (verl's `reward_extra_info`); None leaves it to verl."""

    @field_validator("leaf_reward")
    @classmethod
    def _finite(cls, value: float | None) -> float | None:
        if value is not None and not math.isfinite(value):
            raise ValueError(f"leaf_reward={value}: a reward must be finite; use None to leave it to verl")
        return value

    def as_dict(self) -> dict[str, Any]:
        """The fields of the row.

        Returns:
            verl's fields: `prompts` (P,), `responses` (R,), `response_mask` (R,) int64, `rollout_log_probs` (R,)
            float32 when there are log-probs, `rm_scores` (R,) float32 with the reward on the last token when there
            is one, and the non-tensor fields that were set.
        """
        row = super().as_dict()
        row.pop("leaf_reward", None)
        row.pop("leaf_reward_extra_info", None)
        if self.leaf_reward is not None:
            rm_scores = torch.zeros_like(row["response_mask"], dtype=torch.float32)
            rm_scores[-1] = self.leaf_reward
            row["rm_scores"] = rm_scores
        if self.leaf_reward_extra_info is not None:
            row["extra_fields"]["reward_extra_info"] = dict(self.leaf_reward_extra_info)
        return row


class SessionFailed(RuntimeError):
    """A session that could not be completed, with the leaves that had already earned a reward of their own.

    Args:
        cause: What went wrong, for the report.
        outputs: Leaves with a `leaf_reward`; they are still trained, the session counts as failed all the same.
    """

    def __init__(self, cause: str, *, outputs: list[TreeAgentLoopOutput] | None = None) -> None:
        super().__init__(cause)
        self.outputs = outputs or []


def describe_error(error: BaseException) -> str:
    """One line of type and message per error; the errors inside an exception group are listed instead of it."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(describe_error(inner) for inner in error.exceptions)
    if isinstance(error, SessionFailed):
        return str(error)
    # An error raised in a Ray actor carries the remote traceback as its message: its end says what happened.
    return f"{type(error).__name__}: {error}".strip()[-2000:]
