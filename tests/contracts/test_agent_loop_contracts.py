"""Every symbol, signature and behaviour of verl 0.9.1 that `rollout_hooks` relies on, with the place that relies on it.

A failure here after an upgrade of verl names what to look at before any test of ours says something confusing.
"""

import importlib.metadata
import inspect
import re

import hydra
import pytest
import torch
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    AgentLoopManager,
    AgentLoopMetrics,
    AgentLoopOutput,
    AgentLoopWorker,
    _agent_loop_registry,
    register,
)
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import AgentData, ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.schemas import ToolResponse
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils.profiler import simple_timer
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder, MergeResult
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

WORKER = AgentLoopWorkerTQ.__ray_metadata__.modified_class


def parameters(function):
    # Ray adds a parameter to the methods of actor classes and of their bases.
    return [name for name in inspect.signature(function).parameters if name != "_ray_trace_ctx"]


def source(function):
    return inspect.getsource(inspect.unwrap(function))


def test_version():
    assert importlib.metadata.version("verl") == "0.9.1"


@pytest.mark.parametrize("client_class", [LLMServerClient, FullyAsyncLLMServerClient])
def test_client_generate(client_class):
    """recording.RecordingClient stands in its place; branching.Branch calls it."""
    signature = inspect.signature(client_class.generate)
    assert list(signature.parameters)[:4] == ["self", "request_id", "prompt_ids", "sampling_params"]
    assert signature.parameters["prompt_ids"].kind is inspect.Parameter.KEYWORD_ONLY
    assert {"image_data", "video_data", "audio_data"} <= set(signature.parameters)
    assert any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    assert inspect.iscoroutinefunction(inspect.unwrap(client_class.generate))


def test_client_can_be_made_without_a_load_balancer():
    """recording.RecordingClient, whose calls all go through the client that it wraps."""
    assert LLMServerClient(config={"a": 1}).config == {"a": 1}


def test_token_output_fields():
    assert set(TokenOutput.model_fields) == {
        "token_ids",
        "log_probs",
        "routed_experts",
        "stop_reason",
        "num_preempted",
        "extra_fields",
    }


def test_aborted_is_a_stop_reason_and_weight_versions_are_extra_fields():
    """recording.ABORTED, and the versions of the weights in the report and the rows."""
    assert '("aborted", "abort")' in source(FullyAsyncLLMServerClient.generate)
    text = source(LLMServerClient.generate)
    assert 'setdefault("min_global_steps"' in text and 'setdefault("max_global_steps"' in text


def test_request_id_reaches_vllm_only_under_full_determinism():
    """branching.BranchSession: one sticky id otherwise, an id per call then."""
    text = source(LLMServerClient._vllm_request_id)
    assert "full_determinism" in text and "uuid4().hex" in text


def test_agent_loop_output_fields():
    """outputs.TreeAgentLoopOutput adds three fields; rows.py names these."""
    assert set(AgentLoopOutput.model_fields) == {
        "prompt_ids",
        "response_ids",
        "response_mask",
        "response_logprobs",
        "routed_experts",
        "multi_modal_data",
        "reward_score",
        "num_turns",
        "metrics",
        "extra_fields",
        "mm_processor_kwargs",
        "mm_processor_output",
    }
    assert {"generate_sequences", "tool_calls"} <= set(AgentLoopMetrics.model_fields)


def test_as_dict_writes_set_fields_only_and_the_reward_on_the_last_token():
    """outputs.TreeAgentLoopOutput.as_dict; rows._share_fields."""
    output = AgentLoopOutput(prompt_ids=[1], response_ids=[2, 3], response_mask=[1, 0], metrics={})
    row = output.as_dict()
    assert "num_turns" not in row and "rm_scores" not in row and "rollout_log_probs" not in row
    output.num_turns, output.reward_score, output.response_logprobs = 2, 0.5, [-1.0, 0.0]
    row = output.as_dict()
    assert row["rm_scores"].tolist() == [0.0, 0.5]
    assert row["rollout_log_probs"].tolist() == [-1.0, 0.0]
    assert row["num_turns"] == 2 and row["extra_fields"] == {}
    empty = AgentLoopOutput(prompt_ids=[1], response_ids=[], response_mask=[], metrics={}, reward_score=1.0)
    with pytest.raises(IndexError):  # why rows.py drops empty responses
        empty.as_dict()


