"""Requests that once stalled, crashed or outlived the gateway; docs/gateway.md has the limits that they meet."""

import asyncio
import gc
import json
import random
import threading
import time

import openai
import pytest
from gateway_cases import PROMPT, TOOLS, chat_format, client_engine, connect, head, served, user, with_gateway
from scripted_llm import END, call_text, tokenizer
from verl.workers.rollout.replica import TokenOutput

from rollout_hooks.gateway.chat_api import ChatAnswer
from rollout_hooks.gateway.chat_format import TextStream
from rollout_hooks.gateway.limits import MAX_ERROR_LEN
from rollout_hooks.gateway.requests import ChatBody

pytestmark = pytest.mark.timeout(60)


async def longest_pause(work):
    """Return the seconds for which the event loop stood still while `work` ran, and its result."""
    task = asyncio.ensure_future(work)
    longest, last = 0.0, time.perf_counter()
    while not task.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest, task.result()


@with_gateway
async def test_bodies_that_end_after_the_session_was_closed_make_no_call(server):
    engine = server.scripted()
    raw = json.dumps({"model": "policy", "messages": user("q")}).encode()
    pipes = [await connect(server) for _ in range(20)]
    for _, writer in pipes:
        writer.write(head(server, length=len(raw), more="Connection: close\r\n") + raw[:-1])
    assert (await server.post({"messages": user("q")}))[0] == 200
    await server.gateway.close_session("s")
    # The name, opened again, is another session.
    other = client_engine(lambda _: "x")
    server.open("s", other)
    for _, writer in pipes:
        writer.write(raw[-1:])
    answers = [await reader.read() for reader, _ in pipes]
    assert [answer.split()[1] for answer in answers] == [b"404"] * 20
    assert all(b"session_not_found" in answer for answer in answers)
    assert (len(engine.tree.calls), len(other.tree.calls)) == (1, 0)


@with_gateway
async def test_calls_are_recorded_in_the_order_of_their_requests_though_some_prompts_take_long(server):
    render = chat_format()._render
    goes_on = threading.Event()

    def slow_first(messages, **kwargs):
        if messages[-1]["content"] == "q0":
            assert goes_on.wait(30)
        return render(messages, **kwargs)

    engine, other = client_engine(lambda _: "x"), client_engine(lambda _: "x")
    server.open("s", engine, form=chat_format(render=slow_first))
    server.open("t", other)
    asked, body_len = [], 0
    for i in range(4):
        asked.append(asyncio.create_task(server.ask(f"q{i}")))
        # The next request is sent when the body of this one has come.
        while server.gateway._num_waiting_bytes < max(1, (i + 1) * body_len):
            await asyncio.sleep(0.005)
        body_len = body_len or server.gateway._num_waiting_bytes
    await server.ask(session="t")
    assert (len(engine.tree.calls), len(other.tree.calls)) == (0, 1)
    goes_on.set()
    await asyncio.gather(*asked)
    assert engine.scripted.prompts == [PROMPT.replace("q", f"q{i}") for i in range(4)]


@with_gateway
async def test_a_prompt_that_takes_long_stops_nobody(server):
    def slow(_, **__):
        time.sleep(1.5)
        return [5]

    server.open("s", client_engine(lambda _: "x"), form=chat_format(render=slow))
    pause, (status, _) = await longest_pause(server.post({"messages": user("q")}))
    assert status == 200
    assert pause < 1


def test_what_the_process_held_before_is_left_out_of_collections_while_a_gateway_serves():
    """A full collection of all that vLLM and verl are made of would stop the event loop for half a second."""

    async def serve():
        async with served():
            return gc.get_freeze_count()

    num_before = len(gc.get_objects())
    assert gc.get_freeze_count() == 0
    assert asyncio.run(serve()) > 0.9 * num_before
    assert gc.get_freeze_count() == 0


