"""The gateway behind the public `anthropic` client, unchanged, on loopback; only the engines are scripted."""

import base64
import io
import json

import anthropic
import pytest
from anthropic.types import Message, TextBlock, ThinkingBlock, ToolUseBlock
from gateway_cases import PROMPT, TURN, StreamingEngine, client_engine, encode, text_of, tool_reply, user, with_gateway
from PIL import Image
from scripted_llm import END, call_text

from rollout_hooks.gateway.app import _tell_without_effect

pytestmark = pytest.mark.timeout(60)

TOOLS = [
    {
        "name": "double",
        "description": "Double a number.",
        "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    }
]
ENGINES = {"client": client_engine, "streaming": StreamingEngine}
SYSTEM = "<|im_start|>system\nbe brief<|im_end|>\n"


def ask(client, messages=None, **more):
    return client.messages.create(**{"model": "policy", "max_tokens": 200, "messages": messages or user("q"), **more})


async def streamed(client, messages=None, **more):
    """Return the message that the client's own reader makes of a stream, and the types of its events."""
    wanted = {"model": "policy", "max_tokens": 200, "messages": messages or user("q"), **more}
    async with client.messages.stream(**wanted) as stream:
        kinds = [event.type async for event in stream]
        return await stream.get_final_message(), kinds


def without_ids(message):
    """Return what was told, without what differs from call to call."""
    content = [{**block, "id": ""} if "id" in block else block for block in message.to_dict()["content"]]
    told = {**message.to_dict(), "id": "", "content": content}
    return {name: value for name, value in told.items() if value is not None}


@pytest.mark.parametrize("kind", ENGINES)
@with_gateway
async def test_a_message(server, kind):
    engine = ENGINES[kind](lambda _: "hello")
    server.open("s", engine)
    message = await ask(server.anthropic(), system="be brief")
    Message.model_validate(message.to_dict())
    assert [(block.type, block.text) for block in message.content] == [("text", "hello")]
    assert (message.stop_reason, message.stop_sequence, message.model) == ("end_turn", None, "policy")
    assert (message.usage.input_tokens, message.usage.output_tokens) == (len(encode(SYSTEM + PROMPT)), 6)
    (leaf,) = engine.tree.leaves()
    assert text_of(leaf) == SYSTEM + PROMPT + "hello" + END


ANSWERS = [
    ("hello", {}),
    ("", {}),
    ("go on STOP here", {"stop_sequences": ["STOP", "x"]}),
    ("hello there", {"max_tokens": 4}),
    (TURN, {"tools": TOOLS}),
    (call_text(3), {"tools": TOOLS}),
    ("no call", {"tools": TOOLS}),
    ("<think>six</think>\n\n6", {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
    ("six</think>6 " + call_text(3), {"tools": TOOLS, "thinking": {"type": "adaptive"}}),
    ("<think>six</think>6", {"thinking": {"type": "disabled"}}),
]


@pytest.mark.parametrize("kind", ENGINES)
@with_gateway
async def test_a_stream_is_the_message(server, kind):
    for number, (reply, more) in enumerate(ANSWERS):
        server.open(f"s{number}", ENGINES[kind](lambda _, reply=reply: reply))
        client = server.anthropic(f"s{number}")
        whole = await ask(client, **more)
        told, kinds = await streamed(client, **more)
        assert without_ids(told) == without_ids(whole)
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


@with_gateway
async def test_reasons_to_stop(server):
    server.open("s", client_engine(lambda _: "go on STOP here"))
    client = server.anthropic()
    stopped = await ask(client, stop_sequences=["x", "STOP"])
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == ("go on ", "stop_sequence", "STOP")
    cut = await ask(client, max_tokens=2)
    assert (cut.content[0].text, cut.stop_reason) == ("go", "max_tokens")


@pytest.mark.parametrize("stream", [False, True])
@with_gateway
async def test_calls_and_their_results_go_on_in_one_leaf(server, stream):
    engine = client_engine(tool_reply)
    server.open("s", engine)
    client = server.anthropic()
    messages = user("q")
    first = (await streamed(client, messages, tools=TOOLS))[0] if stream else await ask(client, messages, tools=TOOLS)
    assert first.stop_reason == "tool_use"
    text, *calls = first.content
    assert isinstance(text, TextBlock)
    assert [(type(call), call.name, call.input) for call in calls] == [
        (ToolUseBlock, "double", {"x": 3}),
        (ToolUseBlock, "double", {"x": 4}),
    ]
    results = [
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": "[6]", "cache_control": {"type": "ephemeral"}},
        {"type": "tool_result", "tool_use_id": calls[1].id, "content": [{"type": "text", "text": "[8]"}]},
        {"type": "text", "text": "go on"},
    ]
    messages += [{"role": "assistant", "content": first.to_dict()["content"]}, {"role": "user", "content": results}]
    last = await ask(client, messages, tools=TOOLS)
    assert last.content[0].text == "6 and 8"
    (leaf,) = engine.tree.leaves()
    assert leaf.calls == (0, 1)
    *_, results_read, _ = text_of(leaf).split("<|im_start|>")
    assert "go on" in results_read


@pytest.mark.parametrize("reply", ["<think>six</think>\n\n6 " + call_text(3), "six</think>6 " + call_text(3)])
@with_gateway
async def test_thinking_comes_in_its_own_block_and_back_as_it_was(server, reply):
    engine = client_engine(lambda prompt: "6" if "[6]" in prompt else reply)
    server.open("s", engine)
    client, thinking = server.anthropic(), {"type": "adaptive"}
    first = await ask(client, tools=TOOLS, thinking=thinking)
    block, text, call = first.content
    assert isinstance(block, ThinkingBlock)
    assert (block.thinking, text.text.strip(), call.input) == ("six", "6", {"x": 3})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "[6]"}
    messages = [*user("q"), {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    await ask(client, messages, tools=TOOLS, thinking=thinking)
    (leaf,) = engine.tree.leaves()
    assert leaf.calls == (0, 1)


@with_gateway
async def test_an_agent_that_mixes_the_protocols_is_one_tree(server):
    engine = client_engine(lambda prompt: "abcdefg"[prompt.count("assistant\n")])
    server.open("s", engine)
    messages = user("q")
    for turn in range(6):
        if turn % 3 == 0:
            answer = (await ask(server.anthropic(), messages)).content[0].text
        elif turn % 3 == 1:
            answer = (await server.client("s").chat.completions.create(model="policy", messages=messages)).choices[0]
            answer = answer.message.content
        else:
            answer = (await server.client("s").responses.create(model="policy", input=messages)).output_text
        messages = [*messages, {"role": "assistant", "content": answer}, *user("on")]
    (leaf,) = engine.tree.leaves()
    assert leaf.calls == tuple(range(6))


@with_gateway
async def test_tokens_are_counted_without_a_call(server):
    engine = server.scripted()
    client = server.anthropic()
    counted = await client.messages.count_tokens(
        model="policy", messages=user("q"), system=[{"type": "text", "text": "be brief"}]
    )
    assert counted.input_tokens == len(encode(SYSTEM + PROMPT))
    long = await client.messages.count_tokens(model="policy", messages=user("q" * 5000))
    assert long.input_tokens > 5000
    assert not engine.tree.calls


@with_gateway
async def test_tools_can_be_forced_and_switched_off(server):
    engine = server.scripted(tool_reply)
    client = server.anthropic()
    forced = {"type": "tool", "name": "double", "disable_parallel_tool_use": True}
    await ask(client, tools=TOOLS, tool_choice=forced)
    assert "structured_outputs" in engine.scripted.sampling_params[-1]
    off = await ask(client, tools=TOOLS, tool_choice={"type": "none"})
    assert [block.type for block in off.content] == ["text"]
    for choice in ({"type": "tool", "name": "triple"}, {"type": "tool"}):
        with pytest.raises(
            anthropic.BadRequestError, match=r"tool_choice=.*, but `tools` has double: add the function"
        ):
            await ask(client, tools=TOOLS, tool_choice=choice)
    schema = {"type": "json_schema", "schema": {"type": "object", "properties": {}}}
    await ask(client, output_config={"format": schema})
    assert "structured_outputs" in engine.scripted.sampling_params[-1]


@with_gateway
async def test_what_changes_nothing_is_accepted_and_said_once(server, caplog):
    server.scripted(lambda _: "x")
    _tell_without_effect.cache_clear()
    body = {
        "max_tokens": 5,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "q", "cache_control": {"type": "ephemeral"}}]}
        ],
        "metadata": {"user_id": "u"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "high"},
        "context_management": {"edits": []},
        "service_tier": "auto",
    }
    for _ in range(2):
        status, answer = await server.post(body, path="/messages?beta=true")
        assert (status, answer["content"]) == (200, [{"type": "text", "text": "x"}])
    said = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]
    assert [message.split()[2] for message in said] == [
        "context_management,",
        "output_config.effort,",
        "thinking,",
    ]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
