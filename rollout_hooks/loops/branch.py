"""Cursors in the token tree of a session, and the session that they share.

    root ──generate──● ──fork(2)──┬── a ──observe──generate──finish(reward)
                     │            └── b ──observe──generate──finish(reward)
                     └──observe──generate──finish()          the root branch goes on by itself

A branch holds one token sequence: the prompt, then what the model generated (trained) and what the environment answered
(not trained). `fork` copies the cursor: branches share the tokens before the fork and none after it, and may run
concurrently. A call to the LLM that fails or takes too long fails its own branch and raises nothing, so siblings in a
task group go on. `finish` makes the branch a leaf; a branch that is not finished is not trained.

A loop that writes its context anew (memory, compaction, a subagent) calls `restart` with another prompt. The tokens
alone decide what that prompt shares with the other paths:

    root prompt  s s q g      restart with  s s n q g:   the row's prompt is  s s n q g
                 s s q g A                                s s n q g B
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from PIL import Image
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics
from verl.utils.profiler import simple_timer
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from rollout_hooks.capture.errors import describe_error
from rollout_hooks.capture.outputs import CALL_STATES_FIELD, TreeAgentLoopOutput, is_reward, make_row
from rollout_hooks.capture.recording import ABORTED
from rollout_hooks.capture.roles import ROLE, checked_role
from rollout_hooks.environments import Environment
from rollout_hooks.loops.branch_environments import BranchEnvironments, SessionEnvironments
from rollout_hooks.loops.branch_tokens import BranchTokens

logger = logging.getLogger(__name__)


class BranchSession:
    """What the branches of one session share: client, sampling parameters, token budget and the list of branches.

    Args:
        client: Makes the calls; the client of `rollout_hooks.worker` also records them.
        prompt_ids: Tokens of the root prompt, at least one.
        sampling_params: Sampling parameters under verl's names; `logprobs` decides whether rows carry log-probs.
        response_length: Most tokens of a branch after its prompt.
        prompt_length: Most tokens of a `restart` prompt that count as the row's prompt. The rest become untrained
            tokens of the response and use up `response_length`, as in `capture.rows`. None means no limit.
        request_id: verl's session id: all calls with it go to one server and share its prefix cache.
        unique_request_ids: Whether each call gets an id of its own, made from `request_id`. `rollout.full_determinism`
            needs it: verl then hands the id to vLLM as it is, and concurrent calls must not share one.
        call_timeout_s: Most seconds of a call to the LLM; a slower call fails its branch. None means no limit.
        images: The images that the root prompt shows, in order.
        image_token: Id of the tokens of an image; None if the model reads none.
        mm_processor_kwargs: How images are processed, verl's `data.mm_processor_kwargs`; part of each call with images.
        environments: What the branches act on; none by default. Close them when the session has ended.
    """

    def __init__(
        self,
        client: LLMServerClient,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        response_length: int,
        prompt_length: int | None = None,
        request_id: str | None = None,
        unique_request_ids: bool = False,
        call_timeout_s: float | None = None,
        images: Sequence[Image.Image] = (),
        image_token: int | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        environments: SessionEnvironments | None = None,
    ) -> None:
        if not len(prompt_ids):
            raise ValueError("prompt_ids=[]: a session needs a prompt of at least one token")
        self.client = client
        self.root_tokens = BranchTokens.of_prompt(prompt_ids, images=images, image_token=image_token)
        self.sampling_params = dict(sampling_params)
        self.response_length = response_length
        self.prompt_length = prompt_length
        self.request_id = request_id or uuid4().hex
        self.unique_request_ids = unique_request_ids
        self.call_timeout_s = call_timeout_s
        self.mm_processor_kwargs = dict(mm_processor_kwargs or {})
        self.environments = environments or SessionEnvironments({})
        self.callers: dict[str, Branch] = {}  # In whose environment a tool was called first
        self.branches: list[Branch] = []
        self.root = Branch(self)

    @property
    def wants_log_probs(self) -> bool:
        """Whether the sampling parameters ask for rollout log-probs."""
        return bool(self.sampling_params.get("logprobs"))

    def leaves(self) -> "list[Branch]":
        """Return the finished branches, depth first in the order of forking, the root branch last."""
        # By lineage: the order must not depend on which of two concurrent branches forked first.
        finished = [branch for branch in self.branches if branch.is_finished]
        return sorted(finished, key=lambda branch: (branch is self.root, branch.lineage))

    def outputs(self) -> list[TreeAgentLoopOutput]:
        """Return the leaves as rows."""
        return [leaf.as_output() for leaf in self.leaves()]


class Branch:
    """A cursor in the token tree of a session, made by `BranchSession` (the root) or `fork`.

    Every method that acts on the branch raises `ValueError` if the branch is finished or has failed.

    Attributes:
        index: Place in the order of creation; the root is 0.
        lineage: The path from the root: the fork numbers of the ancestors and of this branch. Empty for the root.
        failure: Why this branch cannot go on (its last call failed, or `fail`), or None.
        is_trained: Whether the leaf makes a row; see `finish`.
        reward: What `finish` or `reward_leaves` gave; rewards of `add_reward` are not in it.
        role: What the leaf is for; see `finish`.
        metrics: Seconds spent in this branch, by the names of verl's `AgentLoopMetrics`.
    """

    def __init__(
        self, session: BranchSession, parent: "Branch | None" = None, *, shares_environment: bool = False
    ) -> None:
        self._session = session
        # The branch in whose environment this one acts.
        self._actor: Branch = parent._actor if parent and shares_environment else self
        if self._actor is self:
            self._environments = (
                parent._actor._environments.copy() if parent else BranchEnvironments(session.environments)
            )
            if parent and parent._actor is not parent:
                self._environments.move(0)  # the positions are those of another branch
        self.index = len(session.branches)
        self.lineage: tuple[int, ...] = (*parent.lineage, parent._num_forks) if parent else ()
        self._num_forks = 0
        self._tokens = (parent._tokens if parent else session.root_tokens).copy()
        self._num_calls = 0
        self.failure: str | None = None
        self.reward: float | None = None
        self.role: str | None = None
        self.is_finished = False
        self.is_trained = True
        self.metrics: dict[str, float] = {}
        self._reward_extra_info: dict[str, Any] | None = None
        session.branches.append(self)

    @property
    def token_ids(self) -> list[int]:
        """A copy of all tokens up to the cursor, prompt and response."""
        return list(self._tokens.token_ids)

    @property
    def position(self) -> int:
        """Number of tokens up to the cursor, prompt included: what `rewind` takes."""
        return len(self._tokens.token_ids)

    @property
    def images(self) -> list[Image.Image]:
        """A copy of the images that the tokens up to the cursor show, in order."""
        return [image for _, _, image in self._tokens.images]

    @property
    def response_mask(self) -> list[int]:
        """A copy of the mask behind the prompt: 1 for a generated token, 0 for an observed one."""
        return self._tokens.mask[self._tokens.prompt_len :]

    @property
    def tool_rewards(self) -> tuple[float, ...]:
        """Rewards of the tools that this branch called, before its fork too; see `add_tool_reward`."""
        return tuple(value for _, value in self._tokens.tool_rewards)

    @property
    def num_remaining(self) -> int:
        """Number of tokens that still fit into `response_length`."""
        return max(0, self._tokens.prompt_len + self._session.response_length - self.position)

    async def generate(
        self, sampling_params: Mapping[str, Any] | None = None, *, state: str | None = None, **client_kwargs: Any
    ) -> TokenOutput:
        """Let the model go on from the cursor, and move the cursor behind what it generated.

        `sampling_params` overrides the session's for this call; `max_tokens` is lowered to what still fits. `state` is
        a key of the environment's state, for the estimator `gigpo`; None means that the tokens before the cursor are
        it. `client_kwargs` go to `LLMServerClient.generate`. The output has no tokens if the branch is full
        (`stop_reason` "length", no call is made) or the call failed (`stop_reason` "failed", the cause in `failure`). A
        call that the server aborted keeps the tokens it got and fails the branch too.

        Raises:
            ValueError: If the branch holds no token, after `rewind(0)`.
        """
        self._check_open("generate")
        if not self.position:
            raise ValueError(f"generate on branch {self.index} at position 0: observe a prompt before")
        if self.num_remaining == 0:
            return TokenOutput(token_ids=[], stop_reason="length")
        params = {**self._session.sampling_params, **(sampling_params or {})}
        params["max_tokens"] = min(params.get("max_tokens", self.num_remaining), self.num_remaining)
        if self.images:
            processing = {"mm_processor_kwargs": self._session.mm_processor_kwargs}
            client_kwargs = {"image_data": self.images, **processing, **client_kwargs}
        call = self._session.client.generate(
            self._next_request_id(), prompt_ids=self.token_ids, sampling_params=params, **client_kwargs
        )
        output: TokenOutput | BaseException
        with simple_timer("generate_sequences", self.metrics):
            try:
                async with asyncio.timeout(self._session.call_timeout_s):
                    # The error comes back as a value: whatever the server raises must not reach the siblings.
                    (output,) = await asyncio.gather(call, return_exceptions=True)
            except TimeoutError:
                self.failure = f"the call to the LLM took longer than call_timeout_s={self._session.call_timeout_s}"
                return TokenOutput(token_ids=[], stop_reason="failed")
        if isinstance(output, BaseException):
            self.failure = describe_error(output)
            return TokenOutput(token_ids=[], stop_reason="failed")
        self._append_generated(output, state=state)
        if output.stop_reason in ABORTED:
            self.failure = f"the server aborted the call after {len(output.token_ids)} tokens"
        return output

    def observe(self, token_ids: Sequence[int], *, images: Sequence[Image.Image] = ()) -> None:
        """Append tokens of the environment. The model reads them, and they are not trained.

        `images` are those that the tokens show, in order. Raise ValueError if they show another number.
        """
        self._check_open("observe")
        if isinstance(token_ids, str):
            raise ValueError(f"observe({token_ids!r}): takes token ids; for text use `observe_messages` of the loop")
        self._tokens.read(token_ids, max_prompt_len=self._session.prompt_length, images=images)

    async def environment(self, name: str = "") -> Environment:
        """Return what the session acts on, as it is at the cursor, to look at it or to act on it.

        Ask for it anew before each act: what was forked since has another one. A finished branch has its last, for
        `reward_leaves`. `name` is that of a tool which is an environment itself.

        Raises:
            ValueError: There is none, or it cannot be had, e.g. as the session has all its snapshots. The branch fails.
        """
        act = self._actor._environments.act(name, position=self._actor.position)
        (found,) = await asyncio.gather(act, return_exceptions=True)
        if isinstance(found, BaseException):
            self.failure = f"its environment: {describe_error(found)}"
            logger.warning("a branch ends: %s", self.failure)
            raise ValueError(f"branch {self.index} has failed: {self.failure}") from found
        return found

    def is_alone_with(self, tool: str) -> bool:
        """Note that the branch calls a tool, and return whether all that did act in its environment."""
        return self._session.callers.setdefault(tool, self._actor) is self._actor

    def fork(self, n: int = 1, *, shares_environment: bool = False) -> "list[Branch]":
        """Make `n` new branches at the cursor; this branch stays as it is and can go on.

        Each has an environment of its own, in the state of this one's. With `shares_environment` they act in this
        branch's: for work that it waits for.
        """
        self._check_open("fork")
        if n < 1:
            raise ValueError(f"fork({n}): the number of branches must be at least 1")
        forks = []
        for _ in range(n):
            forks.append(Branch(self._session, self, shares_environment=shares_environment))
            self._num_forks += 1
        return forks

    def rewind(self, to: int, *, keep_rewards: bool = False) -> None:
        """Move the cursor back to an earlier `position`. The branch loses what came after it; fork first to keep it.

        `to` may lie inside a generated turn or inside the prompt, not inside an image. After a rewind into the prompt,
        tokens observed before the next call belong to the row's prompt. `keep_rewards` keeps the rewards of the lost
        tokens: those of `add_reward` move to the last sampled token that stays, or to the next one sampled if none
        stays. Without it they are lost, and a reward of a tool is lost with the end of the turn that called the tool.
        So is what the tool did: the environment becomes what it was there. With `keep_rewards` it stays as it is.

        Raises:
            ValueError: `to` is not there; or the environment has changed since, and no branch was forked before.
        """
        self._check_open("rewind")
        if not 0 <= to <= self.position:
            raise ValueError(
                f"rewind({to}): must be between 0 and the cursor, {self.position}; note `branch.position` where you "
                "may want to return to"
            )
        if self._actor is self and keep_rewards:
            self._environments.move(to)
        elif self._actor is self:
            self._environments.rewind(to)
        self._tokens.cut(to, keep_rewards=keep_rewards)

    def restart(
        self, prompt_ids: Sequence[int], *, images: Sequence[Image.Image] = (), keep_tool_rewards: bool = False
    ) -> None:
        """Put the cursor at the end of another prompt. The branch loses all that it held; fork first to keep it.

        The prompt needs at least one token, and `images` are those that it shows, in order. It shares with every other
        path of the session what they have in common. `keep_tool_rewards` keeps the rewards of tools, for work that goes
        on in a new context. Rewards of `add_reward` are lost with their tokens, and the environment stays as it is.
        """
        if not len(prompt_ids):
            raise ValueError("restart([]): a prompt has at least one token")
        self._check_open("restart")
        kept = [(-1, value) for value in self.tool_rewards] if keep_tool_rewards else []  # -1: before every token
        if self._actor is self:
            self._environments.move(0)
        self._tokens.cut(0)
        self._tokens.tool_rewards = kept
        self.observe(prompt_ids, images=images)

    def add_reward(self, value: float) -> None:
        """Reward what the model generated last: a node of the tree, a step of a process.

        The reward lies on the last sampled token, even if the environment has answered since. This branch and those
        forked from it later get it; branches forked before do not. All rewards add up, also with the leaf's own.

        Raises:
            ValueError: If `value` is not a finite number, or the branch holds no sampled token.
        """
        self._check_open("add_reward")
        if not is_reward(value):
            raise ValueError(f"add_reward({value!r}): a reward is a finite number; leave out what has none")
        if not self._tokens.has_generated:
            raise ValueError(
                f"add_reward({value}) on branch {self.index}: it holds no token that the model sampled; generate "
                "before, or give the reward to `finish`"
            )
        self._tokens.reward(float(value))

    def add_tool_reward(self, value: float) -> None:
        """Report the reward that a tool gave a call of this branch (verl's `tool_rewards`). It is not trained on.

        Each leaf that goes on from here reports it with its row. `rewind` to a position before the cursor drops it.
        """
        self._check_open("add_tool_reward")
        self._tokens.tool_rewards.append((self.position - 1, value))

    def fail(self, reason: str) -> None:
        """End this branch, e.g. after a tool that took too long. A session that fails for it reports the reason."""
        self._check_open("fail")
        self.failure = reason

    def finish(
        self,
        reward: float | None = None,
        *,
        extra_info: Mapping[str, Any] | None = None,
        trained: bool = True,
        role: str | None = None,
    ) -> None:
        """Make this branch a leaf: a row of the session.

        Args:
            reward: The leaf's own reward. None leaves it to verl: its reward function scores the last leaf of the
                session, and leaves before it get a copy of that score. Rewards of `add_reward` are added to either.
            extra_info: Reported with the reward, as verl's `reward_extra_info`.
            trained: False leaves the branch out, such as a candidate that was not chosen: it is shown and counted, but
                makes no row. A branch that is never finished is counted only.
            role: What the leaf is for, such as `planner`: up to 64 letters, digits and _ - . / . Leaves of one prompt
                and role are compared with each other alone (docs/advantages.md). None: it has none.

        Raises:
            ValueError: If the branch is finished, the reward is not finite, or the branch has failed and no reward is
                given. A broken trajectory is trained only with an explicit reward. If the branch is not trained and a
                reward is given. If the role has another form.
        """
        if self.is_finished:
            raise ValueError(f"finish on branch {self.index}: it is finished already")
        if not trained and reward is not None:
            raise ValueError(f"finish({reward}, trained=False) on branch {self.index}: what is left out has no reward")
        self.role = checked_role(role, of=f"branch {self.index}")
        self.reward = self.checked_reward(reward) if trained else None
        self._reward_extra_info = None if extra_info is None else dict(extra_info)
        self.is_finished, self.is_trained = True, trained

    def checked_reward(self, reward: float | None) -> float | None:
        """Return a reward as a float, or raise ValueError as `finish` does."""
        if reward is not None and not is_reward(reward):
            raise ValueError(f"reward={reward!r} of branch {self.index}: a reward must be finite, or None for verl's")
        if self.failure is not None and reward is None:
            raise ValueError(f"no reward for failed branch {self.index} ({self.failure}): give one or do not finish it")
        return None if reward is None else float(reward)

    def as_output(self) -> TreeAgentLoopOutput:
        """Return the branch as a row."""
        tokens = self._tokens
        end = tokens.end_before(tokens.prompt_len + self._session.response_length)
        images = [image for _, stop, image in tokens.images if stop <= end]
        return make_row(
            tokens.token_ids[:end],
            tokens.mask[:end] if self.is_trained else [0] * end,
            tokens.log_probs[:end] if self._session.wants_log_probs else None,
            prompt_len=tokens.prompt_len,
            response_length=self._session.response_length,
            versions=[version for _, version in tokens.versions],
            extra_fields={
                "turn_scores": [value for _, value in tokens.rewards],
                "tool_rewards": list(self.tool_rewards),
                "reward_extra_info": self._reward_extra_info or {},
                CALL_STATES_FIELD: list(tokens.states),
                **({} if self.role is None else {ROLE: self.role}),
            },
            metrics=AgentLoopMetrics.model_validate(self.metrics),
            # verl runs its reward function only on a last output without `reward_score`.
            reward_score=self.reward,
            leaf_reward=self.reward,
            leaf_reward_extra_info=self._reward_extra_info,
            node_rewards=tuple((position - tokens.prompt_len, value) for position, value in tokens.rewards),
            multi_modal_data={"images": images} if images else {},
        )

    def _next_request_id(self) -> str:
        self._num_calls += 1
        if not self._session.unique_request_ids:
            return self._session.request_id
        # By lineage, not by index: which of two concurrent branches forks first must not change an id.
        return "-".join([self._session.request_id, *map(str, self.lineage), f"call{self._num_calls}"])

    def _append_generated(self, output: TokenOutput, *, state: str | None) -> None:
        num_tokens = len(output.token_ids)
        log_probs = output.log_probs if output.log_probs is not None else []
        if self._session.wants_log_probs and len(log_probs) != num_tokens:
            raise ValueError(
                f"{len(log_probs)} log-probs for {num_tokens} generated tokens, though the sampling parameters ask for "
                "them: the server must return one per token, or set rollout.calculate_log_probs=False"
            )
        versions = (output.extra_fields.get("min_global_steps"), output.extra_fields.get("max_global_steps"))
        self._tokens.generated(
            output.token_ids,
            log_probs if len(log_probs) == num_tokens else [0.0] * num_tokens,
            versions=[version for version in versions if version is not None],
            state=state,
        )

    def _check_open(self, action: str) -> None:
        if self.is_finished:
            raise ValueError(f"{action} on branch {self.index}: it is finished; fork before finishing")
        if self.failure is not None:
            raise ValueError(f"{action} on branch {self.index}: it has failed ({self.failure})")
