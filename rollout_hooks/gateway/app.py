"""The HTTP side of the gateway: routes, bearer token, sessions, limits and errors.

    POST /sessions/{id}/v1/chat/completions     or  /v1/chat/completions  with the header X-Session-Id
    POST /sessions/{id}/v1/responses            or  /v1/responses         with the header X-Session-Id
    GET  /sessions/{id}/v1/models[/{model}]     or  /v1/models[/{model}]

Checked in this order: token (401), session (404), calls in flight (429), size of the body (413), the body (400).
"""

import asyncio
import re
import secrets
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from rollout_hooks.capture.errors import describe_error
from rollout_hooks.gateway.chat_api import ChatAnswer
from rollout_hooks.gateway.chat_format import ChatFormat
from rollout_hooks.gateway.engine import SessionEngine
from rollout_hooks.gateway.errors import ApiError, invalid_request
from rollout_hooks.gateway.images import has_unread_images, read_images
from rollout_hooks.gateway.requests import ChatBody, ResponsesBody
from rollout_hooks.gateway.responses_api import ResponsesAnswer
from rollout_hooks.gateway.session import GatewaySession, SessionSettings
from rollout_hooks.gateway.turn import TurnRequest

Body = TypeVar("Body", ChatBody, ResponsesBody)

_SESSION_ID = re.compile(r"[A-Za-z0-9._~-]{1,128}")


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """Limits on what the gateway accepts: bytes of a request body (else 413), calls to the engine in flight (else 429).

    Abandoned calls count too. OpenAI's clients answer a 429 by trying again. The images of a request are limited in
    number, and each in its pixels (else 400).
    """

    max_body_bytes: int = 16 * 2**20
    max_calls: int = 1024
    max_images: int = 64
    max_pixels: int = 2**24

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1; leave it out for the default")


class Gateway:
    """An OpenAI-compatible server in front of token engines, one engine per session. `app` is the ASGI application.

    Requests must ask for `model` by that name and carry `api_key` as the bearer token; by default it is random.
    """

    def __init__(
        self, *, model: str = "policy", api_key: str | None = None, limits: GatewayLimits | None = None
    ) -> None:
        self.model = model
        self.api_key = secrets.token_urlsafe(32) if api_key is None else api_key
        self.limits = limits or GatewayLimits()
        self._sessions: dict[str, GatewaySession] = {}
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
        session = GatewaySession(session_id, engine, chat_format=chat_format, settings=settings)
        self._sessions[session_id] = session
        return session

    async def close_session(self, session_id: str, *, timeout_s: float = 60.0) -> None:
        """Refuse further requests to a session and wait for its calls, so that all of their tokens are recorded.

        Calls that run longer than `timeout_s` are cancelled and recorded as such. A closed session is left alone.
        """
        session = self._sessions.pop(session_id, None)
        tasks = [] if session is None else [call.task for call in session.running]
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=timeout_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    @property
    def num_calls(self) -> int:
        """Calls to the engine in flight, in all open sessions."""
        return sum(len(session.running) for session in self._sessions.values())

    def _make_app(self) -> FastAPI:
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        router = APIRouter()
        router.add_api_route("/chat/completions", self._chat_completions, methods=["POST"])
        router.add_api_route("/responses", self._responses, methods=["POST"])
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
        session, body = await self._admit(request, ChatBody)
        wanted = await self._with_images(body.turn_request())
        self._check_room(wanted.num_choices)
        return await _respond(ChatAnswer(session, body, session.start(wanted)), stream=body.stream)

    async def _responses(self, request: Request) -> Response:
        session, body = await self._admit(request, ResponsesBody)
        previous = body.previous_response_id
        history = () if previous is None else session.messages_until(previous)
        wanted = await self._with_images(body.turn_request(history))
        self._check_room(wanted.num_choices)
        (call,) = session.start(wanted)
        return await _respond(ResponsesAnswer(session, body, call), stream=body.stream)

    async def _with_images(self, wanted: TurnRequest) -> TurnRequest:
        if not has_unread_images(wanted.messages):
            return wanted
        limits = self.limits
        read = partial(read_images, wanted, max_images=limits.max_images, max_pixels=limits.max_pixels)
        return await asyncio.to_thread(read)

    async def _admit(self, request: Request, body_class: type[Body]) -> tuple[GatewaySession, Body]:
        """Return the session and the body of a request, or raise one of the refusals listed in the module docstring."""
        self._authorise(request)
        session = self._session_of(request)
        self._check_room(1)
        raw = await self._read_body(request)
        try:
            body = body_class.model_validate_json(raw)
        except ValidationError as error:
            raise invalid_request(error) from error
        self._check_model(body.model)
        return session, body

    def _check_model(self, name: str) -> None:
        if name != self.model:
            message = f"model {name!r} is not served; ask for {self.model!r}"
            raise ApiError(404, message, code="model_not_found", param="model")

    def _authorise(self, request: Request) -> None:
        given = request.headers.get("authorization", "")
        if not secrets.compare_digest(given.encode(), f"Bearer {self.api_key}".encode()):
            raise ApiError(401, "give the gateway's key as a bearer token", code="invalid_api_key")

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

    async def _read_body(self, request: Request) -> bytes:
        limit = self.limits.max_body_bytes
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > limit:
                raise ApiError(413, f"the body has more than {limit} bytes", code="request_too_large")
        return bytes(body)


async def _error_response(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        message = f"{request.method} {request.url.path}: {error.detail}"
        error = ApiError(error.status_code, message, code="no_such_route")
    elif not isinstance(error, ApiError):
        # A fault of the gateway; uvicorn logs it with its traceback.
        error = ApiError(500, describe_error(error), code="gateway_error")
    return JSONResponse(error.body(), status_code=error.status)


async def _respond(answer: ChatAnswer | ResponsesAnswer, *, stream: bool) -> Response:
    """Return an answer whole, or as server-sent events."""
    if not stream:
        return JSONResponse(await answer.whole())
    events = answer.events()
    # The status goes out with the first event, which waits for the engine's first output. A call that fails earlier
    # gets an ordinary error response.
    first = await anext(events)

    async def lines() -> AsyncIterator[str]:
        yield answer.line(first)
        try:
            async for event in events:
                yield answer.line(event)
        except ApiError as error:
            yield answer.line(answer.failed(error))
            return
        yield answer.end

    return StreamingResponse(lines(), media_type="text/event-stream")
