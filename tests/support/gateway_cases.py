"""A gateway on loopback in front of scripted engines, for the tests of `rollout_hooks.gateway`."""

import asyncio
import inspect
import json
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial, wraps

import httpx
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from scripted_llm import END, ScriptedClient, call_text, encode, tokenizer
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from rollout_hooks.capture.recording import RecordingClient
from rollout_hooks.capture.session_images import SessionImages
from rollout_hooks.capture.session_tree import SessionTree
from rollout_hooks.gateway import ChatFormat, ClientEngine, Gateway, GatewayLimits, SessionSettings, TokenChunk, serve

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "logprobs": True}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "double",
            "description": "Double a number.",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        },
    }
]


PROMPT = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
TURN = "go " + call_text(3) + call_text(4)


def tool_reply(prompt: str) -> str:
    """Return two tool calls, or an answer if the prompt has their results."""
    return "6 and 8" if "[6]" in prompt else TURN


def chat_format(**kwargs) -> ChatFormat:
    builder = create_continuous_token_builder(tokenizer(), hf_model_type="qwen3")
    parser = ToolParser.get_tool_parser("hermes", tokenizer())
    return ChatFormat(tokenizer(), **{"render": builder.build_initial_tokens, "tool_parser": parser, **kwargs})


class StreamingEngine:
    """A scripted engine that streams its answer token by token, and logs what it sampled even if nobody listens.

    `reply` maps the prompt's text to the answer's text without the end token, or to an exception, which comes after
    `num_before_error` tokens.
    """

    def __init__(self, reply, *, delay_s: float = 0.0, tree: SessionTree | None = None) -> None:
        self.tree = tree or SessionTree(decode=tokenizer().decode)
        self.reply, self.delay_s = reply, delay_s
        self.log: list[tuple[list[int], list[int]]] = []

    async def stream(self, prompt_ids: Sequence[int], *, sampling_params: Mapping):
        call = self.tree.begin(prompt_ids)
        reply = self.reply(tokenizer().decode(prompt_ids))
        if isinstance(reply, Exception):
            self.tree.fail(call, str(reply))
            raise reply
        token_ids = encode(reply + END)[: sampling_params.get("max_tokens")]
        self.log.append((list(prompt_ids), []))
        sampled = self.log[-1][1]
        for token in token_ids:
            await asyncio.sleep(self.delay_s)
            sampled.append(token)
            yield TokenChunk(call, [token], [-0.5])
        self.tree.complete(call, token_ids, log_probs=[-0.5] * len(token_ids), stop_reason="stop")


def client_engine(reply, *, images: SessionImages | None = None, **kwargs) -> ClientEngine:
    """Make verl's client, scripted, behind the recorder."""
    scripted = ScriptedClient(reply, **kwargs)
    tree = SessionTree(decode=tokenizer().decode, images=images)
    engine = ClientEngine(RecordingClient(scripted, tree=tree), request_id="r")
    engine.scripted = scripted
    return engine


class Served:
    """A running gateway with the clients of its sessions."""

    def __init__(self, gateway: Gateway, address) -> None:
        self.gateway, self.address = gateway, address
        # One connection pool for all clients: making one takes longer than most tests.
        self.http = httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_connections=1000))
        self.openai = AsyncOpenAI(
            base_url=address.base_url, api_key=address.api_key, max_retries=0, http_client=self.http
        )

    def open(self, session_id: str, engine, *, sampling: Mapping = SAMPLING, fixed=(), form=None, **settings):
        return self.gateway.open_session(
            session_id,
            engine,
            chat_format=form or chat_format(),
            settings=SessionSettings(sampling=sampling, fixed=frozenset(fixed), **settings),
        )

    def scripted(self, reply=lambda _: "x", **kwargs) -> ClientEngine:
        """Open the session `s` on verl's client, scripted, and return its engine."""
        engine = client_engine(reply, **kwargs)
        self.open("s", engine)
        return engine

    def client(self, session_id: str | None = None, **kwargs) -> AsyncOpenAI:
        url = self.address.base_url if session_id is None else self.address.session_url(session_id)
        return self.openai.with_options(base_url=url, **kwargs)

    def anthropic(self, session_id: str = "s", **kwargs) -> AsyncAnthropic:
        """Make Anthropic's client of a session; it adds /v1 itself."""
        url = self.address.session_url(session_id).removesuffix("/v1")
        options = {"api_key": self.address.api_key, "max_retries": 0, **kwargs}
        return AsyncAnthropic(base_url=url, **options)

    async def ask(self, text: str = "q", *, session: str = "s", **more):
        """Return the answer of the client of a session to one question, a completion or a stream."""
        return await self.client(session).chat.completions.create(model="policy", messages=user(text), **more)

    async def post(self, body, *, path: str = "/chat/completions", session: str = "s"):
        """Post an object, or bytes, to a path of a session; return status and answer."""
        content = body if isinstance(body, bytes) else json.dumps({"model": "policy", **body}).encode()
        headers = {"Authorization": f"Bearer {self.address.api_key}"}
        response = await self.http.post(self.address.session_url(session) + path, content=content, headers=headers)
        return response.status_code, response.json()


@asynccontextmanager
async def served(**limits):
    gateway = Gateway(limits=GatewayLimits(**limits))
    async with serve(gateway) as address:
        server = Served(gateway, address)
        async with server.openai:
            yield server


def with_gateway(test=None, /, **limits):
    """Make a test of a coroutine whose first argument is a running gateway, a `Served`; `limits` are the gateway's."""
    if test is None:
        return partial(with_gateway, **limits)

    @wraps(test)
    async def run(**kwargs):
        async with served(**limits) as server:
            return await test(server, **kwargs)

    signature = inspect.signature(test)
    # What pytest has to give.
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])
    return run


def head(server: Served, *, length: int, session: str = "s", path: str = "chat/completions", more: str = "") -> bytes:
    """Return the head of a request to a session whose body has `length` bytes."""
    key = f"Authorization: Bearer {server.address.api_key}\r\nContent-Length: {length}\r\n"
    return f"POST /sessions/{session}/v1/{path} HTTP/1.1\r\nHost: x\r\n{key}{more}\r\n".encode()


async def connect(server: Served) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection without sending anything."""
    return await asyncio.open_connection("127.0.0.1", httpx.URL(server.address.url).port)


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def text_of(path) -> str:
    return tokenizer().decode(path.token_ids.tolist())
