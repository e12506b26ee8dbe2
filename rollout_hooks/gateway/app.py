"""The HTTP side of the gateway: routes, bearer token, sessions, limits and errors.

    POST /sessions/{id}/v1/chat/completions     or  /v1/chat/completions  with the header X-Session-Id
    POST /sessions/{id}/v1/responses            or  /v1/responses         with the header X-Session-Id
    POST /sessions/{id}/v1/messages             or  /v1/messages          with the header X-Session-Id
    POST .../messages/count_tokens              the tokens of such a request; no call is made
    GET  /sessions/{id}/v1/models[/{model}]     or  /v1/models[/{model}]

Checked in this order: token (401), session (404), calls in flight (429), size of the body (413), the body (400). The
body is read and the prompt rendered in a thread, since either may take long.
"""

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Send
from typing_extensions import override

from rollout_hooks.capture.errors import describe_error
from rollout_hooks.capture.roles import checked_role
from rollout_hooks.gateway.chat_api import ChatAnswer
from rollout_hooks.gateway.chat_format import ChatFormat
from rollout_hooks.gateway.engine import SessionEngine
from rollout_hooks.gateway.errors import ApiError, invalid_request, refused
from rollout_hooks.gateway.images import has_unread_images, read_images
from rollout_hooks.gateway.limits import NUM_THREADS, GatewayLimits
from rollout_hooks.gateway.messages_api import MessagesAnswer
from rollout_hooks.gateway.messages_body import CountBody, MessagesBody
from rollout_hooks.gateway.request_parts import WITHOUT_EFFECT
from rollout_hooks.gateway.requests import ChatBody, ResponsesBody
from rollout_hooks.gateway.responses_api import ResponsesAnswer
from rollout_hooks.gateway.running_call import RunningCall
from rollout_hooks.gateway.session import GatewaySession, SessionSettings
from rollout_hooks.gateway.turn import TurnRequest

logger = logging.getLogger(__name__)

Body = TypeVar("Body", ChatBody, ResponsesBody, MessagesBody, CountBody)
Prepared = TypeVar("Prepared")

RETRY_HEADER = "x-stainless-retry-count"
"""Of the clients of OpenAI and Anthropic: how often they have sent this request before."""
ROLE_HEADER = "x-leaf-role"
"""The role of the leaf that a call ends (docs/advantages.md)."""
STATE_HEADER = "x-environment-state"
"""The agent's key of the state that its environment is in; loops say it by `Branch.generate(state=)`."""
_SETTLE_S = 0.01
_SESSION_ID = re.compile(r"[A-Za-z0-9._~-]{1,128}")


