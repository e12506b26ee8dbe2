"""A gateway behind uvicorn, in the running event loop."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import uvicorn

from rollout_hooks.gateway.app import Gateway

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
            gateway.app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=_GRACE_S
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
