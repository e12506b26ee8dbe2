"""One leaf of a session as the row that verl's agent loop worker writes, with a reward of its own.

verl 0.9.1 scores only the last output of a session and copies that score to all others
(`trainer/ppo/v1/agent_loop_tq.py`, `_agent_loop_postprocess`). `TreeAgentLoopOutput` carries a leaf reward that the
copy does not touch, and rewards of single nodes that are added to it.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from numbers import Real
from typing import Any, cast

import numpy as np
import torch
from pydantic import field_validator
from typing_extensions import override
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from rollout_hooks.capture.leaf_shapes import MAX_REWARD

CALL_STATES_FIELD = "call_states"
"""Key in a row's `extra_fields`: [(position in prompt and response, key or None)] of the calls on its path, in order.

A call begins at the position. The key names the state of the environment that it was sampled from; None means that the
tokens before it are the state. The estimator `gigpo` reads it (docs/advantages.md).
"""


def is_reward(value: Any) -> bool:
    """Return whether a value is a number, or a tensor of one, that a row can have as its reward; NaN is none."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, np.floating):
        value = float(value)  # NumPy compares half precision in half precision, where the largest reward is infinite
    return isinstance(value, Real) and -MAX_REWARD <= cast(float, value) <= MAX_REWARD


class TreeAgentLoopOutput(AgentLoopOutput):
    """A leaf of a session: verl's output with a reward of its own.

    A loop that returns this class names its leaves itself; the worker makes no further rows from recorded calls.
    """

    leaf_reward: float | None = None
    """None leaves the reward to verl: its reward function scores the session's last leaf, the others get a copy."""
    leaf_reward_extra_info: dict[str, Any] | None = None
    """verl's `reward_extra_info` for that reward; None leaves it to verl."""
    node_rewards: tuple[tuple[int, float], ...] = ()
    """(position in the response, reward) of nodes on the path. A reward goes to the last trained token at or before its
    position, else to the first trained token, so that none is lost with tokens that are cut off."""

    image_thumbnails: dict[int, bytes] | None = None
    """`image_runs.THUMBNAILS_FIELD`, which the worker sets where a model reads images."""

    @field_validator("node_rewards")
    @classmethod
    def _finite_nodes(cls, values: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        if not all(is_reward(value) for _, value in values):
            raise ValueError(f"node_rewards={values}: a reward must be finite, in float32; leave out what has none")
        return values

    @field_validator("leaf_reward")
    @classmethod
    def _finite(cls, value: float | None) -> float | None:
        if value is not None and not is_reward(value):
            raise ValueError(f"leaf_reward={value}: a reward must be finite, in float32; use None to leave it to verl")
        return value

    @override
    def as_dict(self) -> dict[str, Any]:
        """Return the fields of the row, named as verl does.

        The tensors are `prompts` (P,), `responses` (R,) and `response_mask` (R,), int64; if there are log-probs,
        `rollout_log_probs` (R,) float32; if there is a reward, `rm_scores` (R,) float32, which has it on the last token
        and node rewards on theirs. Other fields are there if they were set.

        Raises:
            ValueError: There are node rewards, but neither a leaf reward nor a score of verl's.
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


def row_reward(row: AgentLoopOutput) -> float | None:
    """Return the reward of a row that verl has scored, the sum of its `rm_scores`.

    It is None if the row is scored later, or is of another class, which may write other scores.
    """
    if not isinstance(row, TreeAgentLoopOutput):
        return None
    own = row.reward_score if row.leaf_reward is None else row.leaf_reward
    return None if own is None else own + sum(value for _, value in row.node_rewards)


class SessionFailed(RuntimeError):
    """Error of a session that could not be completed.

    `outputs` are leaves that had already earned a `leaf_reward`. They are trained, but the session counts as failed.
    """

    def __init__(self, cause: str, *, outputs: list[TreeAgentLoopOutput] | None = None) -> None:
        super().__init__(cause)
        self.outputs = outputs or []


class PromptFailed(RuntimeError):
    """Error of a prompt all of whose sessions failed; the report has their causes."""


def make_row(
    token_ids: Sequence[int],
    mask: Sequence[int],
    log_probs: Sequence[float] | None,
    *,
    prompt_len: int,
    response_length: int,
    versions: Iterable[int | None],
    extra_fields: Mapping[str, Any],
    **fields: Any,
) -> TreeAgentLoopOutput:
    """Make the row of a leaf of N tokens, its response cut to `response_length`.

    The first `prompt_len` tokens are the prompt. `mask` is 1 for sampled tokens, which are trained, and 0 for those
    that were read. `extra_fields` are added to those that verl's tool loop gives.
    """
    response = slice(prompt_len, prompt_len + response_length)
    response_mask = list(mask[response])
    # The prompt counts as a turn, and so does every stretch of generated or read tokens.
    num_turns = 1 + (1 + sum(a != b for a, b in pairwise(response_mask)) if response_mask else 0)
    shared_fields = {"turn_scores": [], "tool_rewards": [], "reward_extra_info": {}, **weight_versions(versions)}
    return TreeAgentLoopOutput(
        prompt_ids=list(token_ids[:prompt_len]),
        response_ids=list(token_ids[response]),
        response_mask=response_mask,
        response_logprobs=None if log_probs is None else list(log_probs[response]),
        num_turns=num_turns,
        extra_fields={**shared_fields, **extra_fields},
        **{"metrics": AgentLoopMetrics(), **fields},
    )


def weight_versions(versions: Iterable[int | None]) -> dict[str, int]:
    """Return verl's fields for the first and last version of the weights; none if no version is known."""
    known = [version for version in versions if version is not None]
    return {"min_global_steps": min(known), "max_global_steps": max(known)} if known else {}
