"""Limits on what a session keeps, on connections, heads and bodies, on images and on the forms of answers."""

import asyncio
import base64
import contextlib
import io
import json
import random
import socket
import time
import tracemalloc

import httpx
import pytest
from gateway_cases import PROMPT, chat_format, client_engine, connect, head, user, with_gateway
from PIL import Image
from uvicorn.protocols.http import h11_impl

from rollout_hooks.gateway.kept import KeptResponses
from rollout_hooks.gateway.limits import MAX_ENUM, MAX_HEAD_BYTES, MAX_PROPERTIES, MAX_SCHEMA_LEN
from rollout_hooks.gateway.schema_limits import count_repeats

pytestmark = pytest.mark.timeout(60)


def test_kept_responses_are_the_histories_and_share_what_is_equal():
    """The oracle keeps every history whole."""
    rng = random.Random(7)
    kept, whole = KeptResponses(), {}
    for number in range(200):
        previous = rng.choice([None, *whole, *list(whole)[-3:]])
        messages = [dict(message) for message in whole.get(previous, [])]
        if messages and rng.random() < 0.3:
            messages[-1]["tool_calls"] = [number]
        messages += [{"content": f"{number} {i}"} for i in range(rng.randrange(3))]
        messages.append({"content": f"answer {number}"})
        kept.keep(str(number), messages, previous=previous)
        whole[str(number)] = messages
    for name, messages in whole.items():
        assert kept.until(name) == messages
    num_new = sum(len(each.added) for each in kept._kept.values())
    assert num_new < 200 * 4 < sum(map(len, whole.values()))


@with_gateway
async def test_a_chain_of_responses_takes_memory_for_its_messages_only(server):
    engine = client_engine(lambda _: "x")
    session = server.open("s", engine)
    more = {}
    for i in range(12):
        _, answer = await server.post({"input": f"q{i}", **more}, path="/responses")
        more = {"previous_response_id": answer["id"]}
    assert [len(each.added) for each in session.kept._kept.values()] == [2] * 12
    text = "".join(f"<|im_start|>user\nq{i}<|im_end|>\n<|im_start|>assistant\nx<|im_end|>\n" for i in range(11))
    assert engine.scripted.prompts[-1] == text + PROMPT.replace("q", "q11")


@with_gateway(max_session_calls=3)
async def test_a_session_makes_so_many_calls_and_no_more(server):
    engine = server.scripted()
    assert (await server.post({"messages": user("q"), "n": 2}))[0] == 200
    status, answer = await server.post({"messages": user("q"), "n": 2})
    assert (status, answer["error"]["code"]) == (400, "session_calls_exhausted")
    assert (await server.post({"messages": user("q")}))[0] == 200
    assert len(engine.tree.calls) == 3


@with_gateway(max_waiting_bytes=5000)
async def test_bodies_that_wait_have_a_limit_together(server):
    """One of 3,000 bytes waits for its end: another does not fit beside it, and does when it is gone."""
    raw = json.dumps({"model": "policy", "messages": user("q" * 3000)}).encode()

    server.scripted()
    _, writer = await connect(server)
    writer.write(head(server, length=len(raw)) + raw[:-1])
    while server.gateway._num_waiting_bytes < len(raw) - 1:
        await asyncio.sleep(0.01)
    status, answer = await server.post(raw)
    assert (status, answer["error"]["code"]) == (429, "too_many_bytes")
    assert server.gateway._num_waiting_bytes == len(raw) - 1
    writer.close()
    while server.gateway._num_waiting_bytes:
        await asyncio.sleep(0.01)
    assert (await server.post(raw))[0] == 200


@with_gateway(max_waiting_bytes=8 * 4000, max_body_bytes=3500)
async def test_the_bodies_of_one_session_that_wait_have_a_share_of_the_limit(server):
    """Two of 3,000 bytes have no room in a share of 4,000; another session's do, though its bodies go on waiting."""
    raw = json.dumps({"model": "policy", "messages": user("q" * 3000)}).encode()

    for name in ("s", "t"):
        server.open(name, client_engine(lambda _: "x"))
    pipes = [await connect(server) for _ in range(12)]
    for _, writer in pipes:
        writer.write(head(server, length=len(raw)) + raw[:-1])
    late = [await asyncio.wait_for(reader.readuntil(b"}}"), 10) for reader, _ in pipes[1:]]
    assert all(b"429" in each and b"too_many_bytes" in each for each in late)
    assert (await server.post(raw, session="t"))[0] == 200
    pipes[0][1].write(raw[-1:])
    assert b" 200 " in await asyncio.wait_for(pipes[0][0].readline(), 10)
    assert (await server.post(raw))[0] == 200
    for _, writer in pipes:
        writer.close()


@with_gateway(body_s=1)
async def test_bodies_that_do_not_come_are_not_waited_for(server):
    engine = server.scripted()
    reader, writer = await connect(server)
    writer.write(head(server, length=100) + b"{")
    answer = await asyncio.wait_for(reader.readuntil(b"}}"), 10)
    assert answer.split()[1] == b"408"
    assert b"request_timeout" in answer
    assert not engine.tree.calls
    writer.close()


