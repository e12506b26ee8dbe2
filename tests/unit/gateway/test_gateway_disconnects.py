"""Clients that go away and engines that fail: every sampled token is captured once."""

import asyncio
import random

import openai
import pytest
from gateway_cases import TOOLS, StreamingEngine, client_engine, connect, head, text_of, tool_reply, user, with_gateway
from scripted_llm import END

from rollout_hooks.capture.session_tree import CallStatus

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("api", ["chat", "responses"])
@with_gateway
async def test_a_client_that_goes_away_loses_text_but_no_token(server, api):
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
    assert sorted(text_of(leaf).split("assistant\n")[1] for leaf in engine.tree.leaves()) == ["a long answer" + END] * 2


@with_gateway
async def test_closing_a_session_refuses_requests_and_cancels_what_does_not_end(server):
    engine = server.scripted(lambda _: "x", delay=lambda _: 30.0)
    client = server.client("s")
    asked = asyncio.create_task(client.chat.completions.create(model="policy", messages=user("q")))
    while not server.gateway.num_calls:
        await asyncio.sleep(0.01)
    await server.gateway.close_session("s", timeout_s=0.05)
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
        for call, (prompt, sampled) in zip(completed, engine.log, strict=True):
            (path,) = [leaf for leaf in engine.tree.leaves() if call.index in leaf.calls][:1]
            positions = (path.source == call.index).nonzero()[0]
            assert path.token_ids[positions].tolist() == sampled
            assert path.token_ids[: positions[0]].tolist() == prompt
            num_found += len(positions)
        assert num_found == sum(len(sampled) for _, sampled in engine.log) == sum(call.num_output for call in completed)
    assert num_failed > 10
