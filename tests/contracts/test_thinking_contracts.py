"""What the recipe multi_turn_thinking relies on in verl 0.9.1, and the behaviour of verl that it is an answer to."""

import dataclasses
import inspect

from scripted_llm import END, ScriptedClient, run_loop
from verl.experimental.agent_loop.agent_loop import AgentLoopBase
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder, MergeResult

# The template of `scripted_llm` writes a call with other spaces, so a history that is rendered anew has other tokens.
CALL = '<tool_call>{"name":  "double",  "arguments": {"x": 3}}</tool_call>'


def prompts_of_the_tool_loop(**settings: object) -> list[str]:
    client = ScriptedClient(lambda prompt: "done" if "[6]" in prompt else CALL)
    run_loop(ToolAgentLoop, client, {}, **settings)
    return client.prompts


def test_the_tool_loop_appends_and_never_renders_its_history_again() -> None:
    """The reason for the recipe's loop; if verl learns to render anew, the recipe can use verl's own."""
    first, second = prompts_of_the_tool_loop()
    assert second.startswith(first + CALL + END)


def test_the_option_for_the_inference_template_is_not_read_by_agent_loops() -> None:
    plain, with_option = (
        prompts_of_the_tool_loop(multi_turn__use_inference_chat_template=value) for value in (False, True)
    )
    assert plain == with_option


def test_methods_that_the_loop_overrides() -> None:
    names = ["self", "previous_messages", "updated_messages", "runtime_token_ids", "response_mask"]
    parameters = list(inspect.signature(AgentLoopBase.ct_merge_context_msg).parameters)
    assert parameters == [*names, "response_logprobs", "tools"]
    assert list(inspect.signature(ToolAgentLoop._build_assistant_message).parameters) == [
        "self",
        "content",
        "agent_data",
    ]


def test_a_merge_may_replace_the_end_of_what_was_there() -> None:
    """Mask and log-probs follow, even where the change begins before the first sampled token."""
    assert {field.name for field in dataclasses.fields(MergeResult)} == {
        "token_ids",
        "appended_token_count",
        "kind",
        "inserted_token_ids",
        "removed_prefix_token_count",
    }
    assert MergeResult(token_ids=[], appended_token_count=0).kind == "context"
    align = ContinuousTokenBuilder(tokenizer=None).align_response_metadata
    # Runtime tokens 1 2 | 3 4 5 with two prompt tokens; rendered 1 2 3 8 and 1 9.
    merged = MergeResult(token_ids=[1, 2, 3, 8], appended_token_count=1, removed_prefix_token_count=2)
    assert align(merged, [1, 1, 0], [-0.1, -0.2, 0.0]) == ([1, 0], [-0.1, 0.0])
    merged = MergeResult(token_ids=[1, 9], appended_token_count=1, removed_prefix_token_count=4)
    assert align(merged, [1, 1, 0], [-0.1, -0.2, 0.0]) == ([0], [0.0])
