"""Clients that go away and engines that fail: every token is recorded once, and what nobody read ends no leaf."""

import asyncio
import contextlib
import json
import random
import re
import socket

import httpx
import openai
import pytest
import uvloop
from gateway_cases import TOOLS, StreamingEngine, client_engine, connect, head, text_of, tool_reply, user, with_gateway
from scripted_llm import END

from rollout_hooks.capture.recorded import CallStatus, LeftOut
from rollout_hooks.gateway.app import RETRY_HEADER

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("api", ["chat", "responses"])
@with_gateway
async def test_the_answer_of_a_client_that_goes_away_is_recorded_and_left_out(server, api):
    engine = StreamingEngine(lambda _: "a long answer", delay_s=0.005)
    session = server.open("s", engine)
    client = server.client("s")
    if api == "chat":
        stream = await client.chat.completions.create(model="policy", messages=user("q"), stream=True)
    else:
        stream = await client.responses.create(model="policy", input="q", stream=True)
    async for _ in stream:
        break
    await stream.close()
    assert len(session.running) == 1
    await server.ask("again")
    await server.gateway.close_session("s")
    assert not session.running
    assert [call.status for call in engine.tree.calls] == [CallStatus.COMPLETED] * 2
    (leaf,), ((unread, reason),) = engine.tree.leaves(), engine.tree.left_out_leaves()
    assert [text_of(each).split("assistant\n")[1] for each in (leaf, unread)] == ["a long answer" + END] * 2
    assert (leaf.calls, unread.calls, reason) == ((1,), (0,), LeftOut.ABANDONED)


class SlowTwice(StreamingEngine):
    """Its first two calls go on once the third has begun."""

    def __init__(self) -> None:
        super().__init__(lambda _: "x")
        self.third = asyncio.Event()

    async def stream(self, prompt_ids, *, sampling_params):
        is_slow = len(self.tree.calls) < 2
        async for chunk in super().stream(prompt_ids, sampling_params=sampling_params):
            if is_slow:
                await self.third.wait()
            self.third.set()
            yield chunk


@with_gateway
async def test_a_client_that_times_out_and_asks_again_leaves_one_leaf(server):
    engine = SlowTwice()
    server.open("s", engine)
    client = server.client("s", timeout=0.6, max_retries=2)
    answer = await client.chat.completions.create(model="policy", messages=user("q"))
    assert answer.choices[0].message.content == "x"
    await server.gateway.close_session("s")
    assert [call.status for call in engine.tree.calls] == [CallStatus.COMPLETED] * 3
    assert [leaf.calls for leaf in engine.tree.leaves()] == [(2,)]
    assert [(path.calls, reason) for path, reason in engine.tree.left_out_leaves()] == [
        ((0,), LeftOut.ABANDONED),
        ((1,), LeftOut.ABANDONED),
    ]


@with_gateway
async def test_samples_of_one_prompt_that_were_all_read_are_all_leaves(server):
    engine = server.scripted(lambda _: "x", delay=lambda _: 0.01)
    await asyncio.gather(server.ask(), server.ask())
    await server.ask()
    await server.gateway.close_session("s")
    assert len(engine.tree.leaves()) == 3
    assert engine.tree.left_out_leaves() == []


@pytest.mark.parametrize(
    ("num_before", "num_retries", "leaves"),
    [(1, 1, [1]), (1, 2, [2]), (2, 1, [0, 1, 2])],
    ids=["one", "twice", "which"],
)
@with_gateway
async def test_a_retry_replaces_a_request_whose_answer_was_lost_behind_us(server, num_before, num_retries, leaves):
    """A proxy may read an answer that its client no longer waits for; of two such requests nobody knows which."""
    engine = server.scripted()
    for retry in [0] * num_before + list(range(1, num_retries + 1)):
        await server.ask(extra_headers={RETRY_HEADER: str(retry)})
    await server.gateway.close_session("s")
    assert [leaf.calls for leaf in engine.tree.leaves()] == [(call,) for call in leaves]


@with_gateway
async def test_a_retry_after_an_error_replaces_the_call_that_failed(server):
    replies = iter(["x", RuntimeError("injected"), "x"])
    engine = server.scripted(lambda _: next(replies))
    await server.ask()
    client = server.client("s", max_retries=1)
    await client.chat.completions.create(model="policy", messages=user("q"))
    await server.gateway.close_session("s")
    assert [leaf.calls for leaf in engine.tree.leaves()] == [(0,), (2,)]


@with_gateway
async def test_an_agent_that_goes_on_from_what_it_left_has_seen_it(server):
    engine = StreamingEngine(lambda prompt: "more" if "go on" in prompt else "an answer", delay_s=0.002)
    session = server.open("s", engine)
    stream = await server.ask(stream=True)
    async for _ in stream:
        break
    await stream.close()
    while session.running:
        await asyncio.sleep(0.005)
    messages = [*user("q"), {"role": "assistant", "content": "an answer"}, *user("go on")]
    await server.client("s").chat.completions.create(model="policy", messages=messages)
    await server.gateway.close_session("s")
    assert [leaf.calls for leaf in engine.tree.leaves()] == [(0, 1)]
    assert engine.tree.left_out_leaves() == []