@with_gateway
async def test_log_probs_of_many_choices_are_written_one_choice_at_a_time(server, monkeypatch):
    """And each token's text is looked up once for a choice. Together they would stop the other requests for seconds."""
    session = server.open("s", client_engine(lambda _: "abc" * 100))
    asked = ChatBody(model="policy", messages=user("q"), n=10, logprobs=True)
    calls = session.start(session.prepare(asked.turn_request()))
    await asyncio.gather(*(call.task for call in calls))
    decoded = []
    decode = session.chat_format.decode
    monkeypatch.setattr(session.chat_format, "decode", lambda ids: decoded.append(len(ids)) or decode(ids))
    answer = asyncio.ensure_future(ChatAnswer(session, asked, calls).whole())
    num_pauses = 0
    while not answer.done():
        await asyncio.sleep(0)
        num_pauses += 1
    assert num_pauses >= 10
    assert decoded.count(1) == 10 * len({*"abc", END})
    (content,) = {json.dumps(choice["logprobs"]["content"]) for choice in answer.result()["choices"]}
    assert [each["token"] for each in json.loads(content)] == [*"abc" * 100, END]


@with_gateway(max_text_len=200_000)
async def test_texts_are_measured_before_they_are_tokenised(server):
    """The longest token of this tokenizer is `<|vision_start|>`, of 16 characters."""
    rendered = []

    def render(messages, **_):
        rendered.append(messages)
        return [5]

    form = chat_format(render=render)
    server.open("s", client_engine(lambda _: "x"), form=form, context_len=5000)
    server.open("t", client_engine(lambda _: "x"), form=form)
    status, answer = await server.post({"messages": user("x" * (16 * 5000 + 1))})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert "a token at most 16, and this model's maximum context length is 5000 tokens" in answer["error"]["message"]
    function = {"name": "f", "description": "x" * 16 * 5000}
    status, answer = await server.post({"messages": user("q"), "tools": [{"type": "function", "function": function}]})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert (await server.post({"messages": user("x" * 200_001)}, session="t"))[0] == 413
    assert not rendered
    assert (await server.post({"messages": user("x" * 16 * 4990)}))[0] == 200
    assert (await server.post({"messages": user("x" * 100_000)}, session="t"))[0] == 200
    assert len(rendered) == 2


@with_gateway(max_text_len=200_000)
async def test_turns_in_the_models_own_words_are_measured_as_such(server):
    """They are as long as what was sampled, though the client sends the calls only."""
    rendered = []

    def render(messages, **_):
        rendered.append(messages)
        return [5]

    sampled = "<tool_call>" + "z" * 50_000 + "</tool_call>" + call_text(3)

    server.open("s", client_engine(lambda _: sampled), form=chat_format(render=render))
    _, answer = await server.post({"messages": user("q"), "tools": TOOLS})
    calls = answer["choices"][0]["message"]["tool_calls"]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    for num_turns, expected in ((3, 200), (4, 413)):
        status, _ = await server.post({"messages": [*user("q"), *[turn] * num_turns], "tools": TOOLS})
        assert status == expected
    assert [sum("z" * 50_000 in each["content"] for each in messages) for messages in rendered] == [0, 3]


def nested(depth):
    return '{"x":' * depth + "1" + "}" * depth


TOO_MUCH = {
    "messages that are none": b'{"model":"policy","messages":[' + b"1," * 100_000 + b"1]}",
    "unknown fields": b'{"model":"policy",' + b",".join(b'"%d":1' % i for i in range(50_000)) + b"}",
    "a long name": b'{"model":"policy","messages":[],"' + b"x" * 1_000_000 + b'":1}',
    "another model": b'{"model":"' + b"x" * 1_000_000 + b'","messages":[]}',
    "broken": b'{"model":"policy","messages":[' + b'{"role":"user","content":5},' * 4000 + b"1]}",
    "a long number": b'{"model":"policy","messages":[],"n":' + b"9" * 4000 + b"}",
    "values": b'{"model":"policy","messages":[' + b"[]," * 2_000_000 + b"[]]}",
    "fields of several messages": json.dumps(
        {"model": "policy", "messages": [{"role": "user", **{str(i): 1 for i in range(40)}} for _ in range(9)]}
    ).encode(),
}


