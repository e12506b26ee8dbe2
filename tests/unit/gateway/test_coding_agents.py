"""What coding agents sent, replayed without them; `tests/long/test_coding_agents.py` runs the agents themselves."""

import json

import anthropic
import openai
import pytest
from coding_agents import AGENTS, KEPT, check_tree, replay
from gateway_cases import TOOLS, client_engine, user, with_gateway

from rollout_hooks.capture.call_kinds import CallKind

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("name", AGENTS)
@with_gateway
async def test_an_agent_and_each_sub_agent_is_a_leaf(server, name):
    sent = json.loads((KEPT / f"{name}.json").read_text())
    check_tree(AGENTS[name], await replay(server, sent), sent=sent)


@with_gateway
async def test_thinking_that_a_client_cut_off_goes_back_where_it_was(server):
    """A client, litellm, sends `<think>a</think>b` back as `reasoning_content` and `content`."""
    engine = client_engine(lambda _: "<think>\nsix\n</think>\n\n6")
    server.open("s", engine)
    turn = {"role": "assistant", "content": "\n\n6", "reasoning_content": "\nsix\n"}
    for messages in (user("q"), [*user("q"), turn, *user("go on")]):
        assert (await server.post({"messages": messages}))[0] == 200
    assert [call.kind for call in engine.tree.calls] == [CallKind.ROOT, CallKind.CONTINUATION]
    status, answer = await server.post({"messages": [{**turn, "role": "user"}]})
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert "the role user has reasoning_content: leave it out" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ('{"x":3,"y":[1000]}', CallKind.CONTINUATION),
        ('{"x":3,"y":[1001]}', CallKind.REWRITE),
        ('{"x":3}', CallKind.REWRITE),
    ],
)
@with_gateway
async def test_numbers_may_be_written_anew(server, arguments, kind):
    """JavaScript writes 3.0 as 3 and 1e3 as 1000. Another value is another turn."""
    reply = '<tool_call>\n{"name": "double", "arguments": {"x": 3.0, "y": [1e3]}}\n</tool_call>'
    engine = client_engine(lambda prompt: "6" if "[6]" in prompt else reply)
    server.open("s", engine)
    _, answer = await server.post({"messages": user("q"), "tools": TOOLS})
    message = {name: answer["choices"][0]["message"][name] for name in ("role", "content", "tool_calls")}
    message["tool_calls"][0]["function"]["arguments"] = arguments
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "6"}
    assert (await server.post({"messages": [*user("q"), message, result], "tools": TOOLS}))[0] == 200
    assert [call.kind for call in engine.tree.calls] == [CallKind.ROOT, kind]


@with_gateway
async def test_agents_know_by_the_words_that_the_context_is_full(server):
    """Anthropic's errors have no code: opencode looks for "prompt is too long", litellm for both texts."""
    server.open("s", client_engine(lambda _: "x"), context_len=50)
    told = "prompt is too long: it has 69 tokens, and this model's maximum context length is 50 tokens"
    messages = user("q" * 50)
    with pytest.raises(openai.BadRequestError, match=told) as raised:
        await server.client("s").chat.completions.create(model="policy", messages=messages)
    assert raised.value.code == "context_length_exceeded"
    with pytest.raises(anthropic.BadRequestError, match=told):
        await server.anthropic().messages.create(model="policy", max_tokens=5, messages=messages)
