"""A cursor in a session's token tree.

    root ──generate──● ──fork(2)──┬── a ──observe──generate──finish(reward)
                     │            └── b ──observe──generate──finish(reward)
                     └──observe──generate──finish()          the root branch goes on by itself

A branch holds one token sequence: the prompt, then what the model generated (trained) and what the environment
answered (not trained). `fork` copies the cursor, so branches share their tokens up to the fork and nothing after
it, and run concurrently under `asyncio.gather` or `asyncio.TaskGroup`. A call to the LLM that fails marks its own
branch and raises nothing, so the siblings in a task group live on. `finish` makes the branch a leaf; what is not
finished is not trained.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics
from verl.utils.profiler import simple_timer
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from rollout_hooks.outputs import TreeAgentLoopOutput, describe_error
from rollout_hooks.recording import ABORTED


class BranchSession:
    """What the branches of one session share: the client, the sampling parameters, the budget, the list of branches.

    Args:
        client: Where calls go; inside a worker of ours it records them.
        prompt_ids: Tokens of the root prompt, at least one.
        sampling_params: verl's sampling parameters; `logprobs` decides whether rows carry rollout log-probs.
        response_length: Most tokens a branch may hold after the root prompt.
        request_id: verl's sticky session id: all calls of the session go to one server and share its prefix cache.
        unique_request_ids: Give each call an id of its own, derived from `request_id`. Needed where verl hands the
            id to vLLM as it is (`rollout.full_determinism`), since concurrent calls must not share one.
    """

    def __init__(
        self,
        client: LLMServerClient,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        response_length: int,
        request_id: str | None = None,
        unique_request_ids: bool = False,
    ) -> None:
        if not len(prompt_ids):
            raise ValueError("prompt_ids=[]: a session needs a prompt of at least one token")
        self.client = client
        self.prompt_ids = [int(token) for token in prompt_ids]
        self.sampling_params = dict(sampling_params)
        self.response_length = response_length
        self.request_id = request_id or uuid4().hex
        self.unique_request_ids = unique_request_ids
        self.branches: list[Branch] = []
        self.root = Branch(self)

    @property
    def wants_log_probs(self) -> bool:
        """Whether the sampling parameters ask for rollout log-probs."""
        return bool(self.sampling_params.get("logprobs"))

    def outputs(self) -> list[TreeAgentLoopOutput]:
        """The finished branches as rows: in the order in which they were forked, the root branch last."""
        finished = [branch for branch in self.branches if branch.is_finished]
        finished.sort(key=lambda branch: (branch is self.root, branch.index))
        return [branch.as_output() for branch in finished]


class Branch:
    """A cursor in the token tree of a session; see the module for the picture.

    Branches are made by `BranchSession` (the root) and `fork`, not by hand.

    Attributes:
        index: Place in the order of creation; the root is 0.
        failure: Why the last call of this branch failed, or None.
        reward: What `finish` was given.
        metrics: Seconds and counts of this branch, verl's `AgentLoopMetrics` names.
        tool_rewards: Rewards that tools returned, reported with the row (verl's `tool_rewards`).
    """

    def __init__(self, session: BranchSession, parent: "Branch | None" = None) -> None:
        self._session = session
        self.index = len(session.branches)
        self._response_ids: list[int] = list(parent._response_ids) if parent else []
        self._mask: list[int] = list(parent._mask) if parent else []
        self._log_probs: list[float] = list(parent._log_probs) if parent else []
        self._steps: list[int] = list(parent._steps) if parent else []
        self._num_calls = 0
        self.failure: str | None = None
        self.reward: float | None = None
        self.is_finished = False
        self.metrics: dict[str, float] = {}
        self.tool_rewards: list[float] = []
        self._reward_extra_info: dict[str, Any] | None = None
        session.branches.append(self)

    @property
    def token_ids(self) -> list[int]:
        """All tokens up to the cursor: the root prompt and the response; a copy."""
        return self._session.prompt_ids + self._response_ids

    @property
    def position(self) -> int:
        """Number of tokens up to the cursor, root prompt included: what `rewind` takes."""
        return len(self._session.prompt_ids) + len(self._response_ids)

    @property
    def response_mask(self) -> list[int]:
        """1 for every generated token after the root prompt, 0 for every observed one; a copy."""
        return list(self._mask)

    @property
    def num_remaining(self) -> int:
        """Tokens that still fit into `response_length`."""
        return max(0, self._session.response_length - len(self._response_ids))

    async def generate(self, sampling_params: Mapping[str, Any] | None = None, **client_kwargs: Any) -> TokenOutput:
        """Let the model go on from the cursor, and move the cursor behind what it generated.

        Args:
            sampling_params: Overrides of the session's sampling parameters for this call. `max_tokens` is set to
                what still fits into the branch, or to the smaller value given here.
            **client_kwargs: Handed to `LLMServerClient.generate` as they are.

        Returns:
            verl's output of the call. Its `token_ids` are empty when the branch is full (`stop_reason` "length",
            no call is made) and when the call failed (`stop_reason` "failed", the cause in `self.failure`). A call
            that the server aborted keeps the tokens it got and fails the branch too.

        Raises:
            ValueError: If the branch is finished or has failed before.
        """
        self._check_open("generate")
        if self.num_remaining == 0:
            return TokenOutput(token_ids=[], stop_reason="length")
        params = {**self._session.sampling_params, **(sampling_params or {})}
        params["max_tokens"] = min(params.get("max_tokens", self.num_remaining), self.num_remaining)
        self._num_calls += 1
        request_id = self._session.request_id
        if self._session.unique_request_ids:
            request_id = f"{request_id}-{self.index}-{self._num_calls}"
        with simple_timer("generate_sequences", self.metrics):
            # gather hands a failure over as a value: whatever the server raises must not reach the sibling branches.
            (output,) = await asyncio.gather(
                self._session.client.generate(
                    request_id, prompt_ids=self.token_ids, sampling_params=params, **client_kwargs
                ),
                return_exceptions=True,
            )
        if isinstance(output, BaseException):
            self.failure = describe_error(output)
            return TokenOutput(token_ids=[], stop_reason="failed")
        self._append_generated(output)
        if output.stop_reason in ABORTED:
            self.failure = f"the server aborted the call after {len(output.token_ids)} tokens"
        return output

    def observe(self, token_ids: Sequence[int]) -> None:
        """Append tokens of the environment: read by the model from here on, not trained.

        Raises:
            ValueError: If the branch is finished or has failed.
        """
        self._check_open("observe")
        self._response_ids += [int(token) for token in token_ids]
        self._mask += [0] * len(token_ids)
        self._log_probs += [0.0] * len(token_ids)

    def fork(self, n: int = 1) -> list["Branch"]:
        """Make `n` new branches at the cursor; this branch stays as it is and can go on.

        Raises:
            ValueError: If `n` < 1, or the branch is finished or has failed.
        """
        self._check_open("fork")
        if n < 1:
            raise ValueError(f"fork({n}): the number of branches must be at least 1")
        return [Branch(self._session, self) for _ in range(n)]

    def rewind(self, to: int) -> None:
        """Put the cursor back to an earlier `position`; what came after it leaves this branch (fork first to keep it).

        Args:
            to: A position between the end of the root prompt and the present one; inside a generated turn too.

        Raises:
            ValueError: If `to` lies elsewhere, or the branch is finished or has failed.
        """
        self._check_open("rewind")
        prompt_len = len(self._session.prompt_ids)
        if not prompt_len <= to <= self.position:
            raise ValueError(
                f"rewind({to}): must be between the end of the root prompt, {prompt_len}, and the cursor, "
                f"{self.position}; note `branch.position` where you may want to return to"
            )
        for values in (self._response_ids, self._mask, self._log_probs):
            del values[to - prompt_len :]

    def finish(self, reward: float | None = None, *, extra_info: Mapping[str, Any] | None = None) -> None:
        """Make this branch a leaf: a row of the session.

        Args:
            reward: The leaf's own reward. None leaves it to verl: its reward function scores the last leaf of the
                session, and leaves before it get a copy of that score.
            extra_info: Reported with the reward, verl's `reward_extra_info`.

        Raises:
            ValueError: If the branch is finished, if the reward is not finite, or if the branch has failed and no
                reward is given: only an explicit reward says that a broken trajectory shall be trained.
        """
        if self.is_finished:
            raise ValueError(f"finish on branch {self.index}: it is finished already")
        if reward is not None and not math.isfinite(reward):
            raise ValueError(f"finish(reward={reward}): a reward must be finite")
        if self.failure is not None and reward is None:
            raise ValueError(f"finish() on failed branch {self.index} ({self.failure}): give a reward or leave it out")
        self.reward = None if reward is None else float(reward)
        self._reward_extra_info = None if extra_info is None else dict(extra_info)
        self.is_finished = True

    def as_output(self) -> TreeAgentLoopOutput:
        """The branch as a row: the root prompt, and everything after it as the response."""
        limit = self._session.response_length
        extra_fields: dict[str, Any] = {"turn_scores": [], "tool_rewards": list(self.tool_rewards)}
        if self._steps:
            extra_fields |= {"min_global_steps": min(self._steps), "max_global_steps": max(self._steps)}
        num_changes = sum(a != b for a, b in zip(self._mask, self._mask[1:], strict=False))
        return TreeAgentLoopOutput(
            prompt_ids=self._session.prompt_ids,
            response_ids=self._response_ids[:limit],
            response_mask=self._mask[:limit],
            response_logprobs=self._log_probs[:limit] if self._session.wants_log_probs else None,
            # The prompt is a turn, and so is every run of generated or observed tokens.
            num_turns=1 + (1 + num_changes if self._mask else 0),
            metrics=AgentLoopMetrics(**self.metrics),
            extra_fields={**extra_fields, "reward_extra_info": self._reward_extra_info or {}},
            # verl runs its reward function only on a last output without `reward_score`.
            reward_score=self.reward,
            leaf_reward=self.reward,
            leaf_reward_extra_info=self._reward_extra_info,
        )

    def _append_generated(self, output: TokenOutput) -> None:
        num_tokens = len(output.token_ids)
        log_probs = output.log_probs if output.log_probs is not None else []
        if self._session.wants_log_probs and len(log_probs) != num_tokens:
            raise ValueError(
                f"{len(log_probs)} log-probs for {num_tokens} generated tokens, though the sampling parameters ask for "
                "them: the server must return one per token, or set rollout.calculate_log_probs=False"
            )
        self._response_ids += [int(token) for token in output.token_ids]
        self._mask += [1] * num_tokens
        self._log_probs += [float(value) for value in log_probs] if log_probs else [0.0] * num_tokens
        steps = (output.extra_fields.get("min_global_steps"), output.extra_fields.get("max_global_steps"))
        self._steps += [int(step) for step in steps if step is not None]

    def _check_open(self, action: str) -> None:
        if self.is_finished:
            raise ValueError(f"{action} on branch {self.index}: it is finished; fork before finishing")
        if self.failure is not None:
            raise ValueError(f"{action} on branch {self.index}: it has failed ({self.failure})")