@pytest.mark.parametrize("kind", TOO_MUCH)
@with_gateway
async def test_errors_are_short_and_quick(server, kind):
    engine = server.scripted()
    used_s = time.process_time()
    status, answer = await server.post(TOO_MUCH[kind])
    assert time.process_time() - used_s < 2
    assert status in (400, 404, 413)
    assert len(json.dumps(answer)) < MAX_ERROR_LEN + 500
    assert not engine.tree.calls


@with_gateway
async def test_an_error_names_ten_problems_and_counts_the_rest(server):
    server.scripted()
    _, answer = await server.post({"messages": user("q"), **{f"x{i}": i for i in range(15)}})
    parts = answer["error"]["message"].split("; ")
    assert [part.split("=")[0] for part in parts[:10]] == [f"unsupported parameter x{i}" for i in range(10)]
    assert parts[10:] == ["and 5 more"]


class Characters:
    """A tokenizer of characters that counts how many it decodes."""

    num_decoded = 0

    def decode(self, token_ids):
        self.num_decoded += len(token_ids)
        return "".join(map(chr, token_ids))

    def ends_itself(self, _):
        return False


def test_stop_strings_are_searched_for_in_the_end_of_a_text_only():
    stream = TextStream(Characters(), stop=["STOP", "SET"])
    text = ""
    for character in "no stop" * 300 + " SE":
        text += stream.push([ord(character)])
        assert len(stream._held) < len("STOP")
    assert text == stream.text == ("no stop" * 300 + " SE")[:-3]
    assert stream.push(list(b"T and more STOP")) == " "
    assert stream.finish() == ""
    assert stream.text == text + " "


def test_bytes_that_are_no_text_are_not_decoded_again_and_again():
    decoder = Characters()
    stream = TextStream(decoder)
    text = "".join(stream.push([0xFFFD]) for _ in range(1000)) + stream.finish()
    assert text == "\ufffd" * 1000
    assert decoder.num_decoded < 20_000


class Bytes:
    """A tokenizer whose tokens are one or a few bytes, decoded as byte-level vocabularies do, or by byte fallback.

    By byte fallback (SentencePiece), bytes that are no text are a mark each, with all those beside them.
    """

    num_decoded = 0

    def __init__(self, *, falls_back=False):
        self.falls_back = falls_back

    def decode(self, tokens):
        self.num_decoded += len(tokens)
        text = b"".join(tokens).decode(errors="replace")
        return "\ufffd" * len(b"".join(tokens)) if self.falls_back and "\ufffd" in text else text

    def ends_itself(self, _):
        return False


def streamed(decoder, pushes, *, stop=()):
    stream = TextStream(decoder, stop=stop)
    text = "".join([stream.push(tokens) for tokens in pushes]) + stream.finish()
    assert text == stream.text
    return text


def cut(raw, rng, *, longest):
    """Yield parts of some bytes, of 1 to `longest` bytes each."""
    while raw:
        size = rng.randint(1, longest)
        yield raw[:size]
        raw = raw[size:]


@pytest.mark.parametrize("longest", [1, 2, 3, 7])
def test_streams_of_any_bytes_are_their_text_up_to_the_first_stop(longest):
    """Characters of 1 to 4 bytes and broken ones, in tokens that end anywhere, some of which come together."""
    rng, num_stopped = random.Random(longest), 0
    for _ in range(300):
        pieces = rng.choices(["a", "\u00e9", "\u4f60", "\U0001f600", b"\xe2", b"\x82", b" \xf0\x9f", b"\xff"], k=60)
        raw = b"".join(each.encode() if isinstance(each, str) else each for each in pieces)
        tokens = list(cut(raw, rng, longest=longest))
        text = raw.decode(errors="replace")
        stop = ["".join(rng.choices("a\u00e9\u4f60", k=k)) for k in (2, 3) if rng.random() < 0.5]
        end = min((at for at in map(text.find, stop) if at >= 0), default=len(text))
        assert streamed(Bytes(), cut(tokens, rng, longest=4), stop=stop) == text[:end]
        num_stopped += end < len(text)
    assert 20 < num_stopped < 280


def test_characters_in_bytes_of_their_own_are_streamed():
    text = "a\u4f60\u597d\U0001f600\U0001f600 \u00e9\u00e9b" * 5
    tokens = [bytes([each]) for each in text.encode()]
    assert streamed(Bytes(falls_back=True), [[token] for token in tokens]) == text


