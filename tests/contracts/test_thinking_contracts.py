"""What the recipe multi_turn_thinking relies on in verl 0.9.1, and the behaviour of verl that it is an answer to."""

import dataclasses
import inspect
from pathlib import Path

import verl
from verl.experimental.agent_loop import tool_agent_loop
from verl.experimental.agent_loop.agent_loop import AgentLoopBase
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder, MergeResult


def test_the_tool_loop_appends_and_never_renders_its_history_again() -> None:
    """The reason for the recipe's loop; if verl learns to render anew, the recipe can use verl's own."""
    assert inspect.getsource(tool_agent_loop).count("ct_build_initial_tokens(") == 1
    merge = inspect.getsource(ContinuousTokenBuilder.merge_context_tokens)
    assert "appended_messages = updated_messages[len(previous_messages) :]" in merge
    assert "list(runtime_token_ids) + list(appended_token_ids)" in inspect.getsource(
        ContinuousTokenBuilder._merge_context_token_ids
    )


def test_the_option_for_the_inference_template_is_not_read_by_agent_loops() -> None:
    """Only the request schema of an earlier rollout reads it, and nothing uses that schema."""
    root = Path(verl.__file__).parent
    texts = {path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*.py")}
    readers = {name for name, text in texts.items() if "use_inference_chat_template" in text}
    assert readers == {"workers/config/rollout.py", "workers/rollout/schemas.py"}
    assert {name for name, text in texts.items() if "AsyncRolloutRequest" in text} == {"workers/rollout/schemas.py"}


def test_methods_that_the_loop_overrides() -> None:
    names = ["self", "previous_messages", "updated_messages", "runtime_token_ids", "response_mask"]
    parameters = list(inspect.signature(AgentLoopBase.ct_merge_context_msg).parameters)
    assert parameters == [*names, "response_logprobs", "tools"]
    assert "merge_result, response_mask, response_logprobs = await self.ct_merge_context_msg(" in inspect.getsource(
        ToolAgentLoop._handle_processing_tools_state
    )
    assert list(inspect.signature(ToolAgentLoop._build_assistant_message).parameters) == [
        "self",
        "content",
        "agent_data",
    ]
    assert "agent_data.response_ids = output.token_ids" in inspect.getsource(ToolAgentLoop._handle_generating_state)


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