def test_batch_of_rows_takes_its_fields_from_the_first_row():
    """Why rows._share_fields makes them equal."""
    first, second = {"a": torch.ones(2)}, {"a": torch.ones(3), "b": torch.ones(1)}
    assert set(list_of_dict_to_tensordict([first, second]).keys()) == {"a"}
    with pytest.raises(KeyError):
        list_of_dict_to_tensordict([second, first])


def test_register_stores_the_class_by_name():
    """parallel_tools.ParallelToolsAgentLoop; the worker instantiates it through hydra."""

    class Loop(AgentLoopBase):
        async def run(self, sampling_params, **kwargs):
            raise NotImplementedError

    assert register("contract_test")(Loop) is Loop
    assert _agent_loop_registry.pop("contract_test")["_target_"].endswith("Loop")
    assert {"single_turn_agent", "tool_agent"} <= set(_agent_loop_registry)


def test_the_worker_gives_loops_no_other_arguments_than_these():
    """base._GIVEN_BY_VERL: whatever else reaches a loop is an option of `loops.yaml`."""
    source = inspect.getsource(AgentLoopWorkerTQ._run_agent_loop)
    call = source[source.index("hydra.utils.instantiate(") : source.index("await agent_loop.run")]
    given = set(re.findall(r"^\s+(\w+)=", call, re.M)) - {"config"}
    assert given == set(parameters(AgentLoopBase.__init__)[1:8]) | {"tools"}


def test_agent_loop_base():
    """branching.BranchingAgentLoop uses these methods and attributes."""
    assert parameters(AgentLoopBase.__init__)[1:8] == [
        "trainer_config",
        "server_manager",
        "tokenizer",
        "processor",
        "dataset_cls",
        "data_config",
        "hf_model_type",
    ]
    assert parameters(AgentLoopBase.ct_build_initial_tokens)[:3] == ["self", "messages", "tools"]
    assert parameters(AgentLoopBase.ct_merge_context_msg) == [
        "self",
        "previous_messages",
        "updated_messages",
        "runtime_token_ids",
        "response_mask",
        "response_logprobs",
        "tools",
    ]
    assert parameters(AgentLoopBase.process_multi_modal_info) == ["self", "messages"]
    assert parameters(AgentLoopBase.run) == ["self", "sampling_params", "kwargs"]
    text = source(AgentLoopBase.__init__)
    assert "self.server_manager = server_manager" in text and "self.rollout_config = " in text


def test_prompts_are_cut_from_the_left_before_the_first_call():
    """rows.py: what verl's own loops do with a long prompt."""
    text = source(AgentLoopBase._cap_text_prompt_length)
    assert "prompt_ids[-prompt_length:]" in text
    assert "_cap_text_prompt_length(prompt_ids)" in source(AgentLoopBase.ct_build_initial_tokens)


def test_merging_reports_how_many_tokens_it_removed():
    """branching.BranchingAgentLoop.observe_messages."""
    assert {"token_ids", "removed_prefix_token_count"} <= set(MergeResult.__dataclass_fields__)
    builder = ContinuousTokenBuilder(tokenizer=None)
    merged = MergeResult(
        token_ids=[1, 8, 9], appended_token_count=1, inserted_token_ids=[8], removed_prefix_token_count=1
    )
    assert builder.align_response_metadata(merged, [1, 1], None) == ([1, 0, 0], None)


def test_verls_loops_cut_the_response_from_the_right():
    """rows.py cuts recorded leaves alike."""
    for loop in (SingleTurnAgentLoop, ToolAgentLoop):
        text = source(loop.run)
        assert "response_ids=response_ids[: self.response_length]" in text
        assert "[: self.response_length]" in text.split("response_mask=")[1]


def test_tool_agent_loop():
    """parallel_tools.ParallelToolsAgentLoop inherits these."""
    assert parameters(ToolAgentLoop._call_tool) == ["self", "tool_call", "tools_kwargs", "agent_data"]
    assert parameters(ToolAgentLoop._build_assistant_message) == ["self", "content", "agent_data"]
    assert parameters(AgentData.__init__)[1:] == [
        "messages",
        "image_data",
        "video_data",
        "audio_data",
        "mm_processor_kwargs",
        "metrics",
        "request_id",
        "tools_kwargs",
    ]
    text = source(ToolAgentLoop.__init__)
    for attribute in ("tools", "tool_parser", "max_parallel_calls", "max_assistant_turns", "max_user_turns"):
        assert f"self.{attribute} = " in text
    assert '"_active_tools", self.tools' in source(ToolAgentLoop._call_tool)
    assert "len(response_mask) >= self.response_length" in source(ToolAgentLoop._handle_processing_tools_state)
    generating = source(ToolAgentLoop._handle_generating_state)
    assert "agent_data.user_turns >= self.max_user_turns" in generating
    assert "agent_data.assistant_turns >= self.max_assistant_turns" in generating