def is_whole(answer, *, stream):
    headers, _, text = answer.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", headers)
    return text.endswith(b"\r\n0\r\n\r\n") if stream else length is not None and len(text) == int(length[1])


async def leave(server, session_id, *, num_bytes, delay_s, stream):
    """Ask on a socket, leave after some bytes of the answer or some time; return whether it was whole."""
    loop, url = asyncio.get_running_loop(), httpx.URL(server.address.url)
    body = json.dumps({"model": "policy", "messages": user("q"), "stream": stream}).encode()
    answer = b""
    with socket.socket() as client:  # what asyncio's streams have not handed over, they have read all the same
        client.setblocking(False)
        await loop.sock_connect(client, (url.host, url.port))
        await loop.sock_sendall(client, head(server, length=len(body), session=session_id) + body)
        end_s = loop.time() + delay_s
        while loop.time() < end_s and len(answer) < num_bytes and not is_whole(answer, stream=stream):
            with contextlib.suppress(BlockingIOError):  # `sock_recv` may lose what it has read when it is cancelled
                answer += client.recv(num_bytes - len(answer))
            await asyncio.sleep(0.002)
    return is_whole(answer, stream=stream)


@with_gateway
async def leave_and_count(server):
    """Let 180 clients leave before, while and after the answer comes; return whether it was whole, and the engines."""
    rng = random.Random(5)
    engines, clients = [], []
    for number in range(180):
        stream, is_slow = number % 2 == 1, number % 3 == 0
        engine = StreamingEngine(lambda _: "an answer of some length", delay_s=0.004 * is_slow)
        engines.append(engine)
        server.open(f"s{number}", engine)
        num_bytes, delay_s = rng.choice([1 << 20, rng.randrange(1, 9000)]), rng.choice([20.0, rng.uniform(0.0, 0.6)])
        clients.append(leave(server, f"s{number}", num_bytes=num_bytes, delay_s=delay_s, stream=stream))
    were_whole = await asyncio.gather(*clients)
    for number in range(180):
        await server.gateway.close_session(f"s{number}")
    return were_whole, engines


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "as_in_ray"])
def test_rows_are_the_answers_that_were_read_whole(make_loop):
    with asyncio.Runner(loop_factory=make_loop) as runner:
        were_whole, engines = runner.run(leave_and_count())
    assert [len(engine.tree.leaves()) for engine in engines] == [int(each) for each in were_whole]
    assert 30 < sum(were_whole) < 170
    assert sum(len(engine.tree.left_out_leaves()) for engine in engines) > 10


def read_last_event(address, request, *, last):
    """Ask on a socket, and close it as soon as the last event of the answer is there, as Codex does."""
    with socket.create_connection(address, timeout=30) as client:
        client.sendall(request)
        answer = b""
        while not (last in answer and b"\n\n" in answer.split(last, 1)[1]):
            received = client.recv(1 << 16)
            assert received
            answer += received


class Ends:
    """Keeps what the application sends together with the end of each answer."""

    def __init__(self, app, *, kept):
        self.app, self.kept = app, kept

    async def __call__(self, scope, receive, send):
        async def sent(message):
            if message["type"] == "http.response.body" and not message["more_body"]:
                self.kept.append(message["body"])
            await send(message)

        await self.app(scope, receive, sent)


@pytest.mark.parametrize(
    ("path", "last", "more"),
    [
        ("chat/completions", b"data: [DONE]", {"messages": user("q")}),
        ("messages", b"event: message_stop", {"messages": user("q"), "max_tokens": 50}),
        ("responses", b"event: response.completed", {"input": "q"}),
    ],
)
@with_gateway
async def test_who_closes_at_the_last_event_has_read_the_answer(server, path, last, more):
    """The events of Responses repeat the tools, so that they are long; the end of the body comes with the last one."""
    schema = {"properties": {"x": {"description": "long " * 5000}}}
    tool = {
        "chat/completions": {"type": "function", "function": {"name": "f", "parameters": schema}},
        "messages": {"name": "f", "input_schema": schema},
        "responses": {"type": "function", "name": "f", "parameters": schema},
    }[path]
    body = json.dumps({"model": "policy", "stream": True, "tools": [tool], **more}).encode()
    url, trees, ends = httpx.URL(server.address.url), [], []
    server.gateway.app.add_middleware(Ends, kept=ends)
    for number in range(12):
        engine = client_engine(lambda _: "x")
        server.open(f"s{number}", engine)
        trees.append(engine.tree)
        request = head(server, length=len(body), session=f"s{number}", path=path) + body
        await asyncio.to_thread(read_last_event, (url.host, url.port), request, last=last)
        await server.gateway.close_session(f"s{number}")
    assert [[call.left_out for call in tree.calls] for tree in trees] == [[None]] * 12
    assert [end.startswith(last) for end in ends] == [True] * 12  # also where the writer waits for a slow reader


