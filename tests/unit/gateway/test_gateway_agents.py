"""Requests as agent frameworks send them, recorded and shortened; docs/gateway.md says which agents, and how they ran.

Each conversation must become one leaf that holds every sampled token.
"""

import asyncio
import copy

import openai
import pytest
from gateway_cases import SAMPLING, StreamingEngine, chat_format, client_engine, with_gateway
from scripted_llm import END, tokenizer

from rollout_hooks.capture.call_kinds import CallKind
from rollout_hooks.gateway import SessionSettings
from rollout_hooks.gateway.app import _tell_without_effect

pytestmark = pytest.mark.timeout(60)

FIRST = 'let me see <tool_call>{"name":  "add","arguments":{"a": 2, "b": 3}}</tool_call>\n' + (
    '<tool_call>{"name":  "add","arguments":{"a": 4, "b": 5}}</tool_call>'
)
SECOND = 'now <tool_call>{"name":  "double","arguments":{"x": 5}}</tool_call>'
TURNS = [FIRST, SECOND, "the answer is 10", "second answer"]


def reply(prompt):
    """Return the turn that comes next in a conversation."""
    return TURNS[prompt.count("<|im_start|>assistant") - 1]


INTEGER = {"type": "integer"}
# MCP tools have titles and strict=false; LangChain's have neither.
ADD = {
    "name": "add",
    "parameters": {
        "properties": {"a": {"title": "A", **INTEGER}, "b": {"title": "B", **INTEGER}},
        "required": ["a", "b"],
        "title": "addArguments",
        "type": "object",
    },
    "strict": False,
    "description": "Add.",
}
DOUBLE = {
    "name": "double",
    "parameters": {"properties": {"x": INTEGER}, "required": ["x"], "type": "object"},
    "description": "Double.",
}


def flat_tools():
    return [{"type": "function", **copy.deepcopy(tool)} for tool in (ADD, DOUBLE)]


def nested_tools():
    return [{"type": "function", "function": copy.deepcopy(tool)} for tool in (ADD, DOUBLE)]


class Wire:
    """Posts bodies as they are; the client's types do not come between."""

    def __init__(self, client):
        self.client = client

    async def post(self, path, body):
        return await self.client.post(path, body=body, cast_to=dict)


async def chat(wire, *, sent_back, result):
    """Have three turns, then a second question with the whole history."""
    messages = [{"content": "You are helpful", "role": "system"}, {"content": "question", "role": "user"}]
    results = iter(("5", "9", "10"))
    for number in range(len(TURNS)):
        body = {"model": "policy", "stream": False, "messages": messages, "tools": nested_tools()}
        answer = await wire.post("/chat/completions", body)
        message = answer["choices"][0]["message"]
        messages.append(sent_back(message))
        for call in message.get("tool_calls", []):
            messages.append({"content": result(next(results)), "role": "tool", "tool_call_id": call["id"]})
        if number == 2:
            messages.append({"content": "second question", "role": "user"})
    return message["content"]


async def langgraph(wire):
    """`create_agent(ChatOpenAI(...), tools)`."""

    def sent_back(message):
        return {name: message[name] for name in ("role", "content", "tool_calls") if name in message}

    return await chat(wire, sent_back=sent_back, result=str)


async def agents_sdk_chat(wire):
    """`OpenAIChatCompletionsModel` with an MCP server: results of MCP tools are lists of text parts."""

    def sent_back(message):
        message.pop("refusal")
        return message

    return await chat(wire, sent_back=sent_back, result=lambda text: [{"type": "text", "text": text}])


def responses_body(items, **more):
    body = {"model": "policy", "include": [], "input": items, "instructions": "You are helpful", "tools": flat_tools()}
    return {**body, **more}


def outputs_of(response, results):
    return [
        {"call_id": item["call_id"], "output": [{"type": "input_text", "text": next(results)}]}
        | {"type": "function_call_output"}
        for item in response["output"]
        if item["type"] == "function_call"
    ]


