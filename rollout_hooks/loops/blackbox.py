"""The agent loop `blackbox`: trains any async function that talks to the gateway (docs/gateway.md).

    async def agent(*, base_url: str, api_key: str, model: str, row: dict) -> float | Mapping | None: ...

Each run of the function is one session of this process's gateway, and the session's recording client makes the calls.
The leaves become the rows, the leaf of the last call last. The function shares the event loop with the gateway, so it
must not block: hand blocking code to `asyncio.to_thread` or to another process.
"""

import asyncio
import inspect
import pkgutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from numbers import Real
from typing import Any, cast
from uuid import uuid4

from transformers import PreTrainedTokenizerBase
from typing_extensions import override
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, register
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.utils.tokenizer import get_processor_token_id

from rollout_hooks.capture.errors import describe_error
from rollout_hooks.capture.outputs import SessionFailed, TreeAgentLoopOutput, is_reward
from rollout_hooks.capture.recorded import LeftOut
from rollout_hooks.capture.recording import RecordingClient, stable_request_id
from rollout_hooks.capture.rows import CALLS_FIELD, RowLimits, session_rows
from rollout_hooks.capture.session_tree import SessionTree
from rollout_hooks.gateway import (
    Address,
    ChatFormat,
    ClientEngine,
    Gateway,
    GatewayLimits,
    GatewaySession,
    SessionSettings,
    serve,
)
from rollout_hooks.loops.base import refuse_unknown_options

Agent = Callable[..., Awaitable[float | Mapping[str, Any] | None]]

DROP = "drop"
MODEL = "policy"
"""The model name that agents send to the gateway."""


@register("blackbox")
class BlackboxAgentLoop(AgentLoopBase):
    """Agent loop that runs an agent against the gateway. docs/gateway.md explains its options.

    The agent returns one of these rewards:

    - a number: the reward of every leaf of the session;
    - None: verl's reward function scores the last leaf, and the others get a copy;
    - a mapping: `reward` as above, `leaf_rewards` with rewards of single leaves by the id of the response that ends the
      leaf (`DROP`: it is left out), and anything else, which becomes verl's `reward_extra_info`.
    """

    tokenizer: PreTrainedTokenizerBase

    def __init__(
        self,
        *args: Any,
        agent: str | None = None,
        timeout_s: float = 600.0,
        drain_s: float = 60.0,
        fixed_sampling: Sequence[str] = (),
        constrained_decoding: bool = True,
        special_tokens: bool = True,
        **kwargs: Any,
    ) -> None:
        refuse_unknown_options(type(self), kwargs)
        super().__init__(*args, **kwargs)
        for name, value in (("timeout_s", timeout_s), ("drain_s", drain_s)):
            if value <= 0:
                raise ValueError(f"{name}={value}: must be a positive number of seconds")
        self._agent = _load_agent(agent)
        self._timeout_s = timeout_s
        self._drain_s = drain_s
        self._fixed_sampling = frozenset(fixed_sampling)
        self._constrained_decoding = constrained_decoding
        self._special_tokens = special_tokens

    @override
    async def run(  # pyright: ignore[reportIncompatibleMethodOverride]  # verl's worker takes a list too
        self, sampling_params: dict[str, Any], **row: Any
    ) -> list[TreeAgentLoopOutput]:
        """Run one session (verl's entry point). Return the leaves in the order of their calls; the last call's is last.

        Raises:
            SessionFailed: If the agent raised, ran out of time, or nothing that the model answered is to be trained.
            ValueError: If the worker does not record, or the agent returned no valid reward.
        """
        client = self.server_manager
        if not isinstance(client, RecordingClient):
            raise ValueError(
                f"the client is a {type(client).__name__}: blackbox takes its rows from the recorder; set "
                "actor_rollout_ref.rollout.agent.agent_loop_manager_class=rollout_hooks.worker.TreeAgentLoopManager"
            )
        served = await _shared_gateway()
        session = self._open_session(served.gateway, client, sampling_params, row)
        call = self._agent(
            base_url=served.address.session_url(session.session_id),
            api_key=served.address.api_key,
            model=MODEL,
            row=row,
        )
        # An error of the agent comes back as a value: its calls are waited for before it is reported.
        try:
            (result,) = await asyncio.gather(asyncio.wait_for(call, self._timeout_s), return_exceptions=True)
        finally:
            await served.gateway.close_session(session.session_id, timeout_s=self._drain_s)
        if isinstance(result, TimeoutError):
            raise SessionFailed(f"the agent raised TimeoutError or ran longer than timeout_s={self._timeout_s}")
        if isinstance(result, BaseException):
            raise SessionFailed(describe_error(result)) from result
        return self._outputs(client.tree, session, result, wants_log_probs=bool(sampling_params.get("logprobs")))

    def _open_session(
        self, gateway: Gateway, client: RecordingClient, sampling_params: dict[str, Any], row: dict[str, Any]
    ) -> GatewaySession:
        rollout = self.rollout_config
        request_id = stable_request_id(row) if rollout.full_determinism else None
        row_len = rollout.prompt_length + rollout.response_length
        return gateway.open_session(
            uuid4().hex,
            ClientEngine(
                client,
                request_id=request_id,
                unique_request_ids=rollout.full_determinism,
                mm_processor_kwargs=self._get_mm_processor_kwargs(),
            ),
            chat_format=ChatFormat(
                self.tokenizer,
                render=self.continuous_token_builder.build_initial_tokens,
                tool_parser=ToolParser.get_tool_parser(rollout.multi_turn.format, self.tokenizer),
                image_token=get_processor_token_id(self.processor, "image"),
            ),
            settings=SessionSettings(
                sampling=sampling_params,
                fixed=self._fixed_sampling,
                context_len=min(rollout.max_model_len or row_len, row_len),
                response_len=rollout.response_length,
                constrained_decoding=self._constrained_decoding,
                special_tokens=self._special_tokens,
            ),
        )

    def _outputs(
        self, tree: SessionTree, session: GatewaySession, result: Any, *, wants_log_probs: bool
    ) -> list[TreeAgentLoopOutput]:
        reward, leaf_rewards, extra_info = _read_result(result)
        dropped = {response_id: None for response_id, value in leaf_rewards.items() if value == DROP}
        if dropped:
            ends = [int(path.source[-1]) for path in tree.leaves()]
            for call in _rewards_of_calls(session, dropped, last_calls=ends):
                tree.leave_out(call, LeftOut.DROPPED)
        limits = RowLimits(self.rollout_config.prompt_length, self.rollout_config.response_length, wants_log_probs)
        # No loop made outputs here, so every row is made from the record.
        outputs = cast("list[TreeAgentLoopOutput]", session_rows(tree, [], limits=limits).outputs)
        if not outputs:
            raise SessionFailed(
                "no answer to train: the agent made no call that gave a token, read no answer to its end or dropped all"
            )
        last_calls = [_last_call(output) for output in outputs]
        kept = {response_id: value for response_id, value in leaf_rewards.items() if response_id not in dropped}
        of_call = _rewards_of_calls(session, kept, last_calls=last_calls)
        for output, call in zip(outputs, last_calls, strict=True):
            output.leaf_reward = output.reward_score = of_call.get(call, reward)
            if extra_info:
                output.leaf_reward_extra_info = extra_info
                output.extra_fields["reward_extra_info"] = dict(extra_info)
        is_last = [call == max(last_calls) for call in last_calls]
        return [output for _, output in sorted(zip(is_last, outputs, strict=True), key=lambda pair: pair[0])]


