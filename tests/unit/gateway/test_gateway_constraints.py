"""Turns of a prescribed form: what the gateway asks of vLLM, and that it admits what the parsers read and no more."""

import asyncio
import contextlib
import functools
import json
import pickle

import openai
import pytest
from gateway_cases import PROMPT, SAMPLING, TOOLS, chat_format, client_engine, encode, served, user, with_gateway
from scripted_llm import END, ScriptedClient, call_text, run_loop, tokenizer
from verl.experimental.agent_loop.tool_parser import ToolParser
from xgrammar import GrammarCompiler, GrammarMatcher, TokenizerInfo

from rollout_hooks.capture.recording import RecordingClient
from rollout_hooks.capture.session_tree import SessionTree
from rollout_hooks.gateway import SessionSettings
from rollout_hooks.gateway.chat_format import _parser_schema
from rollout_hooks.gateway.constraints import structured_outputs
from rollout_hooks.gateway.session import GatewaySession, _warn_of_masks
from rollout_hooks.gateway.turn import TurnRequest
from rollout_hooks.loops.blackbox import BlackboxAgentLoop

pytestmark = pytest.mark.timeout(120)

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {
            "properties": {"a": {"title": "A", "type": "integer"}, "b": {"title": "B", "type": "integer"}},
            "required": ["a", "b"],
            "title": "addArguments",
            "type": "object",
        },
    },
}
BOTH = [*TOOLS, ADD]
SCHEMA = {
    "properties": {"x": {"title": "X", "type": "integer"}, "why": {"title": "Why", "type": "string"}},
    "required": ["x", "why"],
    "title": "Out",
    "type": "object",
    "additionalProperties": False,
}
DOUBLE = call_text(3)
SUM = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
JSON = '{"x": 5, "why": "because"}'


def admits(form, text):
    """Whether a turn of this text, ended where it ends, keeps to a form, token by token, as vLLM's mask has it."""
    compiler = GrammarCompiler(TokenizerInfo.from_huggingface(tokenizer()))
    if "json" in form:
        compiled = compiler.compile_json_schema(form["json"])
    else:
        compiled = compiler.compile_structural_tag(form["structural_tag"])
    matcher = GrammarMatcher(compiled)
    return all(matcher.accept_token(token) for token in encode(text + END))


async def form_of(body, *, api="chat"):
    """Return the form that a request comes to, as the engine's client gets it."""
    async with served() as server:
        engine = server.scripted(lambda _: DOUBLE)
        client = server.client("s")
        if api == "chat":
            await client.chat.completions.create(model="policy", messages=user("q"), **body)
        else:
            await client.responses.create(model="policy", input="q", **body)
        (params,) = engine.scripted.sampling_params
        form = params.pop("structured_outputs", None)
        assert params == SAMPLING
        return form


def given(form):
    """Return the fields of vLLM's class that are set."""
    return {"json": form.json} if form.json else {"structural_tag": form.structural_tag}