async def agents_sdk_responses(wire):
    """`OpenAIResponsesModel` with an MCP server: the items go back as they came, ids and statuses included."""
    items = [{"content": "question", "role": "user"}]
    results = iter(("5", "9", "10"))
    for number in range(len(TURNS)):
        response = await wire.post("/responses", responses_body(items, store=False, metadata={"a": "b"}))
        items += [*response["output"], *outputs_of(response, results)]
        if number == 2:
            items.append({"role": "user", "content": "second question"})
    return response["output"][0]["content"][0]["text"]


async def agents_sdk_previous_response(wire):
    """`Runner.run(..., auto_previous_response_id=True)`: only what is new goes out."""
    items = [{"content": "question", "role": "user"}]
    results = iter(("5", "9", "10"))
    more = {}
    for number in range(len(TURNS)):
        response = await wire.post("/responses", responses_body(items, **more))
        assert response["previous_response_id"] == more.get("previous_response_id")
        items = outputs_of(response, results) if number < 2 else [{"role": "user", "content": "second question"}]
        more = {"previous_response_id": response["id"]}
    return response["output"][0]["content"][0]["text"]


AGENTS = [langgraph, agents_sdk_chat, agents_sdk_responses, agents_sdk_previous_response]


@pytest.mark.parametrize("engine_kind", [client_engine, StreamingEngine])
@pytest.mark.parametrize("agent", AGENTS)
@with_gateway
async def test_a_conversation_is_one_leaf_with_every_sampled_token(server, agent, engine_kind):
    """Two sessions beside each other, four turns each."""
    engines = {name: engine_kind(reply) for name in "ab"}
    for name, engine in engines.items():
        server.open(name, engine)
    answers = await asyncio.gather(*(agent(Wire(server.client(name))) for name in engines))
    assert answers == ["second answer"] * 2
    for engine in engines.values():
        assert [call.kind for call in engine.tree.calls] == [CallKind.ROOT, *[CallKind.CONTINUATION] * 3]
        (leaf,) = engine.tree.leaves()
        assert tokenizer().decode(leaf.token_ids[leaf.is_generated].tolist()) == END.join([*TURNS, ""])


@with_gateway
async def test_a_response_goes_on_from_any_that_was_kept(server):
    """Two continuations of one response are two leaves; new instructions replace the old ones, as with OpenAI."""
    engine = server.scripted(reply)
    server.open("t", engine)
    wire = Wire(server.client("s"))
    results = iter(("5", "9", "6", "8"))
    first = await wire.post("/responses", responses_body("question"))
    again = {"previous_response_id": first["id"]}
    for instructions in ("You are helpful", "You are brief"):
        more = {**again, "instructions": instructions, "store": False}
        last = await wire.post("/responses", responses_body(outputs_of(first, results), **more))
    assert [call.kind for call in engine.tree.calls[1:]] == [CallKind.CONTINUATION, CallKind.REWRITE]
    prompt = engine.scripted.prompts[2]
    assert "You are brief" in prompt
    assert "You are helpful" not in prompt
    assert FIRST in prompt
    assert (first["store"], last["store"]) == (True, False)
    for session, response in (("s", last), ("t", first)):
        gone = responses_body("q", previous_response_id=response["id"])
        with pytest.raises(openai.BadRequestError, match="send its items in `input`") as raised:
            await Wire(server.client(session)).post("/responses", gone)
        assert (raised.value.param, raised.value.code) == (
            "previous_response_id",
            "previous_response_not_found",
        )
    assert len(engine.tree.calls) == 3