@with_gateway
async def test_closing_a_session_refuses_requests_and_cancels_what_does_not_end(server):
    engine = server.scripted(lambda _: "x", delay=lambda _: 30.0)
    client = server.client("s")
    asked = asyncio.create_task(client.chat.completions.create(model="policy", messages=user("q")))
    while not server.gateway.num_calls:
        await asyncio.sleep(0.01)
    closing = asyncio.create_task(server.gateway.close_session("s", timeout_s=0.05))
    await asyncio.sleep(0)
    assert server.gateway.num_calls == 1  # the session is gone, and its call still runs
    await closing
    assert server.gateway.num_calls == 0
    with pytest.raises(openai.InternalServerError, match="session was closed") as raised:
        await asked
    assert raised.value.status_code == 503
    assert (engine.tree.calls[0].status, engine.tree.calls[0].cause) == (CallStatus.FAILED, "cancelled")
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="policy", messages=user("q"))
    await server.gateway.close_session("s")


@with_gateway
async def test_clients_that_go_away_before_their_request_is_whole_are_a_line_each_in_the_log(server, caplog, capfd):
    engine = client_engine(lambda _: "x")
    session = server.open("s", engine)
    with caplog.at_level("INFO", logger="rollout_hooks.gateway"):
        for _ in range(3):
            _, writer = await connect(server)
            writer.write(head(server, length=100) + b"{")
            while not session.num_waiting_bytes:
                await asyncio.sleep(0.005)
            writer.close()
            while session.num_waiting_bytes:
                await asyncio.sleep(0.005)
        await server.ask()
    assert len(engine.tree.calls) == 1
    assert capfd.readouterr().err == ""
    assert [record.levelname for record in caplog.records] == ["INFO"] * 3
    assert {record.getMessage() for record in caplog.records} == {
        "session 's': a client went away before its request was whole"
    }


async def agent(client, number, rng, *, goes_away):
    """Have a turn with two tool calls, an answer, and a question beside it; some clients stop reading a stream."""
    messages = user(f"session {number}")
    beside = asyncio.create_task(client.chat.completions.create(model="policy", messages=user(f"beside {number}")))
    first = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
    message = first.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "[6]"})
    stream = await client.chat.completions.create(model="policy", messages=messages, stream=True, tools=TOOLS)
    num_read = rng.randrange(1, 3)
    async for _ in stream:
        num_read -= 1
        if goes_away and num_read == 0:
            await stream.close()
            break
    free = await client.chat.completions.create(model="policy", messages=user(f"free {number}"), stream=True)
    async for _ in free:
        if goes_away:
            await free.close()
            break
    await beside


@with_gateway
async def test_64_sessions_lose_no_token_to_clients_that_go_away_nor_to_errors(server):
    """The engines' own logs hold every sampled token; the trees must hold each of them once."""
    rng = random.Random(3)
    fails = random.Random(4)

    def reply(prompt):
        if fails.random() < 0.1:
            return RuntimeError("injected")
        return tool_reply(prompt) if "session" in prompt else "an answer of some length"

    engines = [StreamingEngine(reply, delay_s=0.002) for _ in range(64)]
    sessions = [server.open(f"s{i}", engine) for i, engine in enumerate(engines)]
    clients = [server.client(f"s{i}", max_retries=8) for i in range(64)]
    results = await asyncio.gather(
        *(agent(client, i, rng, goes_away=i % 10 == 0) for i, client in enumerate(clients)),
        return_exceptions=True,
    )
    assert results == [None] * 64
    for session in sessions:
        await server.gateway.close_session(session.session_id)
    num_failed = 0
    for engine in engines:
        calls = engine.tree.calls
        num_failed += sum(call.status is CallStatus.FAILED for call in calls)
        assert all(call.status in (CallStatus.COMPLETED, CallStatus.FAILED) for call in calls)
        completed = [call for call in calls if call.status is CallStatus.COMPLETED]
        assert len(completed) == len(engine.log) >= 4
        num_found = 0
        leaves = engine.tree.leaves() + [path for path, _ in engine.tree.left_out_leaves()]
        for call, (prompt, sampled) in zip(completed, engine.log, strict=True):
            (path,) = [leaf for leaf in leaves if call.index in leaf.calls][:1]
            positions = (path.source == call.index).nonzero()[0]
            assert path.token_ids[positions].tolist() == sampled
            assert path.token_ids[: positions[0]].tolist() == prompt
            num_found += len(positions)
        assert num_found == sum(len(sampled) for _, sampled in engine.log) == sum(call.num_output for call in completed)
    assert num_failed > 10
