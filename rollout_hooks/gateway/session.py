"""One session of the gateway: how a request becomes calls, the calls that run, and what they gave."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from typing import Any

from PIL import Image

from rollout_hooks.capture.session_images import message_images
from rollout_hooks.gateway.chat_format import ChatFormat, TextStream
from rollout_hooks.gateway.constraints import prescribes, structured_outputs
from rollout_hooks.gateway.engine import SessionEngine
from rollout_hooks.gateway.errors import ApiError, context_exceeded, refused
from rollout_hooks.gateway.json_values import num_characters, strings
from rollout_hooks.gateway.kept import KeptResponses
from rollout_hooks.gateway.limits import SURE_TEXT_LEN, GatewayLimits
from rollout_hooks.gateway.running_call import CallFate, RunningCall
from rollout_hooks.gateway.turn import Message, ModelTurn, ToolCall, TurnRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next text of an answer, and the tokens that came with it."""

    text: str
    token_ids: list[int]
    log_probs: list[float] | None


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """How the calls of a session are made."""

    sampling: Mapping[str, Any]  # Sampling parameters under verl's names, for what a request leaves out
    # Sampling parameters that a request cannot change, e.g. "temperature" where the training assumes one.
    fixed: frozenset[str] = frozenset()
    context_len: int | None = None  # Most tokens of a prompt and its answer together; None leaves it to the engine
    response_len: int | None = None  # Most tokens of an answer, also if the request allows more; None means no limit
    constrained_decoding: bool = True  # Whether requests may prescribe a form of the answer; see `constraints`
    special_tokens: bool = (
        True  # Whether what the model reads from others may spell special tokens, e.g. the end of a turn
    )

    def __post_init__(self) -> None:
        unknown = sorted(self.fixed - set(self.sampling))
        if unknown:
            raise ValueError(f"fixed={sorted(self.fixed)}: give values for {', '.join(unknown)} in `sampling`")

    def sampling_params(self, request: TurnRequest, *, num_prompt: int, choice: int) -> dict[str, Any]:
        """Return the sampling parameters of one call. Raise ApiError (400) if the prompt leaves no room to answer."""
        wanted = {name: value for name, value in request.sampling.items() if name not in self.fixed}
        params = {**self.sampling, **wanted}
        if "seed" in params:
            # With the same seed, all choices would be the same answer.
            params["seed"] += choice
        params["logprobs"] = bool(params.get("logprobs")) or request.wants_log_probs
        limits = [params.get("max_tokens"), self.response_len]
        if self.context_len is not None:
            if num_prompt >= self.context_len:
                raise context_exceeded(f"it has {num_prompt} tokens", context_len=self.context_len)
            limits.append(self.context_len - num_prompt)
        given = [limit for limit in limits if limit is not None]
        return {**params, "max_tokens": min(given)} if given else params


@dataclass(frozen=True, slots=True)
class PreparedTurn:
    """A request whose calls can begin: its prompt, the images that it shows, and the sampling parameters of each."""

    request: TurnRequest
    prompt_ids: list[int]
    images: list[Image.Image]
    params: list[dict[str, Any]]