class Gateway:
    """A server that speaks OpenAI's and Anthropic's protocols in front of token engines, one engine per session.

    `app` is the ASGI application. Requests must ask for `model` by that name and carry `api_key` as the bearer token or
    as `x-api-key`; by default it is random.
    """

    def __init__(
        self, *, model: str = "policy", api_key: str | None = None, limits: GatewayLimits | None = None
    ) -> None:
        self.model = model
        self.api_key = secrets.token_urlsafe(32) if api_key is None else api_key
        self.limits = limits or GatewayLimits()
        self._sessions: dict[str, GatewaySession] = {}
        # Counted, not summed over the sessions: each request asks for it twice, and there may be thousands of sessions.
        self._num_calls = 0
        self._num_waiting_bytes = 0
        # Not asyncio's own threads: agents of this process may fill those with work that waits for the gateway.
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="gateway")
        self.app = self._make_app()

    def open_session(
        self, session_id: str, engine: SessionEngine, *, chat_format: ChatFormat, settings: SessionSettings
    ) -> GatewaySession:
        """Let clients talk to an engine under the name `session_id`.

        Raises:
            ValueError: If the name is taken or cannot stand in a URL.
        """
        if not _SESSION_ID.fullmatch(session_id):
            raise ValueError(f"session_id={session_id!r}: use 1 to 128 letters, digits and . _ ~ -")
        if session_id in self._sessions:
            raise ValueError(f"session_id={session_id!r} is open already: close it first, or take another name")
        session = GatewaySession(session_id, engine, chat_format=chat_format, settings=settings, limits=self.limits)
        self._sessions[session_id] = session
        return session

    async def close_session(self, session_id: str, *, timeout_s: float = 60.0) -> None:
        """Refuse further requests to a session and wait for its calls, so that all of their tokens are recorded.

        Calls that run longer than `timeout_s` are cancelled and recorded as such. A closed session is left alone.
        """
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        # Requests whose bodies still come have found the session already.
        session.close()
        # Clients that went away just now are noticed.
        await asyncio.sleep(_SETTLE_S)
        tasks = [call.task for call in session.running]
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=timeout_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    @property
    def num_calls(self) -> int:
        """Calls to the engine in flight, those of sessions that are being closed too."""
        return self._num_calls

    def _call_ended(self, _: "asyncio.Task[None]") -> None:
        self._num_calls -= 1

    def _make_app(self) -> FastAPI:
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        router = APIRouter()
        router.add_api_route("/chat/completions", self._chat_completions, methods=["POST"])
        router.add_api_route("/responses", self._responses, methods=["POST"])
        router.add_api_route("/messages", self._messages, methods=["POST"])
        router.add_api_route("/messages/count_tokens", self._count_tokens, methods=["POST"])
        router.add_api_route("/models", self._models, methods=["GET"])
        router.add_api_route("/models/{model:path}", self._model, methods=["GET"])
        app.include_router(router, prefix="/v1")
        app.include_router(router, prefix="/sessions/{session_id}/v1")
        for kind in (ApiError, HTTPException, Exception):
            app.add_exception_handler(kind, _error_response)
        return app

    async def _models(self, request: Request) -> Response:
        self._authorise(request)
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def _model(self, request: Request) -> Response:
        self._authorise(request)
        self._check_model(request.path_params["model"])
        return JSONResponse(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        return {"id": self.model, "object": "model", "created": 0, "owned_by": "verl_tree"}

    async def _chat_completions(self, request: Request) -> Response:
        session, body, calls = await self._start(request, ChatBody)
        return await _respond(ChatAnswer(session, body, calls), stream=body.stream)

    async def _responses(self, request: Request) -> Response:
        session, body, (call,) = await self._start(request, ResponsesBody)
        return await _respond(ResponsesAnswer(session, body, call), stream=body.stream)

    async def _messages(self, request: Request) -> Response:
        session, body, (call,) = await self._start(request, MessagesBody)
        return await _respond(MessagesAnswer(session, body, call), stream=body.stream)

    async def _count_tokens(self, request: Request) -> Response:
        async with self._prepared(request, CountBody, GatewaySession.render) as (_, _, (_, prompt_ids), _):
            return JSONResponse({"input_tokens": len(prompt_ids)})

    async def _start(self, request: Request, body_class: type[Body]) -> tuple[GatewaySession, Body, list[RunningCall]]:
        """Start the calls of a request, or raise one of the refusals listed in the module docstring."""
        async with self._prepared(request, body_class, GatewaySession.prepare) as (session, body, turn, raw):
            self._check_room(len(turn.params))
            is_retry = request.headers.get(RETRY_HEADER, "0") != "0"
            state = request.headers.get(STATE_HEADER)
            calls = session.start(turn, body=raw, is_retry=is_retry, role=_role(request), state=state)
            self._num_calls += len(calls)
            for call in calls:
                call.task.add_done_callback(self._call_ended)
            request.state.fates = [call.fate for call in calls]  # for `server`
            if getattr(request.state, "is_lost", False):
                for call in calls:
                    call.fate.abandon()
            return session, body, calls

    @asynccontextmanager
    async def _prepared(
        self, request: Request, body_class: type[Body], prepare: Callable[[GatewaySession, TurnRequest], Prepared]
    ) -> AsyncIterator[tuple[GatewaySession, Body, Prepared, bytes]]:
        """Read and prepare a request. The session prepares no other one as long as the context is open."""
        self._authorise(request)
        session = self._session_of(request)
        self._check_room(1)
        async with self._body(request, session) as raw, session.order:
            loop = asyncio.get_running_loop()
            body, prepared = await loop.run_in_executor(self._threads, self._prepare, session, raw, body_class, prepare)
            yield session, body, prepared, raw

    def _prepare(
        self,
        session: GatewaySession,
        raw: bytes,
        body_class: type[Body],
        prepare: Callable[[GatewaySession, TurnRequest], Prepared],
    ) -> tuple[Body, Prepared]:
        body = _read(raw, body_class, max_values=self.limits.max_json_values)
        self._check_model(body.model)
        if isinstance(body, ResponsesBody):
            previous = body.previous_response_id
            wanted = body.turn_request([] if previous is None else session.kept.until(previous))
        else:
            wanted = body.turn_request()
        for name in body.without_effect():
            _tell_without_effect(name)
        if has_unread_images(wanted.messages):
            wanted = read_images(wanted, limits=self.limits)
        return body, prepare(session, wanted)

    def _check_model(self, name: str) -> None:
        if name != self.model:
            message = f"model {name!r} is not served; ask for {self.model!r}"
            raise ApiError(404, message, code="model_not_found", param="model")

    def _authorise(self, request: Request) -> None:
        given = request.headers.get("authorization", "")
        if "x-api-key" in request.headers:
            given = f"Bearer {request.headers['x-api-key']}"
        if not secrets.compare_digest(given.encode(), f"Bearer {self.api_key}".encode()):
            raise ApiError(401, "give the gateway's key as a bearer token or x-api-key", code="invalid_api_key")
        request.state.has_key = True  # for `server`

    def _session_of(self, request: Request) -> GatewaySession:
        session_id = request.path_params.get("session_id") or request.headers.get("x-session-id")
        if session_id is None:
            raise ApiError(
                404, "name a session: base URL .../sessions/{id}/v1, or header X-Session-Id", code="session_not_found"
            )
        if session_id not in self._sessions:
            raise ApiError(404, f"session {session_id!r} is not open", code="session_not_found")
        return self._sessions[session_id]

    def _check_room(self, num_new: int) -> None:
        if self.num_calls + num_new > self.limits.max_calls:
            raise ApiError(
                429,
                f"{self.num_calls} calls are in flight and {num_new} more would exceed the limit of "
                f"{self.limits.max_calls}; try again",
                code="too_many_calls",
            )

    @asynccontextmanager
    async def _body(self, request: Request, session: GatewaySession) -> AsyncIterator[bytes]:
        """Read a body, which counts among the waiting ones as long as the context is open."""
        body = bytearray()
        try:
            try:
                async with asyncio.timeout(self.limits.body_s):
                    async for part in request.stream():
                        body += part
                        self._num_waiting_bytes += len(part)
                        session.num_waiting_bytes += len(part)
                        self._check_bytes(len(body), session)
            except TimeoutError as error:
                message = f"the body was not whole after {self.limits.body_s} s"
                raise ApiError(408, message, code="request_timeout") from error
            except ClientDisconnect as error:
                # Nobody reads the answer.
                message = f"session {session.session_id!r}: a client went away before its request was whole"
                logger.info(message)
                raise ApiError(400, message, code="client_disconnected") from error
            yield bytes(body)
        finally:
            self._num_waiting_bytes -= len(body)
            session.num_waiting_bytes -= len(body)

    def _check_bytes(self, num_bytes: int, session: GatewaySession) -> None:
        limit = self.limits.max_body_bytes
        if num_bytes > limit:
            raise ApiError(413, f"the body has more than {limit} bytes", code="request_too_large")
        for num_waiting, limit, whose in (
            (session.num_waiting_bytes, self.limits.max_session_waiting_bytes, "of the session "),
            (self._num_waiting_bytes, self.limits.max_waiting_bytes, ""),
        ):
            if num_waiting > limit:
                message = f"bodies {whose}of {limit} bytes wait already; try again"
                raise ApiError(429, message, code="too_many_bytes")


def _role(request: Request) -> str | None:
    try:
        return checked_role(request.headers.get(ROLE_HEADER), of=f"the header {ROLE_HEADER}")
    except ValueError as error:
        raise refused(str(error), param=ROLE_HEADER) from error


def _read(raw: bytes, body_class: type[Body], *, max_values: int) -> Body:
    if sum(map(raw.count, (b",", b"[", b"{"))) > max_values:
        message = f"the body has more than {max_values} commas and opening brackets"
        raise ApiError(413, message, code="request_too_large")
    try:
        return body_class.model_validate_json(raw)
    except ValidationError as error:
        raise invalid_request(error) from error


@cache
def _tell_without_effect(name: str) -> None:
    # Once in a process for each parameter.
    logger.warning("agents send %s, which has no effect: %s (docs/gateway.md)", name, WITHOUT_EFFECT[name])


async def _error_response(request: Request, error: Exception) -> Response:
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):
        message = f"{request.method} {request.url.path}: {error.detail}"
        error = ApiError(error.status_code, message, code="no_such_route")
    elif not isinstance(error, ApiError):
        # A fault of the gateway; uvicorn logs it with its traceback. Asked again, OpenAI's clients would sample again.
        error, headers = ApiError(500, describe_error(error), code="gateway_error"), {"x-should-retry": "false"}
    is_anthropic = request.url.path.endswith(("/messages", "/messages/count_tokens"))
    body = error.anthropic_body() if is_anthropic else error.body()
    return JSONResponse(body, status_code=error.status, headers=headers)


async def _respond(answer: ChatAnswer | ResponsesAnswer | MessagesAnswer, *, stream: bool) -> Response:
    """Return an answer whole, or as server-sent events."""
    if not stream:
        return JSONResponse(await answer.whole())
    events = answer.events()
    # The status goes out with the first event, which waits for the engine's first output. A call that fails earlier
    # gets an ordinary error response.
    first = await anext(events)

    async def parts() -> AsyncIterator[tuple[str, bool]]:
        yield answer.line(first), True
        try:
            async for event in events:
                yield answer.line(event), not answer.is_last(event)
        except ApiError as error:
            yield answer.line(answer.failed(error)), False

    return _EventStream(parts())


class _EventStream(StreamingResponse):
    """Server-sent events, from their texts and whether more come.

    Clients leave as soon as they have the last event, so the end of the body must not be sent behind it. It is sent
    with it, even if the reader is slow, where both are one message of the application.
    """

    def __init__(self, parts: AsyncIterator[tuple[str, bool]]) -> None:
        super().__init__((), media_type="text/event-stream")
        self._parts = parts

    @override
    async def stream_response(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for text, has_more in self._parts:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": has_more})
