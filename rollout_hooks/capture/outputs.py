"""One leaf of a session, as verl's agent loop worker writes it to a row: an output that keeps its own reward.

verl 0.9.1 scores only the last output of a session and then copies that score to all the others
(`trainer/ppo/v1/agent_loop_tq.py`, `_agent_loop_postprocess`). `TreeAgentLoopOutput` carries a leaf reward which that
copy does not touch, and rewards of single nodes which are added to either; `as_dict` writes them to `rm_scores`.
Everything else is verl's `AgentLoopOutput`.
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
    node_rewards: tuple[tuple[int, float], ...] = ()
    """Rewards of nodes on the path: (position in the response, reward). Each is written to the last trained token at or
    before its position, to the first trained one if there is none: so none is lost with tokens that are cut off."""

    @field_validator("node_rewards")
    @classmethod
    def _finite_nodes(cls, values: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        if not all(math.isfinite(value) for _, value in values):
            raise ValueError(f"node_rewards={values}: a reward must be finite; leave out what has none")
        return values

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
            float32 when there are log-probs, `rm_scores` (R,) float32 with the reward on the last token, plus node
            rewards on theirs, when there is a reward, and the non-tensor fields that were set.

        Raises:
            ValueError: If there are node rewards and neither a leaf reward nor a score of verl's.
        """
        row = super().as_dict()
        for name in ("leaf_reward", "leaf_reward_extra_info", "node_rewards"):
            row.pop(name, None)
        if self.leaf_reward is not None:
            rm_scores = torch.zeros_like(row["response_mask"], dtype=torch.float32)
            rm_scores[-1] = self.leaf_reward
            row["rm_scores"] = rm_scores
        if self.node_rewards:
            row["rm_scores"] = self._with_node_rewards(row.get("rm_scores"), row["response_mask"])
        if self.leaf_reward_extra_info is not None:
            row["extra_fields"]["reward_extra_info"] = dict(self.leaf_reward_extra_info)
        return row

    def _with_node_rewards(self, scores: torch.Tensor | None, response_mask: torch.Tensor) -> torch.Tensor:
        if scores is None:
            raise ValueError(
                f"node_rewards={self.node_rewards} on a leaf without a score: finish it with a reward, 0.0 if it has "
                "none, or let verl's reward function score it; with reward.reward_model on the actor's resource pool, "
                "which scores rows later and would overwrite them, set reward.reward_model.enable_resource_pool=True"
            )
        trained = response_mask.nonzero().flatten()
        assert len(trained), "rows without a trained token are dropped before (rows.py)"
        scores = scores.double()
        for position, value in self.node_rewards:
            before = trained[trained <= position]
            scores[before[-1] if len(before) else trained[0]] += value
        return scores.float()


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
