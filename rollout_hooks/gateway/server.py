"""A gateway behind uvicorn, in the running event loop, with limits for clients that have no key yet."""

import asyncio
import gc
import math
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import uvicorn
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from rollout_hooks.gateway.app import Gateway
from rollout_hooks.gateway.limits import MAX_HEAD_BYTES

_STARTED_POLL_S = 0.005
_GRACE_S = 5
_MAX_JOINED_BYTES = 2**14
_HELD_BYTES = 16


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


class _JoinedWrites:
    """A transport that sends together what is written in one turn of the event loop, if it is little.

    Clients close a stream after its last event. Were the end of the body sent behind that, they might not have read it.
    A connection that is closed with something unread is reset, which is the sign of an answer that was not read.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._waiting = bytearray()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting += data
        if len(self._waiting) > _MAX_JOINED_BYTES:  # so that whoever writes much has to wait for the reader
            self._send(len(self._waiting) - _HELD_BYTES)  # without these, a last event is none

    def write_eof(self) -> None:
        self._flush()
        self._transport.write_eof()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    @property
    def has_arrived(self) -> bool:
        """Whether all that was written has been sent, and no reset has come back from a client that left before."""
        error = self._transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return not self._waiting and not error

    def _flush(self) -> None:
        self._send(len(self._waiting))

    def _send(self, num_bytes: int) -> None:
        if num_bytes and not self._transport.is_closing():
            sent, self._waiting = self._waiting[:num_bytes], self._waiting[num_bytes:]
            self._transport.write(sent)


class _Protocol(H11Protocol):
    """HTTP/1.1 that abandons the calls of clients that go away, and drops some connections.

    The calls of a request (`request.state.fates`) are abandoned if its connection ends before the answer is sent, or is
    reset: then the client has not read all that was sent. Connections are dropped which would cost something without a
    key, or without end:

    - Those above `limit_concurrency`.
    - Those whose next head takes too long. uvicorn's own time limit, `timeout_keep_alive`, is for connections that are
      silent after an answer. Here it is for those too that were never answered, or that send a head byte by byte.
    - Those of a request without the key (`request.state.has_key`), after its answer, so that nobody can pipeline them.
      What else such a client sends is read and forgotten: were the socket closed, it might not see its answer.
    - Those that take nothing of what is written to them for `body_s`.
    """

    body_s: int
    _timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _is_refused = False

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # uvicorn's own type
        self._joined = _JoinedWrites(transport, self.loop)
        super().connection_made(cast(asyncio.Transport, self._joined))
        # The protocol is then told whenever something waits to be sent, and when nothing does any more.
        transport.set_write_buffer_limits(0)
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            transport.abort()
        self._set_timer()

    @override
    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        self._set_timer()

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reader()

    @override
    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._write_timer)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._write_timer)
        self._stop_timer()
        if self.cycle is not None and not (exc is None and self.cycle.response_complete and self._joined.has_arrived):
            self._abandon()
        super().connection_lost(exc)

    @override
    def on_response_complete(self) -> None:
        if self.transport.is_closing() or self.cycle.scope.get("state", {}).get("has_key"):
            super().on_response_complete()
            return
        self._is_refused = True
        self.cycle.body.clear()
        self.flow.resume_reading()
        self.transport.write_eof()
        self._set_timer()

    def _expect_reader(self, num_before: float = math.inf) -> None:
        """Drop the connection if not even one of the bytes that waited `body_s` ago has been taken, else ask again."""
        num_waiting = self.transport.get_write_buffer_size()
        if num_waiting < num_before:
            self._write_timer = self.loop.call_later(self.body_s, self._expect_reader, num_waiting)
        else:
            self._abandon()
            self.transport.abort()

    def _abandon(self) -> None:
        state = self.cycle.scope.setdefault("state", {})
        state["is_lost"] = True
        for fate in state.get("fates", ()):
            fate.abandon()

    def _set_timer(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.timeout_keep_alive, self.transport.abort)

    def _stop_timer(self) -> None:
        _cancel(self._timer)
        self._timer = None


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


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
        protocol = type("_Protocol", (_Protocol,), {"body_s": gateway.limits.body_s})
        config = uvicorn.Config(
            gateway.app,
            http=protocol,
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
        # A full collection looks through all objects of the process, which with vLLM and verl stops the event loop for
        # half a second. What there is now is left out of it.
        gc.freeze()
        try:
            yield Address(f"http://{name}:{listener.getsockname()[1]}", gateway.api_key)
        finally:
            gc.unfreeze()
            server.should_exit = True
            await serving