async def seconds_until_closed(server, send):
    """Return how long the server bears a client that sends `send(i)` every tenth of a second, and what it answered."""
    reader, writer = await connect(server)
    begin, number, answer = time.monotonic(), 0, b""
    # After an answer the server may listen on, though it says no more.
    while (answer or not reader.at_eof()) and time.monotonic() - begin < 20:
        writer.write(send(number))
        number += 1
        try:
            await asyncio.sleep(0.05)
            answer += await asyncio.wait_for(reader.read(1000), 0.05)
        except TimeoutError:
            pass
        except ConnectionError:
            break
    writer.close()
    return time.monotonic() - begin, answer


REFUSED = b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"


@with_gateway(idle_s=1)
async def test_connections_without_a_request_are_dropped(server):
    """Silent ones, heads that never end, and the bodies of refused requests, byte by byte, without a key."""
    slow = {
        "silent": lambda _: b"",
        "head": lambda i: b"GET / HTTP/1.1\r\nHost: x\r\nX" if i == 0 else b"x",
        "refused body": lambda i: REFUSED if i == 0 else b"x",
    }

    took = await asyncio.gather(*(seconds_until_closed(server, send) for send in slow.values()))
    assert all(0.9 < each < 10 for each, _ in took), dict(zip(slow, took, strict=True))
    assert b" 401 " in took[-1][1]


