"""The agent loop base class whose subclasses steer branches; see `branch` for what a branch is.

class TwoAttempts(BranchingAgentLoop):
    async def run_branches(self, root, **row):
        async with asyncio.TaskGroup() as tasks:
            for branch in root.fork(2):
                tasks.create_task(self.attempt(branch, row))

    async def attempt(self, branch, row):
        output = await branch.generate()
        if branch.failure is None:
            branch.finish(self.score(row, output.token_ids))
"""

import asyncio
import inspect
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from numbers import Real
from typing import Any, cast

from transformers import PreTrainedTokenizerBase
from typing_extensions import override
from verl.experimental.agent_loop.agent_loop import AgentLoopBase

from rollout_hooks.capture.errors import describe_error
from rollout_hooks.capture.outputs import SessionFailed, TreeAgentLoopOutput
from rollout_hooks.capture.recording import stable_request_id
from rollout_hooks.loops.branch import Branch, BranchSession

__all__ = ["Branch", "BranchSession", "BranchingAgentLoop"]

# The arguments that verl's worker gives to every loop; `name` is the name of an entry of `loops.yaml`.
_GIVEN_BY_VERL = frozenset(inspect.signature(AgentLoopBase.__init__).parameters) | {"tools", "name"}


class BranchingAgentLoop(AgentLoopBase):
    """Base class of agent loops that branch: implement `run_branches`.

    Text only. The root prompt is the row's `raw_prompt`, rendered by verl's own chat-template code and left-cut to
    `rollout.prompt_length` as in verl's loops. A branch holds at most `rollout.response_length` tokens after it.

    Args:
        call_timeout_s: Most seconds that one call to the LLM (in tool-calling loops also one call of a tool) may take;
            after that its branch ends, with the reason in `Branch.failure`. None: no limit.
        **kwargs: The options of the subclass, and what verl's worker gives.
    """

    tokenizer: PreTrainedTokenizerBase

    def __init__(self, *args: Any, call_timeout_s: float | None = None, **kwargs: Any) -> None:
        refuse_unknown_options(type(self), kwargs)
        super().__init__(*args, **kwargs)
        if call_timeout_s is not None and not (isinstance(call_timeout_s, Real) and call_timeout_s > 0):
            raise ValueError(f"call_timeout_s={call_timeout_s!r}: must be a number above 0, or null for no limit")
        self.call_timeout_s = call_timeout_s

    @abstractmethod
    async def run_branches(self, root: Branch, **row: Any) -> None:
        """Run one session: steer `root` and its forks, and `finish` every branch that shall become a leaf.

        Args:
            root: The branch at the end of the root prompt.
            **row: The fields of the dataset row (`raw_prompt`, `extra_info`, ...), `uid` and `session_id`.
        """

    async def reward_leaves(self, leaves: Sequence[Branch], *, row: dict[str, Any]) -> Sequence[float | None]:
        """Return the rewards of the leaves once the whole tree of the session is known; override it.

        It is for rewards that depend on more than one leaf: the answer that most leaves agree on, a judge who sees
        all, a price for what the whole session took. If it raises, the session fails, and the leaves that `finish`
        had given a reward are trained with that one.

        Args:
            leaves: The finished branches, at least one, in the order of the rows, the root branch last. `token_ids`
                and `response_mask` say what was read and what was generated, `lineage` where they forked.
            row: The dataset row, `uid` and `session_id`.

        Returns:
            A reward for each leaf, in their order; None leaves it to verl. By default what `finish` was given.
        """
        del row  # for those who override it
        return [leaf.reward for leaf in leaves]

    def prompt_tools(self, **row: Any) -> list[dict[str, Any]] | None:
        """Return the tool schemas that the chat template renders for this row; none by default."""

    @override
    async def run(  # pyright: ignore[reportIncompatibleMethodOverride]  # verl's worker takes a list too
        self, sampling_params: dict[str, Any], **row: Any
    ) -> list[TreeAgentLoopOutput]:
        """Run one session; verl's entry point.

        Returns:
            The leaves: finished branches in the order in which they were forked, the root branch last.

        Raises:
            SessionFailed: If `run_branches` or `reward_leaves` raised, the rewards do not fit the leaves, the root
                branch failed (and was not finished with a reward all the same) or no branch was finished. It carries
                the leaves that had been given a reward of their own.
            ValueError: If the row has images, videos or audio, or router replay is on.
        """
        session = await self._open_session(sampling_params, row)
        # As in Branch.generate: an error is a value here, so that finished leaves survive it.
        (error,) = await asyncio.gather(self._run_session(session, row), return_exceptions=True)
        outputs = session.outputs()
        cause = None if session.root.is_finished else session.root.failure
        if isinstance(error, BaseException):
            cause = describe_error(error)
        elif cause is None and not outputs:
            reasons = dict.fromkeys(branch.failure for branch in session.branches if branch.failure is not None)
            cause = "; ".join([f"{type(self).__name__}.run_branches finished no branch", *reasons])
        if cause is not None:
            rewarded = [output for output in outputs if output.leaf_reward is not None]
            raise SessionFailed(cause, outputs=rewarded) from error
        return outputs

    async def _open_session(self, sampling_params: dict[str, Any], row: dict[str, Any]) -> BranchSession:
        rollout = self.rollout_config
        if rollout.enable_rollout_routing_replay:
            raise ValueError(
                "rollout.enable_rollout_routing_replay=True: branches do not carry routed experts; turn it off"
            )
        messages = list(row["raw_prompt"])
        media = await self.process_multi_modal_info(messages)
        if media:
            raise ValueError(f"{sorted(media)} in raw_prompt: branching agent loops take text only")
        tools = cast("list[dict[str, Any]]", self.prompt_tools(**row))  # None is verl's default
        return BranchSession(
            self.server_manager,
            prompt_ids=await self.ct_build_initial_tokens(messages, tools=tools),
            sampling_params=sampling_params,
            response_length=rollout.response_length,
            prompt_length=rollout.prompt_length,
            call_timeout_s=self.call_timeout_s,
            request_id=stable_request_id(row) if rollout.full_determinism else None,
            unique_request_ids=rollout.full_determinism,
        )

    async def _run_session(self, session: BranchSession, row: dict[str, Any]) -> None:
        await self.run_branches(session.root, **row)
        leaves = session.leaves()
        if not leaves:
            return
        hook = f"{type(self).__name__}.reward_leaves"
        awaitable = self.reward_leaves(leaves, row=row)
        if not inspect.isawaitable(awaitable):
            raise ValueError(f"{hook} gave {awaitable!r}: it must be `async def`")
        rewards = await awaitable
        if not isinstance(rewards, Sequence) or isinstance(rewards, str) or len(rewards) != len(leaves):
            raise ValueError(
                f"{hook} gave {rewards!r} for {len(leaves)} leaves: give a list with one for each, in their order, "
                "None for those that verl's reward function shall score"
            )
        checked = [leaf.checked_reward(reward) for leaf, reward in zip(leaves, rewards, strict=True)]
        for leaf, reward in zip(leaves, checked, strict=True):
            leaf.reward = reward

    async def prompt_tokens(
        self, messages: Sequence[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """Return the tokens of another prompt, for `Branch.restart`: verl's template code, but nothing is cut off."""
        return await asyncio.to_thread(
            self.continuous_token_builder.build_initial_tokens, list(messages), tools=tools or None
        )

    async def observe_messages(
        self,
        branch: Branch,
        messages: Sequence[dict[str, Any]],
        *,
        history: Sequence[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        max_position: int | None = None,
    ) -> bool:
        """Append chat messages and the next generation prompt to a branch, with verl's token-exact merging.

        Args:
            branch: Where to append; its tokens stand for `history`.
            messages: New messages of the environment (roles tool, user or system).
            history: All messages before them, the model's own turns included.
            tools: Tool schemas of the session, as given to the first prompt.
            max_position: Most tokens that the branch may hold afterwards, prompt included. None: no further limit.

        Returns:
            True if the messages were appended; False, with the branch untouched, if they leave no room to generate
            (verl's tool loop ends its trajectory at the same point) or would go beyond `max_position`.
        """
        previous = list(history)
        merged, mask, _ = await self.ct_merge_context_msg(
            previous,
            previous + list(messages),
            branch.token_ids,
            branch.response_mask,
            tools=cast("list[dict[str, Any]]", tools),  # None is verl's default
        )
        if len(mask) >= self.rollout_config.response_length:
            return False
        if max_position is not None and len(merged.token_ids) > max_position:
            return False
        # Some chat templates replace the model's last stop token; the builder then reports removed tokens.
        kept = branch.position - merged.removed_prefix_token_count
        branch.rewind(kept, keep_rewards=True)
        branch.observe(merged.token_ids[kept:])
        return True


def refuse_unknown_options(loop_class: type[AgentLoopBase], arguments: Mapping[str, Any]) -> None:
    """Refuse keyword arguments that neither verl nor the loop knows: verl would drop a misspelt option silently.

    The options of a loop are the keyword-only arguments of its and its bases' `__init__`.

    Raises:
        ValueError: Naming option, value and the options that there are.
    """
    for name, value in arguments.items():
        if name not in _GIVEN_BY_VERL:
            options = _loop_options(loop_class)
            close = get_close_matches(name, options, n=1)
            meant = f"did you mean {close[0]}? " if close else ""
            raise ValueError(
                f"{name}={value!r}: {loop_class.__name__} has no such option; {meant}It takes: {', '.join(options)}"
            )


def _loop_options(loop_class: type[AgentLoopBase]) -> list[str]:
    inits = [vars(base)["__init__"] for base in loop_class.__mro__[:-1] if "__init__" in vars(base)]
    parameters = [each for init in inits for each in inspect.signature(init).parameters.values()]
    return sorted({each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY} - _GIVEN_BY_VERL)


def check_at_least(least: int, remedy: str = "", /, **options: int | None) -> None:
    """Refuse options below `least`; None means no limit.

    Raises:
        ValueError: Naming the option and its value; `remedy` ends the message.
    """
    for name, value in options.items():
        if value is not None and value < least:
            raise ValueError(f"{name}={value}: must be at least {least}{remedy}")
