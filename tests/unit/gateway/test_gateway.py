"""The gateway behind the public `openai` client, unchanged, on loopback; only the engines are scripted."""

import asyncio

import pytest
from gateway_cases import (
    PROMPT,
    SAMPLING,
    TOOLS,
    TURN,
    StreamingEngine,
    client_engine,
    encode,
    text_of,
    tool_reply,
    user,
    with_gateway,
)
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response
from scripted_llm import CHAT_TEMPLATE, END, SPECIAL, call_text, config, tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from typing_extensions import override
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from rollout_hooks.capture.call_kinds import CallKind
from rollout_hooks.capture.recording import RecordingClient
from rollout_hooks.capture.session_tree import SessionTree
from rollout_hooks.gateway import ChatFormat, ClientEngine, SessionSettings

pytestmark = pytest.mark.timeout(60)


FLAT_TOOL = {"type": "function", **TOOLS[0]["function"]}


ENGINES = {"client": client_engine, "streaming": StreamingEngine}


@pytest.mark.parametrize("kind", ENGINES)
@with_gateway
async def test_chat_completion(server, kind):
    engine = ENGINES[kind](lambda _: "hello")
    server.open("s", engine)
    answer = await server.ask()
    ChatCompletion.model_validate(answer.model_dump())
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("hello", None, "stop")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(encode(PROMPT)), 6)
    (leaf,) = engine.tree.leaves()
    assert text_of(leaf) == PROMPT + "hello" + END
    assert leaf.prompt_len == len(encode(PROMPT))


@pytest.mark.parametrize(("kind", "num_pieces"), [("client", 1), ("streaming", 5)])
@with_gateway
async def test_chat_completion_streams_what_the_engine_streams(server, kind, num_pieces):
    engine = ENGINES[kind](lambda _: "hello")
    server.open("s", engine)
    stream = await server.ask(stream=True, stream_options={"include_usage": True})
    chunks = [ChatCompletionChunk.model_validate(chunk.model_dump()) async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content for chunk in chunks[1:-2]]
    assert ("".join(pieces), len(pieces)) == ("hello", num_pieces)
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == 6
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ENGINES)
@with_gateway
async def test_tool_calls_come_back_as_the_model_wrote_them(server, kind, stream):
    """The model writes its arguments in its own way; the template would write `{"x": 3}` with other spaces."""
    turn = 'go <tool_call>{"name":  "double","arguments":{"x":3}}</tool_call>' + call_text(4)

    engine = ENGINES[kind](lambda prompt: "6 and 8" if "[6]" in prompt else turn)
    server.open("s", engine)
    create = server.client("s").chat.completions.create
    if stream:
        chunks = [c async for c in await create(model="policy", messages=user("q"), tools=TOOLS, stream=True)]
        deltas = [chunk.choices[0].delta for chunk in chunks]
        content = "".join(delta.content or "" for delta in deltas)
        (calls,) = [delta.tool_calls for delta in deltas if delta.tool_calls]
        assert [call.index for call in calls] == [0, 1]
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
    else:
        (choice,) = (await create(model="policy", messages=user("q"), tools=TOOLS)).choices
        assert choice.finish_reason == "tool_calls"
        content, calls = choice.message.content, choice.message.tool_calls
    assert content == "go "
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("double", '{"x": 3}'),
        ("double", '{"x": 4}'),
    ]
    sent = [
        {
            "id": c.id,
            "type": "function",
            "function": {"name": c.function.name, "arguments": c.function.arguments},
        }
        for c in calls
    ]
    history = [*user("q"), {"role": "assistant", "content": content, "tool_calls": sent}]
    history += [
        {"role": "tool", "tool_call_id": call.id, "content": str(number)}
        for call, number in zip(calls, (6, 8), strict=True)
    ]
    (final,) = (await create(model="policy", messages=history, tools=TOOLS)).choices
    assert final.message.content == "6 and 8"
    assert [call.kind for call in engine.tree.calls] == [CallKind.ROOT, CallKind.CONTINUATION]
    (leaf,) = engine.tree.leaves()
    trained = tokenizer().decode(leaf.token_ids[leaf.is_generated].tolist())
    assert trained == turn + END + "6 and 8" + END

    # A turn that the client changed is rendered as the client has it.
    history[1]["tool_calls"][0]["function"]["arguments"] = '{"x": 30}'
    await create(model="policy", messages=history, tools=TOOLS)
    assert engine.tree.calls[-1].kind is CallKind.REWRITE
    assert '{"name": "double", "arguments": {"x": 30}}' in text_of(engine.tree.leaves()[-1])