def test_tokens_that_end_within_a_character_are_not_decoded_again_and_again():
    decoder = Bytes()
    stream = TextStream(decoder)
    texts = [stream.push([b" \xf0\x9f"]) for _ in range(1000)]
    assert max(map(len, texts)) < 50
    assert "".join(texts) + stream.finish() == " \ufffd" * 1000
    assert decoder.num_decoded < 20_000


@pytest.mark.parametrize("stream", [False, True])
@with_gateway
async def test_log_probs_that_are_no_json_are_written_as_vllm_writes_them(server, stream):
    ids = tokenizer().encode("ab" + END, add_special_tokens=False)
    output = TokenOutput(token_ids=ids, log_probs=[float("-inf"), float("nan"), -0.5], stop_reason="completed")

    server.open("s", client_engine(lambda _: output))
    client = server.client("s")
    answer = await client.chat.completions.create(model="policy", messages=user("q"), logprobs=True, stream=stream)
    parts = [chunk async for chunk in answer] if stream else [answer]
    given = [each.logprob for part in parts if (log_probs := part.choices[0].logprobs) for each in log_probs.content]
    assert given == [-9999.0, -9999.0, -0.5]


ODD_CALLS = {
    "lists": '{"name": "double", "arguments": ' + "[" * 5000 + "]" * 5000 + "}",
    "deep": '{"name": "double", "arguments": ' + nested(900) + "}",
    "long number": '{"name": "double", "arguments": {"x": ' + "9" * 5000 + "}}",
    "half a character": '{"name": "double", "arguments": {"x": "\\ud800"}}',
    "no name": '{"name": 5, "arguments": {"x": 1}}',
    "no number": '{"name": "double", "arguments": {"x": NaN}}',
}


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("kind", ODD_CALLS)
@with_gateway
async def test_odd_calls_of_the_model_are_answered_and_can_be_sent_back(server, kind, api):
    engine = server.scripted(lambda _: f"<tool_call>{ODD_CALLS[kind]}</tool_call>")
    if api == "chat":
        asked = {"messages": user("q"), "tools": TOOLS}
        status, answer = await server.post(asked)
        assert status == 200
        asked["messages"].append(answer["choices"][0]["message"] | {"refusal": None})
        asked["messages"][-1].pop("refusal")
        status, _ = await server.post(asked)
    else:
        asked = {"input": "q", "tools": [{"type": "function", **TOOLS[0]["function"]}]}
        status, answer = await server.post(asked, path="/responses")
        assert status == 200
        status, _ = await server.post({**asked, "previous_response_id": answer["id"]}, path="/responses")
    assert status == 200
    assert len(engine.tree.calls) == 2


@pytest.mark.parametrize(
    "arguments", ["[" * 100_000, nested(900), '{"x":' + "9" * 5000 + "}", '{"x": "\\ud800"}', '{"\\udfff": 1}']
)
@with_gateway
async def test_odd_arguments_from_a_client_are_text(server, arguments):
    engine = server.scripted()
    call = {"id": "c", "type": "function", "function": {"name": "double", "arguments": arguments}}
    messages = [*user("q"), {"role": "assistant", "tool_calls": [call]}]
    assert (await server.post({"messages": messages}))[0] == 200
    assert json.dumps(arguments) in engine.scripted.prompts[0]


@with_gateway
async def test_a_fault_of_the_gateway_is_not_tried_again(server, monkeypatch):
    """The clients of OpenAI repeat a 500, and each time would sample a leaf."""
    num_asked = 0

    def broken(*_, **__):
        nonlocal num_asked
        num_asked += 1
        raise KeyError("bug")

    monkeypatch.setattr(server.open("s", client_engine(lambda _: "x")), "start", broken)
    with pytest.raises(openai.InternalServerError, match="KeyError: 'bug'") as raised:
        await server.client("s", max_retries=2).chat.completions.create(model="policy", messages=user("q"))
    assert raised.value.code == "gateway_error"
    assert num_asked == 1