@pytest.mark.parametrize(
    "first", [b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", REFUSED]
)
@with_gateway(idle_s=1)
async def test_a_connection_without_the_key_has_one_answer(server, first):
    """Not one for each of the requests behind it, though the last one has the key."""
    last = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n\r\n"
    last %= server.address.api_key.encode()
    reader, writer = await connect(server)
    writer.write(first + b"x" * 100_000 * (first is REFUSED) + first * 1000 + last)
    answer = await asyncio.wait_for(reader.read(), 10)
    assert answer.count(b"HTTP/1.1") == 1
    assert answer.split()[1] in (b"401", b"404")
    writer.close()
    reader, writer = await connect(server)
    writer.write(last * 3 + first)
    answer = await asyncio.wait_for(reader.read(), 10)
    assert (answer.count(b"HTTP/1.1 200"), answer.count(b"HTTP/1.1")) == (3, 4)
    writer.close()


async def open_with_small_buffer(server):
    """Open a connection whose client takes little that it does not read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
    client.setblocking(False)
    address = httpx.URL(server.address.url)
    await asyncio.get_running_loop().sock_connect(client, (address.host, address.port))
    return await asyncio.open_connection(sock=client, limit=2**16)


@with_gateway(body_s=2, idle_s=30)
async def test_a_client_that_does_not_read_is_dropped_and_a_slow_one_is_not(server):
    """The answers have their tools, three times each: they are larger than what the system takes for a client."""
    tools = [{"type": "function", "name": "f", "description": "x" * 1_000_000}]
    raw = json.dumps({"model": "policy", "input": "q", "tools": tools, "stream": True}).encode()

    server.scripted()
    request = head(server, length=len(raw)).replace(b"chat/completions", b"responses") + raw
    last = request.replace(b"Host: x", b"Connection: close\r\nHost: x", 1)
    (deaf, _), (slow, _) = pipes = [await open_with_small_buffer(server) for _ in range(2)]
    for _, writer in pipes:
        writer.write(request * 2 + last)
    begin, num_bytes = time.monotonic(), 0
    while part := await asyncio.wait_for(slow.read(2**17), 10):
        num_bytes += len(part)
        await asyncio.sleep(len(part) / 2e6)
    assert time.monotonic() - begin > 3
    assert num_bytes > 9_000_000
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(deaf.read(), 10)
    for _, writer in pipes:
        writer.close()


@with_gateway
async def test_bodies_of_refused_requests_are_not_kept(server):
    body_bytes = 100_000
    raw = REFUSED + b"x" * body_bytes
    kept = tracemalloc.Filter(True, h11_impl.__file__)

    pipes = [await connect(server) for _ in range(20)]
    tracemalloc.start()
    for reader, writer in pipes:
        writer.write(raw)
        assert (await reader.readuntil(b"}}")).split()[1] == b"401"
    traces = tracemalloc.take_snapshot().filter_traces([kept]).statistics("filename")
    tracemalloc.stop()
    assert sum(each.size for each in traces) < body_bytes
    for _, writer in pipes:
        writer.close()


@with_gateway(idle_s=1)
async def test_a_call_that_takes_long_and_a_stream_of_requests_keep_their_connection(server):
    engine = server.scripted(lambda _: "x", delay=lambda prompt: 1.5 if "slow" in prompt else 0)
    for text in ("q", "slow", "q"):
        assert (await server.post({"messages": user(text)}))[0] == 200
    assert len(engine.tree.calls) == 3


@pytest.mark.parametrize("line", [b"X: " + b"x" * 1000 + b"\r\n", b"x" * 1000])
@with_gateway
async def test_endless_heads_are_cut_off(server, line):
    reader, writer = await connect(server)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n")
    num_bytes = 0
    while not reader.at_eof() and num_bytes < 10**6:
        writer.write(line)
        num_bytes += len(line)
        await asyncio.sleep(0.001)
        if reader._buffer:
            break
    assert num_bytes < 4 * MAX_HEAD_BYTES
    assert (await reader.read(100)).split()[1] == b"400"
    writer.close()


@with_gateway(max_connections=3)
async def test_connections_are_limited_and_those_that_are_open_go_on(server):
    server.scripted()
    assert (await server.post({"messages": user("q")}))[0] == 200
    others = [await connect(server) for _ in range(2)]
    late, _ = await connect(server)
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(late.read(), 10) == b""
    assert (await server.post({"messages": user("q")}))[0] == 200
    for _, writer in others:
        writer.close()
    await asyncio.sleep(0.1)
    reader, writer = await connect(server)
    writer.write(REFUSED)
    assert b" 401 " in await asyncio.wait_for(reader.readline(), 10)
    writer.close()


@with_gateway
async def test_upgrades_and_heads_that_are_no_http_write_no_log(server, caplog, capfd):
    for raw in (
        b"\x16\x03\x01\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    ):
        reader, writer = await connect(server)
        writer.write(raw)
        assert (await reader.read(1000)).split()[1] in (b"400", b"404")
        writer.close()
    assert not caplog.records
    assert capfd.readouterr().err == ""


def image_url(*, width, height):
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


@with_gateway(max_total_pixels=250)
async def test_images_have_a_limit_together(server):
    server.open("s", client_engine(lambda _: "x"), form=chat_format(render=lambda *_, **__: [5]))
    content = [image_url(width=10, height=10)] * 3
    status, answer = await server.post({"messages": [{"role": "user", "content": content}]})
    assert status == 400
    assert "300 pixels together, and 250 are the most" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("pattern", "added", "optional"),
    [
        ("(.{0,50}[a-z]){0,50}", 49 + 49 * 51, 50 * 50 + 50),
        ("a{2,5}", 4, 3),
        ("a{5}b*c+", 4, 0),
        ("a{5,}", 5, 5),
        ("a{ 5 , 7 }b{ 3}", 6 + 2, 2),
        ("^[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}$", 7 + (3 + 2 * 5) + 11, 0),
        (r"(\d{1,3}\.){3}\d{1,3}", 2 + 2 * 4 + 2, 3 * 2 + 2),
        (r"\(ab\){0,9}", 8, 9),
        ("[){0,9}]{0,4}", 3, 4),
        ("(abc)+{5}(de)${3}(f{2}){2}{2}", 4 * 3 + 2 * 2 + 7, 0),
        ("a{0}b{0,0}", 0, 0),
        ("a){3}(b(c{4}", 2 + 3, 0),
    ],
)
def test_repeats_of_patterns(pattern, added, optional):
    assert count_repeats(pattern) == (added, optional)


def test_numbers_of_repeats_may_be_of_any_size():
    assert count_repeats("a{" + "9" * 5000 + "}")[0] >= 10**8
    assert count_repeats("(" * 5000 + "a" + "{9999})" * 5000)[0] >= 10**8


def deep(levels):
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


TOO_LARGE = {
    "characters": {"type": "object", "description": "x" * MAX_SCHEMA_LEN},
    "levels": deep(65),
    "properties in one object": {"properties": {f"p{i}": {} for i in range(MAX_PROPERTIES + 1)}},
    "values in enumerations": {"anyOf": [{"enum": list(range(MAX_ENUM))}, {"enum": ["x"]}]},
    "characters that repeats add to patterns": {
        "anyOf": [{"pattern": "(ab){300}"}, {"patternProperties": {"b{500}": {}}}]
    },
    "optional repeats in patterns": {"anyOf": [{"pattern": "a{0,40}"}, {"patternProperties": {"b{0,40}": {}}}]},
}


@pytest.mark.parametrize("what", TOO_LARGE)
@with_gateway
async def test_forms_that_would_take_long_to_compile_are_refused(server, what):
    engine = server.scripted()
    form = {"type": "json_schema", "json_schema": {"name": "o", "schema": TOO_LARGE[what]}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": TOO_LARGE[what]}}}}
    forced = {"tools": [tool], "tool_choice": "required"}
    for param, more in (("response_format", {"response_format": form}), ("tools", forced)):
        status, answer = await server.post({"messages": user("q"), **more})
        assert (status, answer["error"]["param"]) == (400, param)
        assert what in answer["error"]["message"]
    assert not engine.tree.calls
    # The functions of a model that is free prescribe nothing.
    assert (await server.post({"messages": user("q"), "tools": [tool]}))[0] == 200