def test_tool_parser_and_tool_types():
    """parallel_tools: hooks are handed these."""
    assert set(FunctionCall.model_fields) == {"name", "arguments", "tool_call_id"}
    assert {"text", "image", "video"} <= set(ToolResponse.model_fields)
    assert parameters(ToolParser.extract_tool_calls) == ["self", "responses_ids", "tools"]
    assert isinstance(ToolParser.stop_token_ids, property)


def test_worker_runs_a_session_with_its_llm_client():
    """worker.TreeAgentLoopWorkerBase runs verl's method on a copy with another client."""
    assert parameters(AgentLoopWorker._run_agent_loop) == [
        "self",
        "sampling_params",
        "trajectory",
        "agent_name",
        "trace",
        "kwargs",
    ]
    text = source(AgentLoopWorker._run_agent_loop)
    assert "server_manager=self.llm_client" in text
    assert 'self._agent_loop_postprocess(output, trajectory["validate"], **kwargs)' in text
    assert source(WORKER._run_agent_loop) == text
    assert parameters(WORKER._agent_loop_postprocess) == ["self", "output", "validate", "kwargs"]


def test_worker_marks_a_prompt_as_failed_for_any_session_that_raises():
    """worker.TreeAgentLoopWorkerBase raises in the last session only; it counts sessions as verl does."""
    assert parameters(WORKER._run_prompt) == ["self", "prompt", "sampling_params", "trajectory", "trace"]
    text = source(WORKER._run_prompt)
    assert "if session_errors:" in text and 'status = "failure"' in text and 'status = "finished"' in text
    assert '"__rollout_n__", config.n if not trajectory["validate"] else config.val_kwargs.n' in text
    assert "session_id=i" in text


def test_worker_copies_the_last_reward_over_the_others():
    """Why outputs.TreeAgentLoopOutput keeps its reward in a field of its own; why `reward_extra_info` is always set."""
    text = source(WORKER._agent_loop_postprocess)
    assert "output.reward_score = final_output.reward_score" in text
    assert 'final_output.extra_fields["reward_extra_info"]' in text
    assert 'keys.append(f"{uid}_{session_id}_{i}")' in text
    assert "field = output.as_dict()" in text
    score = source(AgentLoopWorker._compute_score)
    assert "final_output.reward_score is None and enable_async_reward" in score
    assert "random.choice(self.reward_loop_worker_handles)" in score  # worker._check_rewards: fails on an empty list


def test_sampling_parameters_ask_for_log_probs_by_the_configuration():
    """worker._Session.wants_log_probs."""
    assert "logprobs=config.calculate_log_probs" in source(WORKER.generate_sequences)


def test_manager_sets_its_worker_class_in_init():
    """worker.TreeAgentLoopManager sets it afterwards."""
    assert "self.agent_loop_workers_class = AgentLoopWorkerTQ" in source(AgentLoopManagerTQ.__init__)
    assert "self.agent_loop_workers.append(" in source(AgentLoopManager._init_agent_loop_workers)
    assert "self.agent_loop_workers_class.options(" in source(AgentLoopManager._init_agent_loop_workers)


def test_manager_is_named_by_the_configuration():
    from verl.trainer.main_ppo import TaskRunnerV1

    text = source(TaskRunnerV1.__ray_metadata__.modified_class.init_agent_loop_manager)
    assert 'get("agent_loop_manager_class")' in text and "load_class_from_fqn(manager_class_fqn" in text


def test_rollout_configuration_keys():
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        rollout = hydra.compose("ppo_trainer").actor_rollout_ref.rollout
    for name in ("prompt_length", "response_length", "n", "calculate_log_probs", "full_determinism"):
        assert name in rollout, name
    assert "enable_rollout_routing_replay" in rollout
    assert "n" in rollout.val_kwargs
    multi_turn = ("max_assistant_turns", "max_user_turns", "max_parallel_calls", "max_tool_response_length", "format")
    assert set(multi_turn) <= set(rollout.multi_turn)


def test_simple_timer_adds_up():
    seconds = {}
    for _ in range(2):
        with simple_timer("a", seconds):
            pass
    with simple_timer("b", seconds):
        pass
    assert set(seconds) == {"a", "b"} and seconds["a"] > 0