class OddPieces(LLMServerClient):
    """Samples "ab" as two tokens, where the tokenizer makes one of it."""

    def __init__(self, tokens):
        super().__init__(config=config())
        self.tokens = tokens
        self.prompts = []

    @override
    async def generate(self, request_id, *, prompt_ids, sampling_params, **kwargs):
        self.prompts.append(prompt_ids)
        sampled = [self.tokens.convert_tokens_to_ids(piece) for piece in ("a", "b", END)]
        return TokenOutput(token_ids=sampled, log_probs=[-1.0, -2.0, -3.0], stop_reason="completed")


@with_gateway
async def test_what_was_sampled_stays_though_the_tokenizer_would_cut_it_otherwise(server):
    """The history comes back as text, whose tokens are others; the recorder puts the sampled ones in their place."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *sorted(set("abgoq\nuserassistant")), "ab"])}
    raw = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    raw.decoder = decoders.Fuse()
    tokens = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token=END, pad_token="<pad>", additional_special_tokens=SPECIAL[:1]
    )
    tokens.chat_template = CHAT_TEMPLATE
    assert len(tokens.encode("ab", add_special_tokens=False)) == 1

    client = RecordingClient(OddPieces(tokens), tree=SessionTree(decode=tokens.decode))
    builder = create_continuous_token_builder(tokens, hf_model_type="qwen3")
    server.gateway.open_session(
        "s",
        ClientEngine(client),
        chat_format=ChatFormat(tokens, render=builder.build_initial_tokens),
        settings=SessionSettings(sampling=SAMPLING),
    )
    create = server.client("s").chat.completions.create
    first = (await create(model="policy", messages=user("q"))).choices[0].message
    assert first.content == "ab"
    await create(model="policy", messages=[*user("q"), {"role": "assistant", "content": "ab"}, *user("go")])
    assert [call.kind for call in client.tree.calls] == [CallKind.ROOT, CallKind.CONTINUATION]
    (leaf,) = client.tree.leaves()
    assert leaf.token_ids[leaf.source == 0].tolist() == tokens.convert_tokens_to_ids(["a", "b", END])
    assert client._client.prompts[1] == leaf.token_ids[: len(client._client.prompts[1])].tolist()


@with_gateway
async def test_text_that_looks_like_a_call_is_text_where_no_tools_were_given(server):
    server.open("s", client_engine(lambda _: TURN))
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        (choice,) = (await server.ask(**more)).choices
        assert (choice.message.content, choice.message.tool_calls) == (TURN, None)


@with_gateway
async def test_responses_with_tools_and_results(server):
    engine = server.scripted(tool_reply)
    create = server.client("s").responses.create
    first = await create(model="policy", input="q", instructions="be brief", tools=[FLAT_TOOL])
    Response.model_validate(first.model_dump())
    assert [item.type for item in first.output] == ["message", "function_call", "function_call"]
    assert (first.output_text, first.status) == ("go ", "completed")
    calls = first.output[1:]
    assert [(call.name, call.arguments) for call in calls] == [("double", '{"x": 3}'), ("double", '{"x": 4}')]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
        *[item.model_dump() for item in first.output],
        *[
            {"type": "function_call_output", "call_id": call.call_id, "output": str(number)}
            for call, number in zip(calls, (6, 8), strict=True)
        ],
    ]
    second = await create(model="policy", input=items, instructions="be brief", tools=[FLAT_TOOL])
    assert (second.output_text, second.usage.output_tokens) == ("6 and 8", 8)
    assert [call.kind for call in engine.tree.calls] == [CallKind.ROOT, CallKind.CONTINUATION]
    assert "<|im_start|>system\nbe brief<|im_end|>" in text_of(engine.tree.leaves()[0])


@pytest.mark.parametrize("tools", [[], [FLAT_TOOL]])
@with_gateway
async def test_responses_stream(server, tools):
    server.open("s", StreamingEngine(lambda _: TURN if tools else "hello"))
    stream = await server.client("s").responses.create(model="policy", input="q", tools=tools, stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    text = [
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * (1 if tools else 5),
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ]
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert kinds == ["created", "in_progress", *text, *call * (2 if tools else 0), "completed"]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == ("go " if tools else "hello")
    done = [event.item for event in events if event.type == "response.output_item.done"]
    final = events[-1].response
    assert [item.model_dump() for item in done] == [item.model_dump() for item in final.output]
    Response.model_validate(final.model_dump())


@with_gateway
async def test_the_openai_clients_own_stream_helper_reads_the_events(server):
    server.open("s", StreamingEngine(lambda _: TURN))
    async with server.client("s").responses.stream(model="policy", input="q", tools=[FLAT_TOOL]) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]


@with_gateway
async def test_parallel_requests_of_one_session_become_leaves_of_one_tree(server):
    engine = server.scripted(lambda prompt: "re " + prompt.split("q")[1][:1], delay=lambda _: 0.3)
    client = server.client("s")
    answers = await asyncio.gather(
        *(client.chat.completions.create(model="policy", messages=user(f"q{i}")) for i in range(8))
    )
    assert [a.choices[0].message.content for a in answers] == [f"re {i}" for i in range(8)]
    assert len(engine.tree.leaves()) == 8
    assert engine.scripted.most_running == 8


@with_gateway
async def test_n_choices_are_n_calls_with_seeds_of_their_own(server):
    engine = server.scripted()
    answer = await server.ask(n=3, seed=5, temperature=0.5, top_p=0.9, stop=["Z"], max_tokens=7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(engine.tree.leaves()) == 3
    expected = {"temperature": 0.5, "top_p": 0.9, "stop": ["Z"], "max_tokens": 7, "logprobs": True}
    assert engine.scripted.sampling_params == [{**expected, "seed": seed} for seed in (5, 6, 7)]


@with_gateway
async def test_sampling_of_the_session_is_the_default_and_wins_where_it_is_fixed(server):
    engine = client_engine(lambda _: "x")
    server.open("s", engine, sampling={**SAMPLING, "top_k": 9}, fixed=["temperature"], response_len=20)
    await server.ask(temperature=0.0, top_p=0.5, max_completion_tokens=50)
    assert engine.scripted.sampling_params == [
        {"temperature": 1.0, "top_p": 0.5, "top_k": 9, "logprobs": True, "max_tokens": 20}
    ]
    with pytest.raises(ValueError, match="give values for top_k"):
        SessionSettings(sampling=SAMPLING, fixed=frozenset(["top_k"]))


@with_gateway
async def test_stop_string_ends_the_text_and_length_is_a_reason(server):
    engine = StreamingEngine(lambda _: "one STOP two")
    server.open("s", engine)
    for stream in (False, True):
        answer = await server.ask(stop="STOP", stream=stream)
        if stream:
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in answer])
        else:
            text = answer.choices[0].message.content
        assert text == "one "
    (choice,) = (await server.ask(max_tokens=5)).choices
    assert (choice.message.content, choice.finish_reason) == ("one S", "length")
    response = await server.client("s").responses.create(model="policy", input="q", max_output_tokens=5)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@with_gateway
async def test_log_probs_are_the_engines(server):
    engine = client_engine(lambda _: "ab")
    server.open("s", engine, sampling={"logprobs": False})
    (choice,) = (await server.ask(logprobs=True)).choices
    (leaf,) = engine.tree.leaves()
    assert [each.token for each in choice.logprobs.content] == ["a", "b", END]
    assert [each.logprob for each in choice.logprobs.content] == leaf.log_probs[leaf.is_generated].tolist()
    server.open("t", StreamingEngine(lambda _: "ab"))
    stream = await server.ask(session="t", logprobs=True, stream=True)
    pieces = [chunk.choices[0].logprobs async for chunk in stream]
    assert [each.token for piece in pieces if piece for each in piece.content] == ["a", "b", END]


@with_gateway
async def test_session_by_header_and_models(server):
    server.scripted()
    client = server.client(default_headers={"X-Session-Id": "s"})
    await client.chat.completions.create(model="policy", messages=user("q"))
    assert [model.id async for model in client.models.list()] == ["policy"]
    assert [model.id async for model in server.client("s").models.list()] == ["policy"]
