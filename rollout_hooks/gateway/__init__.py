"""An OpenAI-compatible HTTP gateway that captures agents which know nothing of verl; docs/gateway.md shows its use.

A request passes `app` (routes, token, limits), `requests` (what the body asks for), `session` (its calls),
`chat_format` (messages to tokens and back) and `engine` (verl's client or vLLM's AsyncLLM). `chat_api` and
`responses_api` write the answer. `limits` has all limits.
"""

from rollout_hooks.gateway.app import Gateway
from rollout_hooks.gateway.chat_format import ChatFormat
from rollout_hooks.gateway.engine import AsyncLLMEngine, ClientEngine, SessionEngine, TokenChunk
from rollout_hooks.gateway.limits import GatewayLimits
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
