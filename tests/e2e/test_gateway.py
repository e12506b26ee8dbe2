"""Capture of one real vLLM engine on the CPU from three places: verl's client, AsyncLLM, and the gateway."""

import asyncio
import json
import os
import re
from contextlib import aclosing
from functools import partial
from types import SimpleNamespace

import openai
import pytest
import torch
from gateway_cases import TOOLS, chat_format, user
from scripted_llm import config, tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM
from typing_extensions import override
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.reader import Counter, Histogram, get_metrics_snapshot

from rollout_hooks.capture.async_llm import RecordingAsyncLLM
from rollout_hooks.capture.call_kinds import CallKind
from rollout_hooks.capture.recording import RecordingClient
from rollout_hooks.capture.session_tree import CallStatus, SessionTree
from rollout_hooks.gateway import AsyncLLMEngine, ClientEngine, Gateway, SessionSettings, serve
from verl_tree.dashboards.grafana import TOPICS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CONTEXT_LEN = 512
SAMPLING = {"temperature": 1.0, "top_p": 0.95, "max_tokens": 20}
NUM_SESSIONS = 64


@pytest.fixture(scope="module")
def loop():
    """Return one event loop for the module, because an engine belongs to the loop that used it first."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def engine(loop, tmp_path_factory):
    """Start AsyncLLM with a random two-layer Qwen3."""
    folder = str(tmp_path_factory.mktemp("model"))
    torch.manual_seed(3)
    tokenizer().save_pretrained(folder)
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer()),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=CONTEXT_LEN,
            tie_word_embeddings=True,
            eos_token_id=tokenizer().eos_token_id,
            pad_token_id=tokenizer().pad_token_id,
            bos_token_id=None,
        )
    ).save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
        patch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
        # Prefix caching would change which tokens share a matrix product, and so the last bits of the log-probs.
        arguments = AsyncEngineArgs(
            model=folder,
            dtype="float32",
            max_model_len=CONTEXT_LEN,
            max_num_seqs=NUM_SESSIONS,
            enforce_eager=True,
            enable_prefix_caching=False,
        )

        async def start():
            return AsyncLLM.from_engine_args(arguments)

        engine = loop.run_until_complete(start())
    yield engine
    engine.shutdown()
    loop.run_until_complete(asyncio.sleep(0.1))


class LoggedEngine:
    """The engine of one session, with a log of what it sampled in each call.

    Call number `fails_at` (from 0) fails before it samples anything. Call number `breaks_at` fails after its first
    tokens, if it has more and they are streamed.
    """

    def __init__(self, engine, *, fails_at=None, breaks_at=None):
        self._engine, self._fails_at, self._breaks_at = engine, fails_at, breaks_at
        self._num_calls = 0
        self.log = []

    async def generate(self, prompt, sampling_params, request_id, **kwargs):
        call = self._num_calls
        self._num_calls += 1
        if call == self._fails_at:
            raise RuntimeError("injected before the call")
        is_delta = sampling_params.output_kind is RequestOutputKind.DELTA
        entry = (list(prompt["prompt_token_ids"]), [])
        self.log.append(entry)
        async with aclosing(self._engine.generate(prompt, sampling_params, request_id, **kwargs)) as outputs:
            async for output in outputs:
                token_ids = list(output.outputs[0].token_ids)
                entry[1][:] = entry[1] + token_ids if is_delta else token_ids
                yield output
                if call == self._breaks_at and is_delta and not output.finished:
                    raise RuntimeError("injected in the middle of the call")


class LocalServer(vLLMHttpServer):
    """verl's server actor on an engine in this process: `generate` is verl's own."""

    def __init__(self, engine):
        self.engine = engine
        self.config = config(max_model_len=CONTEXT_LEN, name="vllm").actor_rollout_ref.rollout
        self.model_config = SimpleNamespace(processor=None, lora_rank=0, lora={})
        self._disaggregation_role = "null"
        self.replica_rank = 0
        self.global_steps = 7
        self._submission_paused = False
        self._admitting = 0


class LocalClient(LLMServerClient):
    """verl's client whose one server is in this process: `generate` is verl's own."""

    def __init__(self, engine):
        super().__init__(config=config(name="vllm"))
        server = LocalServer(engine)
        self._handle = SimpleNamespace(generate=SimpleNamespace(remote=server.generate))

    @override
    async def _acquire_server(self, request_id, **extra):
        return "0", self._handle

    def _release_server(self, server_id, request_id=None):
        pass


@ToolParser.register("every_turn_calls")
class EveryTurnCalls(ToolParser):
    """A parser that reads any text as two tool calls, because a random model writes none."""

    @override
    async def extract_tool_calls(self, responses_ids, tools=None):
        text = self.tokenizer.decode(responses_ids[:4])
        return "", [FunctionCall(name="double", arguments=f'{{"x": {x}}}') for x in (len(text), 2)]


def new_tree():
    return SessionTree(decode=tokenizer().decode)


def recording_client(engine):
    return RecordingClient(LocalClient(engine), tree=new_tree())


async def scripted_agent(chat):
    """Take three turns, branching after the first, then ask another question. Each call has a seed of its own."""
    first = [*user("a question"), {"role": "assistant", "content": await chat(user("a question"), seed=1)}]
    for seed, text in ((2, "go on"), (3, "or else")):
        asked = [*first, *user(text)]
        answered = [*asked, {"role": "assistant", "content": await chat(asked, seed=seed)}]
        await chat([*answered, *user("end")], seed=10 + seed)
    await chat(user("another question"), seed=5)


async def through_verls_client(engine):
    client, text_format = recording_client(engine), chat_format()

    async def chat(messages, *, seed):
        output = await client.generate(
            "r",
            prompt_ids=text_format.prompt_ids(messages, []),
            sampling_params={**SAMPLING, "seed": seed, "logprobs": True},
        )
        return text_format.decode(text_format.without_stop_token(output.token_ids))

    await scripted_agent(chat)
    return client.tree


async def through_async_llm(engine):
    llm, text_format = RecordingAsyncLLM(engine, new_tree=new_tree), chat_format()

    async def chat(messages, *, seed):
        params = SamplingParams(**SAMPLING, seed=seed)
        async for output in llm.generate(text_format.prompt_ids(messages, []), params, f"{id(llm)}-{seed}"):
            token_ids = list(output.outputs[0].token_ids)
        return text_format.decode(text_format.without_stop_token(token_ids))

    await scripted_agent(chat)
    return llm.tree


async def through_the_gateway(session_engine):
    gateway = Gateway()
    settings = SessionSettings(sampling={"logprobs": True}, context_len=CONTEXT_LEN)
    gateway.open_session("s", session_engine, chat_format=chat_format(), settings=settings)
    async with (
        serve(gateway) as address,
        openai.AsyncOpenAI(base_url=address.session_url("s"), api_key=address.api_key) as client,
    ):

        async def chat(messages, *, seed):
            answer = await client.chat.completions.create(model="policy", messages=messages, seed=seed, **SAMPLING)
            return answer.choices[0].message.content

        await scripted_agent(chat)
    return session_engine.tree


def forest(tree):
    leaves = [(leaf.token_ids.tolist(), leaf.source.tolist(), leaf.log_probs.tolist()) for leaf in tree.leaves()]
    return leaves, [(call.kind, call.num_shared, call.num_prompt, call.num_output) for call in tree.calls]


def test_the_same_agent_gives_the_same_forest_in_all_three_places(loop, engine):
    """All tokens and log-probs are equal, without any tolerance."""

    async def all_places():
        return [
            await through_verls_client(engine),
            await through_async_llm(engine),
            await through_the_gateway(ClientEngine(recording_client(engine))),
            await through_the_gateway(AsyncLLMEngine(RecordingAsyncLLM(engine, new_tree=new_tree))),
        ]

    trees = loop.run_until_complete(all_places())
    leaves, calls = forest(trees[0])
    assert [kind for kind, *_ in calls] == [
        CallKind.ROOT,
        CallKind.CONTINUATION,
        CallKind.CONTINUATION,
        CallKind.FORK,
        CallKind.CONTINUATION,
        calls[-1][0],
    ]
    assert len(leaves) == 3
    assert all(value < 0 for *_, log_probs in leaves for value in log_probs if value)
    for tree in trees[1:]:
        assert forest(tree) == (leaves, calls)


CHOICE = {"type": "string", "enum": ["left", "right"]}
TURN_TO = {"type": "object", "properties": {"to": CHOICE}, "required": ["to"], "additionalProperties": False}
TURN_TOOL = {"type": "function", "function": {"name": "turn", "description": "Turn.", "parameters": TURN_TO}}
TURN_JSON = {"type": "json_schema", "json_schema": {"name": "turn", "schema": TURN_TO}}


@pytest.mark.parametrize("place", ["verls_client", "async_llm"])
def test_a_random_model_keeps_to_a_prescribed_form(loop, engine, place):
    """It writes tool calls and JSON that it never would by itself, and every token is recorded as it was sampled."""
    if place == "verls_client":
        session_engine = ClientEngine(recording_client(engine))
    else:
        session_engine = AsyncLLMEngine(RecordingAsyncLLM(engine, new_tree=new_tree))
    gateway = Gateway()
    settings = SessionSettings(sampling={"temperature": 1.0, "logprobs": True}, context_len=CONTEXT_LEN)
    gateway.open_session("s", session_engine, chat_format=chat_format(), settings=settings)

    async def ask():
        async with (
            serve(gateway) as address,
            openai.AsyncOpenAI(base_url=address.session_url("s"), api_key=address.api_key) as client,
        ):
            create = partial(client.chat.completions.create, model="policy", messages=user("where?"), seed=1)
            forced = await create(tools=[TURN_TOOL], tool_choice="required", parallel_tool_calls=False)
            free = await create(tools=[TURN_TOOL], max_tokens=20)
            return forced.choices[0], free.choices[0], (await create(response_format=TURN_JSON)).choices[0]

    forced, free, written = loop.run_until_complete(ask())
    (call,) = forced.message.tool_calls
    assert call.function.name == "turn"
    assert json.loads(call.function.arguments)["to"] in CHOICE["enum"]
    assert not free.message.tool_calls
    assert json.loads(written.message.content)["to"] in CHOICE["enum"]
    calls = session_engine.tree.calls
    assert [each.status for each in calls] == [CallStatus.COMPLETED] * 3
    assert sum(leaf.is_generated.sum() for leaf in session_engine.tree.leaves()) == sum(c.num_output for c in calls)


async def read_stream(create, messages, *, goes_away):
    """Read an answer to its end or leave at its first piece; return False if it broke off, which no client retries."""
    stream = await create(model="policy", messages=messages, tools=TOOLS, tool_choice="none", stream=True)
    try:
        async for _ in stream:
            if goes_away:
                await stream.close()
                break
    except openai.APIError as error:
        if "injected in the middle" not in error.message:
            raise
        return False
    return True


async def openai_agent(client, number, *, goes_away):
    """Call two tools in a turn, send the results, get an answer, and ask another question. Some clients go away."""
    create = client.chat.completions.create
    beside = asyncio.create_task(create(model="policy", messages=user(f"beside {number}")))
    messages = user(f"session {number}")
    message = (await create(model="policy", messages=messages, tools=TOOLS)).choices[0].message
    assert len(message.tool_calls) == 2
    messages = [*messages, message.model_dump(exclude_none=True)]
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "6"} for call in message.tool_calls]
    while not await read_stream(create, messages, goes_away=goes_away):
        pass
    if goes_away:
        abandoned = asyncio.create_task(create(model="policy", messages=[*messages, *user("again")]))
        await asyncio.sleep(0.05)
        abandoned.cancel()
    await beside


def test_64_openai_agents_lose_no_token_to_disconnects_and_errors(loop, engine):
    """Call by call, the trees hold what the engine sampled."""

    async def all_sessions():
        gateway, sessions = Gateway(), []
        async with serve(gateway) as address:
            async with openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key, max_retries=10) as client:
                for number in range(NUM_SESSIONS):
                    fails_at, breaks_at = {0: (0, 2), 3: (1, None), 6: (None, 3)}.get(number % 8, (None, None))
                    logged = LoggedEngine(engine, fails_at=fails_at, breaks_at=breaks_at)
                    if number % 2:
                        session_engine = ClientEngine(recording_client(logged))
                    else:
                        session_engine = AsyncLLMEngine(RecordingAsyncLLM(logged, new_tree=new_tree))
                    text_format = chat_format(tool_parser=EveryTurnCalls(tokenizer()))
                    settings = SessionSettings(sampling={**SAMPLING, "logprobs": True}, context_len=CONTEXT_LEN)
                    gateway.open_session(f"s{number}", session_engine, chat_format=text_format, settings=settings)
                    sessions.append((logged.log, session_engine.tree))
                agents = [
                    openai_agent(client.with_options(base_url=address.session_url(f"s{i}")), i, goes_away=i % 10 < 2)
                    for i in range(NUM_SESSIONS)
                ]
                results = await asyncio.gather(*agents, return_exceptions=True)
            await asyncio.gather(*(gateway.close_session(f"s{number}") for number in range(NUM_SESSIONS)))
        return results, sessions

    results, sessions = loop.run_until_complete(all_sessions())
    assert results == [None] * NUM_SESSIONS, [r for r in results if r is not None]
    statuses = []
    for log, tree in sessions:
        calls = [call for call in tree.calls if call.status is not CallStatus.FAILED]
        statuses += [call.status for call in tree.calls]
        assert sorted((call.num_prompt, call.num_output) for call in calls) == sorted(
            (len(prompt), len(sampled)) for prompt, sampled in log
        )
        for prompt, sampled in log:
            path = tree.locate(prompt + sampled)
            assert path.is_generated[len(prompt) :].all()
            assert (path.log_probs[len(prompt) :] < 0).all()
    assert statuses.count(CallStatus.FAILED) == 2 * NUM_SESSIONS // 8
    assert CallStatus.ABORTED in statuses
    assert statuses.count(CallStatus.COMPLETED) >= 3 * NUM_SESSIONS


@pytest.mark.usefixtures("engine")
def test_vllm_has_the_metrics_of_the_dashboard():
    """Prometheus sees counters and histograms under longer names."""
    endings = {Counter: "_total", Histogram: "_bucket"}
    exported = {f"{metric.name}{endings.get(type(metric), '')}" for metric in get_metrics_snapshot()}
    queries = " ".join(query for panel in TOPICS["Rollout: vLLM"] for query in panel.queries.values())
    used = set(re.findall(r"vllm:\w+", queries))
    assert len(used) == 11
    assert used <= exported