def _load_agent(path: str | None) -> Agent:
    remedy = "name an async function as `package.module:function` in the loop's entry of agent_loop_config_path"
    if path is None:
        raise ValueError(f"agent=None: {remedy}")
    agent = pkgutil.resolve_name(path)
    if not inspect.iscoroutinefunction(agent):
        raise ValueError(f"agent={path!r} is not an async function: {remedy}")
    return agent


def _read_result(result: Any) -> tuple[float | None, Mapping[str, Any], dict[str, Any]]:
    """Return the reward, the rewards by response id, and what is reported with them."""
    if result is None or isinstance(result, Real):
        return _reward(result), {}, {}
    is_named = isinstance(result, Mapping) and all(isinstance(name, str) for name in result)
    if not is_named or not {"reward", "leaf_rewards"} & set(result):
        raise ValueError(
            f"the agent returned {result!r}: return a number, None, or a mapping with `reward` or `leaf_rewards`, its "
            "keys names"
        )
    leaf_rewards = result.get("leaf_rewards")
    if not isinstance(leaf_rewards, Mapping | None):
        raise ValueError(f"the agent returned leaf_rewards={leaf_rewards!r}: map ids of responses to rewards")
    extra_info = {name: value for name, value in result.items() if name not in ("reward", "leaf_rewards")}
    return _reward(result.get("reward")), leaf_rewards or {}, extra_info


def _reward(value: Any) -> float | None:
    if value is not None and not is_reward(value):
        raise ValueError(
            f"the agent returned the reward {value!r}: a reward is a number and must be finite, in float32, too; None "
            "leaves it to verl"
        )
    return None if value is None else float(value)


def _rewards_of_calls(
    session: GatewaySession, leaf_rewards: Mapping[str, float | None], *, last_calls: Sequence[int]
) -> dict[int, float | None]:
    """Return `leaf_rewards` by the index of the call that ends the leaf."""
    rewards: dict[int, float | None] = {}
    for response_id, reward in leaf_rewards.items():
        calls = session.calls_of_response.get(response_id, ())
        if not set(calls) & set(last_calls):
            raise ValueError(
                f"leaf_rewards[{response_id!r}]: no leaf of the session ends with that response; name responses that "
                "the agent did not go on from"
            )
        rewards |= dict.fromkeys(calls, _reward(reward))
    return rewards


def _last_call(output: TreeAgentLoopOutput) -> int:
    # Taken from the record: two calls that sampled the same tokens are still two leaves.
    return output.extra_fields[CALLS_FIELD][-1][0]


@dataclass(frozen=True, slots=True)
class _Served:
    """A running gateway. Keep a reference to `serving`: the server stops when it ends."""

    gateway: Gateway
    address: Address
    serving: AbstractAsyncContextManager[Address]


_served: dict[asyncio.AbstractEventLoop, "asyncio.Task[_Served]"] = {}


async def _shared_gateway() -> _Served:
    """Return this event loop's gateway. The first session starts it, and it ends with the loop."""
    for closed in [loop for loop in _served if loop.is_closed()]:
        del _served[closed]
    loop = asyncio.get_running_loop()
    if loop not in _served:
        _served[loop] = loop.create_task(_serve_gateway())
    return await asyncio.shield(_served[loop])


async def _serve_gateway() -> _Served:
    # No agent should get a 429: the trainer bounds the number of sessions, and vLLM queues what it cannot run yet.
    gateway = Gateway(model=MODEL, limits=GatewayLimits(max_calls=2**20))
    serving = serve(gateway)
    return _Served(gateway, await serving.__aenter__(), serving)
