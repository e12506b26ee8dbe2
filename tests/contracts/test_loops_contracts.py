"""What the loops memory, compaction, subagents and tree_search rely on in verl 0.9.1, with the place that does."""

import asyncio
import dataclasses
import inspect

import hydra
from verl.experimental.agent_loop.agent_loop import AgentLoopBase
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils.reward_score import default_compute_score
from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder


def test_function_tools_can_be_made_without_the_registry():
    """memory and subagents make tools that are bound to their session."""
    assert [field.name for field in dataclasses.fields(FunctionTool)] == ["name", "fn", "tool_schema", "is_async"]

    async def shout(text: str) -> str:
        return text.upper()

    parameters = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    function = {"name": "shout", "description": "d", "parameters": parameters}
    schema = OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})
    assert asyncio.run(FunctionTool("shout", shout, schema, is_async=True).call({"text": "a"})) == "A"
    assert schema.model_dump(exclude_unset=True, exclude_none=True)["function"]["name"] == "shout"


def test_what_a_tool_raises_becomes_a_text_with_these_words():
    """tool_turns.run_call tells tool errors from other results by them; cancellation (a time-out) is not swallowed."""
    text = inspect.getsource(ToolAgentLoop._call_tool)
    assert "except Exception as e:" in text and "except BaseException" not in text
    assert "ToolResponse(text=f\"Error executing tool '{tool_name}': {e}\")" in text
    assert text.count("Error executing tool") == 2  # the second is the log's


def test_prompts_are_rendered_by_the_continuous_token_builder():
    """branching.prompt_tokens: as ct_build_initial_tokens does it, but without its cut."""
    assert "self.continuous_token_builder = " in inspect.getsource(AgentLoopBase.__init__)
    parameters = inspect.signature(ContinuousTokenBuilder.build_initial_tokens).parameters
    assert list(parameters)[:3] == ["self", "messages", "tools"]
    assert "continuous_token_builder.build_initial_tokens(" in inspect.getsource(AgentLoopBase.ct_build_initial_tokens)


def test_lengths_are_attributes_of_the_tool_loop():
    """memory and compaction compare contexts with them."""
    text = inspect.getsource(ToolAgentLoop.__init__)
    assert "self.prompt_length = self.rollout_config.prompt_length" in text
    assert "self.response_length = self.rollout_config.response_length" in text


def test_reward_functions():
    """tree_search.leaf_reward calls what verl's reward manager would call, with the same names."""
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        assert get_custom_reward_fn(hydra.compose("ppo_trainer")) is None
    names = {"data_source", "solution_str", "ground_truth", "extra_info"}
    assert names <= set(inspect.signature(default_compute_score).parameters)
    score = default_compute_score(data_source="openai/gsm8k", solution_str="#### 7", ground_truth="7", extra_info=None)
    assert float(score) == 1.0


def test_rows_may_name_their_agent_loop():
    """A column `agent_name` of the data set goes before the default (docs/agent_loops.md)."""
    text = inspect.getsource(AgentLoopWorkerTQ.__ray_metadata__.modified_class.generate_sequences)
    assert 'if "agent_name" not in batch:' in text