class GatewaySession:
    """A session that clients talk to; made by `Gateway.open_session`.

    Hold `order` from a request's body to the start of its calls: calls are then recorded in the order of the bodies.
    """

    def __init__(
        self,
        session_id: str,
        engine: SessionEngine,
        *,
        chat_format: ChatFormat,
        settings: SessionSettings,
        limits: GatewayLimits | None = None,
    ) -> None:
        self.session_id = session_id
        self.engine = engine
        self.chat_format = chat_format
        self.settings = settings
        self.limits = limits or GatewayLimits()
        self.order = asyncio.Lock()
        self.kept = KeptResponses()
        self.running: set[RunningCall] = set()
        self.num_waiting_bytes = 0  # of bodies whose calls have not begun
        # Indices in the tree of the calls that gave a response, by the response's id.
        self.calls_of_response: dict[str, tuple[int, ...]] = {}
        self._is_closed = False
        self._num_started = 0
        # The fates of the calls of each request that no retry has replaced, by its body.
        self._asked: defaultdict[bytes, list[list[CallFate]]] = defaultdict(list)
        # Content, calls and whole text of each turn with tool calls, by the ids of its calls.
        self._raw_turns: dict[tuple[str, ...], tuple[str, list[Message], str]] = {}

    def render(self, request: TurnRequest) -> tuple[list[Message], list[int]]:
        """Return the messages of a request, with turns in the model's own words, and the tokens of its prompt.

        Raises:
            ApiError: 400, if the text is too long or cannot be rendered, or tools have no parser; 404, if the session
                is closed.
        """
        self._check_open()
        if request.parses_tools and self.chat_format.tool_parser is None:
            raise ApiError(400, "this model has no tools: no tool parser was given", code="no_tools", param="tools")
        if not self.settings.special_tokens:
            self._check_special_tokens(request)
        messages = [self._as_written(message) for message in request.messages]
        self._check_text_len(messages, request.tools)
        return messages, self.chat_format.prompt_ids(messages, request.tools)

    def prepare(self, request: TurnRequest) -> PreparedTurn:
        """Render the prompt of a request. It may take seconds: run it in a thread, and `start` in the event loop.

        Raises:
            ApiError: As `render` does; 400, if the prompt is too long or the form cannot be kept to.
        """
        messages, prompt_ids = self.render(request)
        form = self._form(request)
        params = [
            {**self.settings.sampling_params(request, num_prompt=len(prompt_ids), choice=choice), **form}
            for choice in range(request.num_choices)
        ]
        return PreparedTurn(request, prompt_ids, message_images(messages), params)

    def start(
        self,
        turn: PreparedTurn,
        *,
        body: bytes = b"",
        is_retry: bool = False,
        role: str | None = None,
        state: str | None = None,
    ) -> list[RunningCall]:
        """Start the calls of a request, one for each choice; for `role` and `state` see `RunningCall`.

        With `is_retry` it replaces an earlier request with the same body, whose calls are abandoned: one that got no
        answer. If the only one got its answer, that was lost behind a proxy. Of several nobody knows which it was.

        Raises:
            ApiError: 404, if the session was closed since the request came; 400, if it has made all of its calls.
        """
        self._check_open()
        num_left = self.limits.max_session_calls - self._num_started
        if len(turn.params) > num_left:
            raise ApiError(
                400, f"a session makes {self.limits.max_session_calls} calls at most", code="session_calls_exhausted"
            )
        self._num_started += len(turn.params)
        # Engines of text need not know the argument.
        media = {"images": turn.images} if turn.images else {}
        calls = [
            RunningCall(
                self.engine.stream(turn.prompt_ids, sampling_params=each, **media),
                turn.request,
                max_tokens=each.get("max_tokens"),
                num_prompt=len(turn.prompt_ids),
                tree=self.engine.tree,
                role=role,
                state=state,
            )
            for each in turn.params
        ]
        for call in calls:
            self.running.add(call)
            call.task.add_done_callback(lambda _, call=call: self.running.discard(call))
        earlier = self._asked[sha256(body).digest()]
        if is_retry and earlier:
            unanswered = [each for each in earlier if all(fate.is_abandoned or fate.has_failed for fate in each)]
            if unanswered or len(earlier) == 1:
                replaced = (unanswered or earlier)[0]
                earlier.remove(replaced)
                for fate in replaced:
                    fate.abandon()
        earlier.append([call.fate for call in calls])
        return calls

    def close(self) -> None:
        """Make no calls from now on. Those that run go on."""
        self._is_closed = True

    async def follow(self, call: RunningCall) -> AsyncIterator[TextDelta | ModelTurn]:
        """Yield the texts of a call as they come, and the whole turn at the end.

        With tools, the text comes in one piece: text and calls can be told apart only when the turn is complete.

        Raises:
            EngineFailure: If the engine failed or gave the call up, or the session was closed.
        """
        request = call.request
        stream = TextStream(self.chat_format, stop=request.stop)
        token_ids: list[int] = []
        log_probs: list[float] | None = []
        index = -1
        async for chunk in call:
            index = chunk.call
            token_ids += chunk.token_ids
            if log_probs is not None and chunk.log_probs is not None:
                log_probs += chunk.log_probs
            else:
                log_probs = None
            text = stream.push(chunk.token_ids)
            if not request.parses_tools:
                yield TextDelta(text, chunk.token_ids, chunk.log_probs)
        rest = stream.finish()
        content, calls = stream.text, tuple[ToolCall, ...]()
        if request.parses_tools:
            content, calls = await self._parse(token_ids, request, text=stream.text)
            yield TextDelta(content, token_ids, log_probs)
        elif rest:
            yield TextDelta(rest, [], [])
        is_cut = call.max_tokens is not None and len(token_ids) >= call.max_tokens
        finish_reason = "length" if is_cut and not self.chat_format.ends_itself(token_ids) else "stop"
        yield ModelTurn(
            call=index,
            token_ids=token_ids,
            log_probs=log_probs,
            content=content,
            tool_calls=calls,
            finish_reason="tool_calls" if calls else finish_reason,
            num_prompt=call.num_prompt,
        )

    async def whole_turn(self, call: RunningCall) -> ModelTurn:
        """Return the whole turn of a call; see `follow`."""
        *_, turn = [part async for part in self.follow(call)]
        assert isinstance(turn, ModelTurn)
        return turn

    def keep(self, response_id: str, request: TurnRequest, turn: ModelTurn, *, previous: str | None, skip: int) -> None:
        """Keep the messages up to a response, without the first `skip`, for requests that go on from it."""
        message: Message = {"role": "assistant", "content": turn.content}
        if turn.tool_calls:
            message["tool_calls"] = [call.as_message_part() for call in turn.tool_calls]
        self.kept.keep(response_id, [*request.messages[skip:], message], previous=previous)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ApiError(404, f"session {self.session_id!r} is not open", code="session_not_found")

    def _check_special_tokens(self, request: TurnRequest) -> None:
        """Refuse texts that spell special tokens, but not turns of the model, which may sample them."""
        read = [message for message in request.messages if message["role"] != "assistant"]
        for param, value in (("messages", read), ("tools", request.tools)):
            texts = strings(value)
            token = next((found for text in texts if (found := self.chat_format.special_in(text)) is not None), None)
            if token is not None:
                message = f"{param}: a text spells {token!r}, which the model would read as the token of that name"
                raise refused(f"{message}; leave it out, or set special_tokens=true", param=param)

    def _check_text_len(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> None:
        """Refuse a text that is too long to be tokenised, by its characters, which are quick to count."""
        text_len = num_characters([*messages, *tools])
        context_len, longest = self.settings.context_len, self.chat_format.longest_token
        if context_len is not None and text_len > max(SURE_TEXT_LEN, context_len * longest):
            text = f"it has {text_len} characters of text, and a token at most {longest}"
            raise context_exceeded(text, context_len=context_len)
        if text_len > self.limits.max_text_len:
            limit = self.limits.max_text_len
            message = f"the request has {text_len} characters of text, and {limit} are the most"
            raise ApiError(413, message, code="request_too_large")

    def _form(self, request: TurnRequest) -> dict[str, Any]:
        """Return the sampling parameter that makes the engine keep to the prescribed form, if there is one."""
        param = prescribes(request)
        if param is None:
            return {}
        if not self.settings.constrained_decoding:
            message = "this training run prescribes no form of an answer, so that its tokens are the policy's own"
            raise refused(f"{param}: {message}; leave it out, or set constrained_decoding=true", param=param)
        form = structured_outputs(request, self.chat_format.tool_parser)
        _warn_of_masks(param)
        return {"structured_outputs": form}

    async def _parse(
        self, token_ids: Sequence[int], request: TurnRequest, *, text: str
    ) -> tuple[str, tuple[ToolCall, ...]]:
        content, calls = await self.chat_format.parse_calls(token_ids, request.tools)
        if not calls:
            return text, ()
        raw = self.chat_format.decode(self.chat_format.without_stop_token(token_ids))
        parts = [call.as_message_part() for call in calls]
        self._raw_turns[tuple(call.id for call in calls)] = (content, parts, raw)
        return content, calls

    def _as_written(self, message: Message) -> Message:
        """Return a turn with tool calls in the model's own words, if the client sent it back unchanged."""
        if not self.chat_format.keeps_raw_calls or not message.get("tool_calls"):
            return message
        calls = message["tool_calls"]
        content, parts, raw = self._raw_turns.get(tuple(call["id"] for call in calls), (None, [], ""))
        # As values, not as JSON: agents of JavaScript write 60.0 as 60.
        is_unchanged = content == message["content"] and parts == calls
        return {"role": "assistant", "content": raw} if is_unchanged else message


@cache
def _warn_of_masks(param: str) -> None:
    # Once in a process for each parameter.
    logger.warning(
        "the agent prescribes the form of answers (%s): vLLM masks tokens then, and the policy is trained without the "
        "mask; turn on algorithm.rollout_correction.rollout_is=token, or refuse such requests with "
        "constrained_decoding: false (docs/gateway.md)",
        param,
    )
