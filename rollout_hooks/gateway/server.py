"""A gateway behind uvicorn, in the running event loop, with limits for clients that have no key yet."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import uvicorn
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from rollout_hooks.gateway.app import Gateway
from rollout_hooks.gateway.limits import MAX_HEAD_BYTES

_STARTED_POLL_S = 0.005
_GRACE_S = 5


@dataclass(frozen=True, slots=True)
class Address:
    """Where a gateway listens (scheme, host and port), and the bearer token that requests must carry."""

    url: str
    api_key: str

    @property
    def base_url(self) -> str:
        """Base URL of a client that names its session in the header X-Session-Id."""
        return f"{self.url}/v1"

    def session_url(self, session_id: str) -> str:
        """Return the base URL of a client that talks to one session."""
        return f"{self.url}/sessions/{session_id}/v1"


class _Protocol(H11Protocol):
    """HTTP/1.1 that drops connections above `limit_concurrency`, and those whose next head takes too long.

    uvicorn's own time limit, `timeout_keep_alive`, is for connections that are silent after an answer. Here it is for
    those too that were never answered, or that send a head or the body of a refused request byte by byte.
    """

    _timer: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # uvicorn's own type
        super().connection_made(transport)
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            transport.abort()
        self._set_timer()

    @override
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._set_timer()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    @override
    def on_response_complete(self) -> None:
        # What came of the body of a refused request; uvicorn would keep it until the next one.
        self.cycle.body.clear()
        super().on_response_complete()

    def _set_timer(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.timeout_keep_alive, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the program that the gateway is a part of."""
        yield


@asynccontextmanager
async def serve(gateway: Gateway, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[Address]:
    """Serve a gateway while the context is open, and yield where it listens. `port` 0 takes a free one.

    The default `host` is reached from this machine only. Put TLS in front of any other: the key goes in the clear.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        config = uvicorn.Config(
            gateway.app,
            http=_Protocol,
            ws="none",
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            limit_concurrency=gateway.limits.max_connections + 1,
            timeout_keep_alive=gateway.limits.idle_s,
            timeout_graceful_shutdown=_GRACE_S,
            # Not "warning": a line for each head that is no HTTP would let the log grow without a key.
            log_level="error",
            access_log=False,
            proxy_headers=False,
            lifespan="off",
        )
        server = _Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(_STARTED_POLL_S)
        if serving.done():
            await serving
            raise RuntimeError("the gateway's server ended before it listened")
        name = f"[{host}]" if family == socket.AF_INET6 else host
        try:
            yield Address(f"http://{name}:{listener.getsockname()[1]}", gateway.api_key)
        finally:
            server.should_exit = True
            await serving