MALFORMED = {
    "no max_tokens": ({"max_tokens": None}, "max_tokens"),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens=0"),
    "no messages": ({"messages": None}, "messages"),
    "messages text": ({"messages": "q"}, "messages"),
    "messages numbers": ({"messages": [1]}, "messages.0"),
    "role tool": ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    "content number": ({"messages": [{"role": "user", "content": 1}]}, "messages.0.content"),
    "block unknown": ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages.0.content"),
    "block document": ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "messages.0"),
    "block without type": ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages.0.content"),
    "block null": ({"messages": [{"role": "user", "content": [None]}]}, "messages.0.content"),
    "text number": ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages.0.content"),
    "text more": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "more": 1}]}]},
        "unsupported parameter messages.0.content",
    ),
    "user calls": (
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
        "role user has a block tool_use",
    ),
    "user thinks": (
        {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
        "role user has a block thinking",
    ),
    "assistant has results": (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]}, *user("q")]},
        "role assistant has a block tool_result",
    ),
    "assistant shows": (
        {"messages": [{"role": "assistant", "content": [IMAGE]}, *user("q")]},
        "role assistant has a block image",
    ),
    "system shows": (
        {"messages": [{"role": "system", "content": [IMAGE]}, *user("q")]},
        "role system has a block image",
    ),
    "input text": (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": "x"}]}]},
        "messages.0.content",
    ),
    "prefill": ({"messages": [*user("q"), {"role": "assistant", "content": "So"}]}, "no turn is continued"),
    "image url": (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}]},
        "messages.0.content",
    ),
    "image gif": (
        {
            "messages": [
                {"role": "user", "content": [{**IMAGE, "source": {**IMAGE["source"], "media_type": "image/gif"}}]}
            ]
        },
        "media_type",
    ),
    "image broken": ({"messages": [{"role": "user", "content": [IMAGE]}]}, "image"),
    "result number": (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": 1}]}]},
        "messages.0.content",
    ),
    "result without id": (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
        "tool_use_id",
    ),
    "system number": ({"system": 1}, "system"),
    "system image": ({"system": [IMAGE]}, "system"),
    "tools object": ({"tools": {}}, "tools"),
    "tool without schema": ({"tools": [{"name": "f"}]}, "input_schema"),
    "tool without name": ({"tools": [{"input_schema": {}}]}, "tools.0.name"),
    "tool of the server": ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
    "tool schema list": ({"tools": [{"name": "f", "input_schema": []}]}, "input_schema"),
    "tool properties": (
        {"tools": [{"name": "f", "input_schema": {"properties": 1}}]},
        "`properties` must be an object",
    ),
    "tool required": ({"tools": [{"name": "f", "input_schema": {"required": "x"}}]}, "`required` must be a list"),
    "tool more": ({"tools": [{"name": "f", "input_schema": {}, "input_examples": [{}]}]}, "input_examples"),
    "too many tools": ({"tools": [{"name": f"f{i}", "input_schema": {}} for i in range(200)]}, "tools"),
    "choice text": ({"tool_choice": "auto"}, "tool_choice"),
    "choice unknown": ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    "choice any": ({"tool_choice": {"type": "any"}}, "`tools` has nothing"),
    "stream text": ({"stream": "please"}, "stream"),
    "temperature": ({"temperature": 1.5}, "temperature=1.5"),
    "temperature text": ({"temperature": "hot"}, "temperature"),
    "top_p": ({"top_p": 0}, "top_p=0"),
    "top_k": ({"top_k": 5}, "top_k=5: the policy is trained as it samples"),
    "stop text": ({"stop_sequences": "x"}, "stop_sequences"),
    "stop empty": ({"stop_sequences": [""]}, "stop_sequences.0"),
    "stop many": ({"stop_sequences": ["a", "b", "c", "d", "e"]}, "stop_sequences"),
    "stop long": ({"stop_sequences": ["a" * 300]}, "stop_sequences.0"),
    "thinking text": ({"thinking": "much"}, "thinking"),
    "thinking type": ({"thinking": {"type": "deep"}}, "thinking.type"),
    "format": ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    "schema": ({"output_config": {"format": {"type": "json_schema", "schema": 1}}}, "output_config.format"),
    "tier": ({"service_tier": "best"}, "service_tier"),
    "container": ({"container": "c"}, "container"),
    "mcp": ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
    "logprobs": ({"logprobs": True}, "logprobs"),
    "many fields": ({f"f{i}": 1 for i in range(70)}, "fields, and 64 are the most"),
    "model number": ({"model": 1}, "model"),
    "nan": (b'{"model": "policy", "max_tokens": NaN, "messages": []}', "max_tokens=nan"),
    "no json": (b"{", "body"),
    "a list": (b"[]", "body"),
    "half a character": (
        b'{"model": "policy", "max_tokens": 5, "messages": [{"role": "user", "content": "\\ud800"}]}',
        "",
    ),
}


