"""An OpenAI-compatible HTTP gateway in front of token engines: agents that know nothing of verl, captured.

    gateway = Gateway(model="policy")
    gateway.open_session("task-7", ClientEngine(recording_client), chat_format=..., settings=...)
    async with serve(gateway) as address:
        client = openai.AsyncOpenAI(base_url=address.session_url("task-7"), api_key=address.api_key)

`turn`            one turn of the model, asked for and given
`requests`        the bodies of the two APIs
`request_parts`   what both bodies have
`constraints`     turns of a prescribed form
`chat_format`     between messages and tokens
`engine`          what an engine is to the gateway: verl's client, vLLM's AsyncLLM
`session`         the calls of one session
`chat_api`        Chat Completions
`responses_api`   Responses
`app`             routes, token, limits, errors
`server`          uvicorn in the running event loop
`errors`          statuses and OpenAI's error JSON
"""

from rollout_hooks.gateway.app import Gateway, GatewayLimits
from rollout_hooks.gateway.chat_format import ChatFormat
from rollout_hooks.gateway.engine import AsyncLLMEngine, ClientEngine, SessionEngine, TokenChunk
from rollout_hooks.gateway.server import Address, serve
from rollout_hooks.gateway.session import GatewaySession, SessionSettings

__all__ = [
    "Address",
    "AsyncLLMEngine",
    "ChatFormat",
    "ClientEngine",
    "Gateway",
    "GatewayLimits",
    "GatewaySession",
    "SessionEngine",
    "SessionSettings",
    "TokenChunk",
    "serve",
]
