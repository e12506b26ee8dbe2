"""The base class of agent loops that branch: see `branch` for what a branch is, docs/agent_loops.md for whole loops."""

import asyncio
import inspect
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Real
from typing import Any, cast

from PIL import Image
from transformers import PreTrainedTokenizerBase
from typing_extensions import override
from verl.experimental.agent_loop.agent_loop import AgentLoopBase
from verl.utils.tokenizer import get_processor_token_id

from rollout_hooks.capture.errors import describe_error
from rollout_hooks.capture.outputs import SessionFailed, TreeAgentLoopOutput
from rollout_hooks.capture.recording import stable_request_id
from rollout_hooks.capture.session_images import message_images
from rollout_hooks.environments import Environment
from rollout_hooks.loops.branch import Branch, BranchSession
from rollout_hooks.loops.branch_environments import OpenEnvironment, SessionEnvironments

__all__ = ["Branch", "BranchSession", "BranchingAgentLoop"]

# The arguments that verl's worker gives to every loop; `name` is the name of an entry of `loops.yaml`.
_GIVEN_BY_VERL = frozenset(inspect.signature(AgentLoopBase.__init__).parameters) | {"tools", "name"}


class BranchingAgentLoop(AgentLoopBase):
    """Base class of agent loops that branch: implement `run_branches`. docs/agent_loops.md explains the options.

    verl's chat-template code renders the row's `raw_prompt`, text and images, as the root prompt. Text is cut on the
    left to `rollout.prompt_length`, as in verl's own loops, and a longer prompt with images is refused. A branch holds
    at most `rollout.response_length` tokens after it.
    """

    tokenizer: PreTrainedTokenizerBase

    def __init__(
        self, *args: Any, call_timeout_s: float | None = None, max_snapshots: int | None = 64, **kwargs: Any
    ) -> None:
        refuse_unknown_options(type(self), kwargs)
        super().__init__(*args, **kwargs)
        if call_timeout_s is not None and not (isinstance(call_timeout_s, Real) and call_timeout_s > 0):
            raise ValueError(f"call_timeout_s={call_timeout_s!r}: must be a number above 0, or null for no limit")
        check_at_least(0, ", or null for no limit", max_snapshots=max_snapshots)
        self.call_timeout_s, self.max_snapshots = call_timeout_s, max_snapshots

    @abstractmethod
    async def run_branches(self, root: Branch, **row: Any) -> None:
        """Run one session: steer `root` and its forks, and `finish` every branch that should become a leaf.

        `row` holds the fields of the dataset row (`raw_prompt`, `extra_info`, ...), `uid` and `session_id`.
        """

    async def reward_leaves(self, leaves: Sequence[Branch], *, row: dict[str, Any]) -> Sequence[float | None]:
        """Return a reward for each leaf, in their order, once the whole tree is known. None leaves a leaf to verl.

        Override it for rewards that depend on several leaves: agreement with the most common answer, a judge who
        compares all, a price for the whole session. By default each leaf keeps what `finish` gave. If it raises, the
        session fails, but leaves that `finish` had given a reward are still trained with it. There is at least one
        leaf, and the order is that of the rows: the root branch is last.
        """
        del row  # for those who override it
        return [leaf.reward for leaf in leaves]

    async def open_environment(self, *, row: dict[str, Any]) -> Environment:
        """Return what a session acts on, for `Branch.environment`; override it. It is called at the first use."""
        del row  # for those who override it
        raise ValueError(f"{type(self).__name__} has no environment: override open_environment")

    def environments(self, row: dict[str, Any]) -> dict[str, OpenEnvironment]:
        """Return what opens each environment of a session by name; that of `open_environment` has the name ''."""
        return {"": lambda: self.open_environment(row=row)}

    def prompt_tools(self, **row: Any) -> list[dict[str, Any]] | None:
        """Return the tool schemas that the chat template renders for this row; none by default."""

    @override
    async def run(  # pyright: ignore[reportIncompatibleMethodOverride]  # verl's worker takes a list too
        self, sampling_params: dict[str, Any], **row: Any
    ) -> list[TreeAgentLoopOutput]:
        """Run one session (verl's entry point). Return its leaves in the order of forking, the root branch last.

        Raises:
            SessionFailed: If a hook raised, the rewards do not fit the leaves, no branch was finished, or the root
                branch failed and was not finished with a reward. It carries the leaves that already had a reward of
                their own.
            ValueError: If the row has videos or audio, or router replay is on.
        """
        session = await self._open_session(sampling_params, row)
        try:
            # The error comes back as a value, as in Branch.generate, so that finished leaves survive it.
            (error,) = await asyncio.gather(self._run_session(session, row), return_exceptions=True)
        finally:
            await session.environments.close()
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
        images = await self.prompt_images(messages)
        tools = cast("list[dict[str, Any]]", self.prompt_tools(**row))  # None is verl's default
        return BranchSession(
            self.server_manager,
            prompt_ids=await self.ct_build_initial_tokens(messages, tools=tools, images=images),
            sampling_params=sampling_params,
            response_length=rollout.response_length,
            prompt_length=rollout.prompt_length,
            call_timeout_s=self.call_timeout_s,
            request_id=stable_request_id(row) if rollout.full_determinism else None,
            unique_request_ids=rollout.full_determinism,
            images=images,
            mm_processor_kwargs=self._get_mm_processor_kwargs(),
            image_token=get_processor_token_id(self.processor, "image"),
            environments=SessionEnvironments(self.environments(row), max_snapshots=self.max_snapshots),
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

    async def prompt_images(self, messages: Sequence[dict[str, Any]]) -> list[Image.Image]:
        """Return the images of a prompt in order, as verl's data set reads them.

        Raises:
            ValueError: The messages have videos or audio.
        """
        media = await self.process_multi_modal_info(list(messages))
        others = sorted(media.keys() - {"images"})
        if others:
            raise ValueError(f"{', '.join(others)} in the messages: branching agent loops take text and images only")
        self._assert_mm_supported(bool(media))
        return media.get("images", [])

    async def prompt_tokens(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        images: Sequence[Image.Image] = (),
    ) -> list[int]:
        """Render another prompt for `Branch.restart` with verl's template code. Nothing is cut off.

        `images` are those of `prompt_images`; give them to `Branch.restart`, too.
        """
        return await asyncio.to_thread(
            self.continuous_token_builder.build_initial_tokens,
            list(messages),
            tools=tools or None,
            images=list(images) or None,
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

        Return False, and leave the branch as it is, if no room to generate would be left (verl's tool loop stops at the
        same point) or the branch would hold more than `max_position` tokens, prompt included. `messages` come from the
        environment (roles tool, user or system), their images as PIL images. `history` holds all messages before them,
        the model's own included, and the branch's tokens stand for it. `tools` are the schemas that the first prompt
        had.
        """
        images = message_images(messages)
        self._assert_mm_supported(bool(images))
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
        branch.observe(merged.token_ids[kept:], images=images)
        return True


def refuse_unknown_options(loop_class: type[AgentLoopBase], arguments: Mapping[str, Any]) -> None:
    """Refuse keyword arguments that neither verl nor the loop knows: verl would drop a misspelt option silently.

    Raises:
        ValueError: If there is one; the message names it and the options that exist.
    """
    for name, value in arguments.items():
        if name not in _GIVEN_BY_VERL:
            options = _loop_options(loop_class)
            meant = did_you_mean(name, options)
            raise ValueError(
                f"{name}={value!r}: {loop_class.__name__} has no such option; {meant}It takes: {', '.join(options)}"
            )


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a question that names the likeliest of some names, for a message, or nothing if none is like `name`."""
    close = get_close_matches(name, names, n=1)
    return f"did you mean {close[0]}? " if close else ""


def _loop_options(loop_class: type[AgentLoopBase]) -> list[str]:
    # Options are the keyword-only arguments of the `__init__` of the loop and its bases.
    inits = [vars(base)["__init__"] for base in loop_class.__mro__[:-1] if "__init__" in vars(base)]
    parameters = [each for init in inits for each in inspect.signature(init).parameters.values()]
    return sorted({each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY} - _GIVEN_BY_VERL)


def check_at_least(least: int, remedy: str = "", /, **options: int | None) -> None:
    """Raise ValueError for an option below `least`. `remedy` ends the message; None means no limit."""
    for name, value in options.items():
        if value is not None and value < least:
            raise ValueError(f"{name}={value}: must be at least {least}{remedy}")