@with_gateway
async def test_what_is_malformed_gets_anthropics_error(server):
    engine = server.scripted()
    for case, (changed, message) in MALFORMED.items():
        body = changed if isinstance(changed, bytes) else {"max_tokens": 5, "messages": user("q"), **changed}
        status, answer = await server.post(body, path="/messages")
        assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error"), case
        assert message in answer["error"]["message"], (case, answer)
    assert not engine.tree.calls


@pytest.mark.parametrize(
    ("options", "model", "error"),
    [
        ({"api_key": "wrong"}, "policy", anthropic.AuthenticationError),
        ({"api_key": None, "auth_token": "wrong"}, "policy", anthropic.AuthenticationError),
        ({}, "claude", anthropic.NotFoundError),
    ],
)
@with_gateway
async def test_other_refusals_have_the_clients_own_errors(server, options, model, error):
    server.scripted()
    with pytest.raises(error):
        await ask(server.anthropic(**options), model=model)
    with pytest.raises(anthropic.NotFoundError):
        await ask(server.anthropic("other"))


@with_gateway
async def test_either_header_carries_the_key(server):
    server.scripted(lambda _: "x")
    client = server.anthropic(api_key=None, auth_token=server.address.api_key)
    assert (await ask(client)).content[0].text == "x"