NAMED = {"type": "function", "function": {"name": "double"}}
FORMAT = {"type": "json_schema", "json_schema": {"schema": SCHEMA, "name": "Out", "strict": True}}
# As LangChain sends them: bind_tools(tool_choice="any"), bind_tools(tool_choice="double"),
# with_structured_output(method="function_calling"), bind_tools(parallel_tool_calls=False),
# with_structured_output(method="json_schema"), create_agent(response_format=ProviderStrategy(...)), JSON mode.
CASES = {
    "any": ({"tools": BOTH, "tool_choice": "required"}, [DOUBLE, SUM, DOUBLE + "\n" + SUM], ["hi", "hi " + DOUBLE]),
    "named": ({"tools": BOTH, "tool_choice": NAMED}, [DOUBLE], [SUM, "hi", DOUBLE + "\n" + DOUBLE]),
    "function_calling": (
        {"tools": BOTH, "tool_choice": NAMED, "parallel_tool_calls": False},
        [DOUBLE],
        [SUM, DOUBLE.replace("3", '"3"')],
    ),
    "any_once": (
        {"tools": BOTH, "tool_choice": "required", "parallel_tool_calls": False},
        [DOUBLE, SUM],
        [DOUBLE + "\n" + SUM, "hi"],
    ),
    "once": (
        {"tools": BOTH, "parallel_tool_calls": False},
        [DOUBLE, "hi", "hi " + SUM],
        [DOUBLE + "\n" + SUM, DOUBLE.replace("double", "halve")],
    ),
    "schema": ({"response_format": FORMAT}, [JSON], ["hi", '{"x": 5}', JSON + JSON]),
    "schema_with_tools": (
        {"tools": BOTH, "response_format": FORMAT},
        [JSON, DOUBLE, DOUBLE + "\n" + SUM],
        ["hi", '{"x": 5}', JSON + DOUBLE],
    ),
    "schema_without_calls": (
        {"tools": BOTH, "tool_choice": "none", "response_format": FORMAT},
        [JSON],
        ["hi", DOUBLE],
    ),
    "json_object": ({"response_format": {"type": "json_object"}}, [JSON, '{"x": 5}'], ["hi", "[5]"]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_prescribed_form_admits_what_was_asked_for_and_nothing_else(case):
    body, accepted, refused = CASES[case]
    form = given(asyncio.run(form_of(body)))
    assert [text for text in accepted if not admits(form, text)] == []
    assert [text for text in refused if admits(form, text)] == []


@pytest.mark.parametrize(
    "body",
    [
        {"tools": BOTH},
        {"tools": BOTH, "tool_choice": "none", "parallel_tool_calls": False},
        {"parallel_tool_calls": False},
        {"response_format": {"type": "text"}},
    ],
)
def test_nothing_is_prescribed_where_nothing_is_asked_for(body):
    assert asyncio.run(form_of(body)) is None


def test_responses_prescribe_the_same_forms():
    """As the OpenAI Agents SDK sends them: `ModelSettings(tool_choice="add")`, `Agent(output_type=Out)`."""
    tools = [{"type": "function", **tool["function"]} for tool in BOTH]
    text = {"format": {"type": "json_schema", "name": "final_output", "schema": SCHEMA, "strict": True}}
    pairs = [
        (
            {"tools": tools, "tool_choice": {"type": "function", "name": "add"}},
            {"tools": BOTH, "tool_choice": {**NAMED, "function": {"name": "add"}}},
        ),
        ({"tools": tools, "tool_choice": "required"}, {"tools": BOTH, "tool_choice": "required"}),
        ({"tools": tools, "text": text}, {"tools": BOTH, "response_format": FORMAT}),
        ({"text": text}, {"response_format": FORMAT}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
    ]
    for flat, chat in pairs:
        assert asyncio.run(form_of(flat, api="responses")) == asyncio.run(form_of(chat))


def test_the_form_is_what_vllm_takes_and_survives_the_way_to_its_process():
    """Verl's server makes `SamplingParams(max_tokens=..., **sampling_params)` of what the client sends it by Ray."""
    from vllm import SamplingParams
    from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

    for case in ("any", "schema"):
        form = pickle.loads(pickle.dumps(asyncio.run(form_of(CASES[case][0]))))
        params = SamplingParams(max_tokens=7, structured_outputs=form)
        validate_xgrammar_grammar(params)
        assert given(params.structured_outputs)


CODER = (
    "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n"
    "<parameter=b>\n3\n</parameter>\n</function>\n</tool_call>"
)


@pytest.mark.parametrize(("name", "text"), [("hermes", SUM), ("qwen3_coder", CODER)])
def test_the_forms_of_calls_are_those_that_verls_parsers_read(name, text):
    parser = ToolParser.get_tool_parser(name, tokenizer())
    request = TurnRequest([], tools=BOTH, parses_tools=True, forced_tools=("add",), single_call=True)
    form = structured_outputs(request, parser)
    assert admits(form, text)
    schemas = [_parser_schema(tool["function"]) for tool in BOTH]
    _, (call,) = asyncio.run(parser.extract_tool_calls(encode(text), schemas))
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 2, "b": 3})


@with_gateway
async def test_forms_that_cannot_be_kept_to_are_refused_before_any_call(server):
    engine = server.scripted()
    server.open("pure", engine, constrained_decoding=False)
    parser = ToolParser.get_tool_parser("glm", tokenizer())
    server.gateway.open_session(
        "glm",
        engine,
        chat_format=chat_format(tool_parser=parser),
        settings=SessionSettings(sampling=SAMPLING),
    )

    async def refusal(session, **more):
        with pytest.raises(openai.BadRequestError) as raised:
            await server.client(session).chat.completions.create(model="policy", messages=user("q"), **more)
        assert ".cc:" not in raised.value.message
        return raised.value.param, raised.value.message

    forced = {"tools": TOOLS, "tool_choice": "required"}
    bad = {"type": "json_schema", "json_schema": {"name": "o", "schema": {"type": "no such type"}}}
    broken = {"type": "function", "function": {"name": "break", "parameters": {"type": "no such type"}}}
    halve = {"type": "function", "function": {"name": "halve"}}
    for session, more, param, words in (
        ("glm", forced, "tool_choice", ["hermes, qwen3_coder"]),
        ("pure", forced, "tool_choice", ["constrained_decoding=true"]),
        ("pure", {"response_format": {"type": "json_object"}}, "response_format", []),
        ("pure", {"tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls", []),
        ("s", {"response_format": bad}, "response_format", ["no such type"]),
        ("s", {"response_format": bad, "tools": TOOLS}, "response_format", ["no such type"]),
        ("s", {"tools": [*TOOLS, broken], "tool_choice": "required"}, "tools", ["parameters of 'break'"]),
        ("s", {"tools": TOOLS, "tool_choice": halve}, "tool_choice", ["halve", "double"]),
        ("s", {"tool_choice": "required"}, "tool_choice", []),
    ):
        refused, message = await refusal(session, **more)
        assert refused == param
        assert [word for word in words if word not in message] == []
    text = {"format": {"type": "json_object"}}
    with pytest.raises(openai.BadRequestError) as raised:
        await server.client("pure").responses.create(model="policy", input="q", text=text)
    assert raised.value.param == "text.format"
    assert not engine.tree.calls
    # A session that takes no constraint serves what needs none.
    await server.ask(session="pure", tools=TOOLS)
    assert engine.scripted.prompts == ["<|im_start|>system\ndouble <|im_end|>\n" + PROMPT]


def test_calls_with_and_without_a_form_are_made_in_the_order_of_their_requests():
    async def body():
        engine = client_engine(lambda _: "x")
        settings = SessionSettings(sampling=SAMPLING, context_len=512)
        session = GatewaySession("s", engine, chat_format=chat_format(), settings=settings)
        asked = [TurnRequest(user(str(i)), text_schema=SCHEMA if i % 2 else None, num_choices=1 + i) for i in range(4)]
        started = [call for request in asked for call in session.start(session.prepare(request))]
        await asyncio.gather(*(call.task for call in started))
        return engine.scripted.prompts

    prompts = asyncio.run(body())
    assert [prompt[PROMPT.index("q")] for prompt in prompts] == list("0112223333")


@with_gateway
async def test_a_prescribed_form_is_warned_of_once(server, caplog):
    _warn_of_masks.cache_clear()
    server.scripted()
    for _ in range(2):
        await server.ask(tools=TOOLS, parallel_tool_calls=False)
    warnings = [record.getMessage() for record in caplog.records if "prescribes the form" in record.getMessage()]
    assert len(warnings) == 1
    assert "(parallel_tool_calls)" in warnings[0]
    assert "rollout_is=token" in warnings[0]


async def dares(*, base_url, api_key, model, row):
    """Ask for JSON, and end its own turn in a text; the reward has one for each that is taken."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        num_taken = 0
        for more in ({"response_format": {"type": "json_object"}}, {"messages": user(END)}, {}):
            with contextlib.suppress(openai.BadRequestError):
                await client.chat.completions.create(**{"model": model, "messages": row["raw_prompt"], **more})
                num_taken += 1
    return float(num_taken)


@pytest.mark.parametrize(
    ("settings", "prompts"),
    [
        ({}, ["q", END, "q"]),
        ({"constrained_decoding": False}, [END, "q"]),
        ({"special_tokens": False}, ["q", "q"]),
    ],
)
def test_the_loop_blackbox_takes_forms_and_special_tokens_unless_it_is_told_not_to(settings, prompts):
    client = RecordingClient(ScriptedClient(lambda _: "{}"), tree=SessionTree(decode=tokenizer().decode))
    loop = functools.partial(BlackboxAgentLoop, agent=f"{__name__}:dares", **settings)
    outputs = run_loop(loop, client, SAMPLING)
    assert {output.reward_score for output in outputs} == {float(len(prompts))}
    assert client._client.prompts == [PROMPT.replace("q", text) for text in prompts]
