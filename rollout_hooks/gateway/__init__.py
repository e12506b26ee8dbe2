"""A gateway for agents that know nothing of verl, with OpenAI's and Anthropic's protocols (docs/gateway.md).

A request passes `app` (routes, token, limits), `requests` or `messages_body` (what the body asks for), `session` (its
calls), `chat_format` (messages to tokens and back) and `engine` (verl's client or vLLM's AsyncLLM). `chat_api`,
`responses_api` and `messages_api` write the answer. `limits` has all limits.
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