@pytest.mark.parametrize("num_before_error", [0, 3])
@with_gateway
async def test_a_call_that_fails_is_an_error_or_ends_the_stream_with_one(server, num_before_error):
    engine = StreamingEngine(lambda _: "hello")
    whole = engine.stream

    async def failing(*args, **kwargs):
        num = 0
        async for chunk in whole(*args, **kwargs):
            if num == num_before_error:
                raise RuntimeError("injected")
            num += 1
            yield chunk

    engine.stream = failing
    server.open("s", engine)
    with pytest.raises(anthropic.APIStatusError, match="injected"):
        await streamed(server.anthropic())
    with pytest.raises(anthropic.InternalServerError, match="injected"):
        await ask(server.anthropic())


@with_gateway
async def test_images_are_read_as_openais_are(server):
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(file.getvalue()).decode()}
    server.scripted()
    with pytest.raises(anthropic.BadRequestError, match="this model reads text: send no images"):
        await ask(server.anthropic(), [{"role": "user", "content": [{"type": "image", "source": source}]}])
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": source}]}
    with pytest.raises(anthropic.BadRequestError, match="this model reads text: send no images"):
        await ask(server.anthropic(), [{"role": "user", "content": [result]}])


@with_gateway
async def test_arguments_that_are_no_object_reach_the_agent_as_text(server):
    reply = '<tool_call>\n{"name": "double", "arguments": [3]}\n</tool_call>'
    server.scripted(lambda _: reply)
    (call,) = (await ask(server.anthropic(), tools=TOOLS)).content
    assert call.input == {"arguments": "[3]"} or json.loads(call.input["arguments"]) == [3]
