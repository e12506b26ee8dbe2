"""What the loops memory, compaction, subagents and tree_search rely on in verl 0.9.1, with the place that does."""

import asyncio
import dataclasses
import inspect

import hydra
import pytest
from scripted_llm import ScriptedClient, make_loop
from verl.experimental.agent_loop.tool_agent_loop import AgentData, ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import FunctionTool, get_function_tool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.utils.reward_score import default_compute_score


def test_function_tools_can_be_made_without_the_registry():
    """Memory and subagents make tools that are bound to their session."""
    assert [field.name for field in dataclasses.fields(FunctionTool)] == ["name", "fn", "tool_schema", "is_async"]

    async def shout(text: str) -> str:
        return text.upper()

    parameters = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    function = {"name": "shout", "description": "d", "parameters": parameters}
    schema = OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})
    assert asyncio.run(FunctionTool("shout", shout, schema, is_async=True).call({"text": "a"})) == "A"
    assert schema.model_dump(exclude_unset=True, exclude_none=True)["function"]["name"] == "shout"


def call_tool(function):
    """Call a tool through verl's tool loop; return the text for the model."""
    loop = make_loop(ToolAgentLoop, ScriptedClient(lambda _: ""))
    loop.tools = {"t": FunctionTool("t", function, get_function_tool("double").tool_schema, is_async=False)}
    data = AgentData([], [], [], None, None, {}, "", {})
    response, *_ = asyncio.run(loop._call_tool(FunctionCall(name="t", arguments="{}"), {}, data))
    return response.text


def test_what_a_tool_raises_becomes_a_text_with_these_words():
    """tool_turns.run_call tells tool errors from other results by them."""

    def fail():
        raise RuntimeError("out of order")

    assert call_tool(fail) == "Error executing tool 't': out of order"
    assert call_tool(lambda: "6") == "6"


def test_a_tool_that_is_cancelled_is_not_taken_for_one_that_fails():
    """The time-out of tool_turns.run_call cancels it."""

    def cancelled():
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        call_tool(cancelled)


def test_a_tool_with_instances_is_made_called_and_released_for_every_call():
    """tool_environments: `ToolOfBranch`, no BaseTool, is in `_active_tools` and hands on what `execute` is given."""
    calls, instance_id = [], "id"

    class Tool:
        async def create(self, *, create_kwargs):
            calls.append(("create", create_kwargs))
            return instance_id, ToolResponse()

        async def execute(self, instance_id, parameters, *, agent_data):
            calls.append((instance_id, parameters, agent_data.environment))
            return ToolResponse(text="a"), 0.5, {}

        async def release(self, instance_id):
            calls.append(("release", instance_id))

    loop = make_loop(ToolAgentLoop, ScriptedClient(lambda _: ""))
    data = AgentData([], [], [], None, None, {}, "", {})
    data._active_tools, data.environment = {"t": Tool()}, "its environment"
    given = {"t": {"create_kwargs": {"k": 1}}}
    for _ in range(2):
        call = FunctionCall(name="t", arguments='{"x": 1}')
        response, reward, _ = asyncio.run(loop._call_tool(call, given, data))
        assert (response.text, reward) == ("a", 0.5)
    assert calls == [("create", {"k": 1}), ("id", {"x": 1}, "its environment"), ("release", "id")] * 2
    instance_id = ""  # `ToolOfBranch` gives none
    asyncio.run(loop._call_tool(call, given, data))
    assert calls[6:] == [("create", {"k": 1}), ("", {"x": 1}, "its environment")]


def test_a_tool_that_does_not_say_otherwise_has_the_life_cycle_of_its_base():
    """tool_environments.needs_fork, and the check of its class before a run, take another one for a state."""
    own = {name for name, value in vars(BaseTool).items() if inspect.iscoroutinefunction(value)}
    assert own == {"create", "execute", "calc_reward", "release"}


def test_prompts_are_rendered_by_the_continuous_token_builder():
    """base.prompt_tokens: as ct_build_initial_tokens does it, but without its cut."""
    messages = [{"role": "user", "content": "a question"}]

    async def prompts():
        loop = make_loop(ToolAgentLoop, ScriptedClient(lambda _: ""), prompt_length=8)
        whole = loop.continuous_token_builder.build_initial_tokens(messages, tools=None)
        return list(whole), await loop.ct_build_initial_tokens(messages, tools=None)

    whole, cut = asyncio.run(prompts())
    assert len(whole) > 8
    assert cut == whole[-8:]


def test_lengths_are_attributes_of_the_tool_loop():
    """Memory and compaction compare contexts with them."""
    loop = make_loop(ToolAgentLoop, ScriptedClient(lambda _: ""), prompt_length=11, response_length=12)
    assert (loop.prompt_length, loop.response_length) == (11, 12)


def test_reward_functions():
    """tree_search.leaf_reward calls what verl's reward manager would call, with the same names."""
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        assert get_custom_reward_fn(hydra.compose("ppo_trainer")) is None
    names = {"data_source", "solution_str", "ground_truth", "extra_info"}
    assert names <= set(inspect.signature(default_compute_score).parameters)
    score = default_compute_score(data_source="openai/gsm8k", solution_str="#### 7", ground_truth="7", extra_info=None)
    assert float(score) == 1.0