@with_gateway
async def test_calls_that_a_client_adds_to_a_kept_response_do_not_change_it(server):
    engine = client_engine(reply)
    settings = SessionSettings(sampling=SAMPLING)
    server.gateway.open_session("s", engine, chat_format=chat_format(), settings=settings)
    wire = Wire(server.client("s"))
    first = await wire.post("/responses", responses_body("question"))
    more = {"previous_response_id": first["id"]}
    call = {"type": "function_call", "call_id": "mine", "name": "double", "arguments": '{"x": 77}'}
    await wire.post("/responses", responses_body([call, *outputs_of(first, iter("59"))], **more))
    await wire.post("/responses", responses_body(outputs_of(first, iter("59")), **more))
    assert "77" in engine.scripted.prompts[1]
    assert "77" not in engine.scripted.prompts[2]
    assert FIRST in engine.scripted.prompts[2]


CODEX = {
    "model": "policy",
    "tools": [
        {"type": "function", "name": "exec_command", "parameters": DOUBLE["parameters"], "strict": False},
        {
            "type": "namespace",
            "name": "agents",
            "description": "Sub-agents.",
            "tools": [{"type": "function", **DOUBLE}],
        },
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"}},
        {"type": "web_search", "external_web_access": True},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a21a09",
    "extra_body": {"client_metadata": {"turn_id": "01a21a0a", "session_id": "01a21a09"}},
}
CODEX_TURN = "".join(
    f'<tool_call>{{"name":  "{name}","arguments":{arguments}}}</tool_call>'
    for name, arguments in (
        ("exec_command", '{"x": 1}'),
        ("agents.double", '{"x": 2}'),
        ("patch", '{"input": "*** Begin"}'),
    )
)


@pytest.mark.parametrize("stream", [False, True])
@with_gateway
async def test_tools_in_namespaces_and_tools_of_text_as_codex_has_them(server, stream, caplog):
    """Codex 0.169.0, shortened, with a custom tool, which it has for models that it knows."""
    _tell_without_effect.cache_clear()
    engine = server.scripted(lambda prompt: "done" if "go on" in prompt else CODEX_TURN)
    client = server.client("s")
    items = [
        {"type": "message", "id": "msg_1", "role": "developer", "content": [{"type": "input_text", "text": "help"}]}
    ]
    if stream:
        events = [event async for event in await client.responses.create(**CODEX, input=items, stream=True)]
        first, inputs = events[-1].response, [event for event in events if "custom_tool_call_input" in event.type]
        assert [event.type.rsplit(".", 1)[1] for event in inputs] == ["delta", "done"]
        assert inputs[0].delta == inputs[1].input == "*** Begin"
    else:
        first = await client.responses.create(**CODEX, input=items)
    calls = [item.to_dict() for item in first.output]
    assert [(item["type"], item.get("namespace"), item["name"]) for item in calls] == [
        ("function_call", None, "exec_command"),
        ("function_call", "agents", "double"),
        ("custom_tool_call", None, "patch"),
    ]
    assert calls[2]["input"] == "*** Begin"
    items += calls
    items += [
        {"type": f"{call['type']}_output", "id": "fco_1", "call_id": call["call_id"], "output": "go on"}
        for call in calls
    ]
    last = await client.responses.create(**CODEX, input=items)
    assert last.output_text == "done"
    (leaf,) = engine.tree.leaves()
    assert leaf.calls == (0, 1)
    assert "exec_command agents.double patch " in engine.scripted.prompts[0]
    said = {record.getMessage().split()[2] for record in caplog.records if "no effect" in record.getMessage()}
    assert said == {"reasoning,", "server_tools,"}


@with_gateway
async def test_reasoning_that_is_never_given_may_be_asked_for_and_models_are_found_by_name(server):
    """`include=["reasoning.encrypted_content"]` is what stateless agents send; `models.retrieve` is their check."""
    server.scripted()
    client = server.client("s")
    answer = await client.responses.create(
        model="policy", input="q", store=False, include=["reasoning.encrypted_content"]
    )
    assert answer.output_text == "x"
    assert (await client.models.retrieve("policy")).id == "policy"
    with pytest.raises(openai.NotFoundError, match="ask for 'policy'"):
        await client.models.retrieve("org/gpt")
