"""Every symbol, signature and behaviour of verl 0.9.1 that `rollout_hooks` relies on, with the place that relies on it.

A failure here after an upgrade of verl names what to look at before any test of ours says something confusing.
"""

import asyncio
import importlib.metadata
import inspect
import logging
from types import SimpleNamespace

import hydra
import numpy as np
import pytest
import ray
import torch
import transfer_queue as tq
from ray.exceptions import ActorDiedError, ActorUnavailableError
from scripted_llm import ScriptedClient, config, make_loop, run_loop
from typing_extensions import override
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
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
from verl.utils import tensordict_utils as tu
from verl.utils.profiler import simple_timer
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder, MergeResult
from verl.workers.config import RolloutConfig
from verl.workers.rollout import router
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import GlobalRequestLoadBalancer, get_router_handle
from worker_cases import InProcessWorker, run_sessions

from rollout_hooks.capture.outputs import PromptFailed
from rollout_hooks.capture.recording import ABORTED
from rollout_hooks.worker import TreeAgentLoopManager, TreeAgentLoopWorker
from verl_tree.launch.run.actors import AGENT_LOOP_WORKER

WORKER = AgentLoopWorkerTQ.__ray_metadata__.modified_class


def parameters(function):
    # Ray adds a parameter to the methods of actor classes and of their bases.
    return [name for name in inspect.signature(function).parameters if name != "_ray_trace_ctx"]


class LocalServerClient(FullyAsyncLLMServerClient):
    """verl's client in front of a server in this process, which answers with the given outputs."""

    def __init__(self, *outputs, **rollout):
        super().__init__(config=config(name="vllm", **rollout))
        self.outputs, self.request_ids = iter(outputs), []

    @override
    async def _acquire_server(self, request_id, **extra):
        async def remote(*, request_id, **_):
            self.request_ids.append(request_id)
            return next(self.outputs)

        return "server", SimpleNamespace(generate=SimpleNamespace(remote=remote))

    @override
    def _release_server(self, server_id, request_id=None):
        pass


def output_of(*token_ids, stop_reason="completed", step=3):
    return TokenOutput(
        token_ids=list(token_ids),
        log_probs=[-1.0] * len(token_ids),
        stop_reason=stop_reason,
        extra_fields={"global_steps": step},
    )


def test_version():
    assert importlib.metadata.version("verl") == "0.9.1"


@pytest.mark.parametrize("client_class", [LLMServerClient, FullyAsyncLLMServerClient])
def test_client_generate(client_class):
    """recording.RecordingClient stands in its place; branch.Branch calls it."""
    signature = inspect.signature(client_class.generate)
    assert list(signature.parameters)[:4] == ["self", "request_id", "prompt_ids", "sampling_params"]
    assert signature.parameters["prompt_ids"].kind is inspect.Parameter.KEYWORD_ONLY
    assert {"image_data", "video_data", "audio_data", "mm_processor_kwargs"} <= set(signature.parameters)
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


def test_weight_versions_are_extra_fields():
    """recording.RecordingClient: the versions of the weights in the report and the rows."""
    client = LocalServerClient(output_of(5))
    output = asyncio.run(LLMServerClient.generate(client, "r", prompt_ids=[1], sampling_params={}))
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (3, 3)


def test_a_prompt_ends_after_its_last_session(monkeypatch):
    """worker.TreeAgentLoopWorkerBase: the last session tags the rows before the trainer can see that they are there."""
    events = []

    async def put(*, key, partition_id, tag):
        assert (key, partition_id) == ("u", "train")
        events.append(tag["status"])

    class Worker(WORKER):
        def __init__(self):
            self.config = config(n=3)

        async def _run_agent_loop(self, *_, session_id, **__):
            await asyncio.sleep((3 - session_id) / 100)
            events.append(session_id)

    monkeypatch.setattr(tq, "async_kv_put", put)
    asyncio.run(Worker()._run_prompt({"uid": "u"}, {}, trajectory={"validate": False}))
    assert events == ["running", 2, 1, 0, "finished"]


def test_a_prompt_that_failed_is_logged_with_its_error_and_made_a_quiet_line(monkeypatch, caplog):
    """worker._told_in_the_report: hundreds of tracebacks a step would hide the summary. Other errors stay."""

    async def put(**_):
        pass

    class Worker(WORKER):
        def __init__(self, error):
            self.config, self.error = config(n=1), error

        async def _run_agent_loop(self, *_, **__):
            raise self.error

    monkeypatch.setattr(tq, "async_kv_put", put)
    monkeypatch.setattr(logging.getLogger("verl"), "propagate", True)
    with caplog.at_level("INFO", WORKER.__module__):
        for error in (PromptFailed("all 1 sessions of the prompt failed"), KeyError("plan")):
            asyncio.run(Worker(error)._run_prompt({"uid": "u"}, {}, trajectory={"validate": False}))
    brief, whole = caplog.records
    assert (brief.levelname, brief.exc_info) == ("INFO", None)
    assert brief.getMessage() == "Error in _run_prompt for uid=u: all 1 sessions of the prompt failed"
    assert whole.levelname == "ERROR"
    assert isinstance(whole.exc_info[1], KeyError)


def test_both_words_for_aborted_are_stop_reasons():
    """recording.ABORTED: a call that goes on after an abort does so for these."""
    aborted = [output_of(token, stop_reason=word) for token, word in enumerate(ABORTED)]
    client = LocalServerClient(*aborted, output_of(7))
    output = asyncio.run(client.generate("r", prompt_ids=[1], sampling_params={"max_tokens": 9}))
    assert (output.token_ids, output.stop_reason) == ([0, 1, 7], "completed")


def test_request_id_reaches_vllm_only_under_full_determinism():
    """branch.BranchSession: one sticky id otherwise, an id per call then."""
    for full_determinism in (False, True):
        client = LocalServerClient(output_of(5), output_of(6), full_determinism=full_determinism)
        for _ in range(2):
            asyncio.run(LLMServerClient.generate(client, "r", prompt_ids=[1], sampling_params={}))
        assert (client.request_ids == ["r", "r"]) is full_determinism
        assert len(set(client.request_ids)) == (1 if full_determinism else 2)


def test_a_router_is_a_class_of_a_file():
    """router.PromptRouter: its base's accounts, and which class verl makes of rollout.router_config_path."""
    balancer = GlobalRequestLoadBalancer({"a": 1})
    assert balancer.acquire_server("r") == ("a", 1)
    assert (balancer._inflight_requests, dict(balancer._request_id_to_server)) == ({"a": 1}, {"r": "a"})
    assert balancer.require_acquire_fields() == balancer.require_release_fields() == []
    assert list(inspect.signature(get_router_handle).parameters)[:2] == ["servers", "router_config_path"]
    assert "ray_cls.remote(servers, yaml_config)" in inspect.getsource(router._create_plugin_extension)
    assert RolloutConfig.router_config_path is None


def test_servers_say_what_their_prefix_cache_had():
    """recording.RecordingClient: `tree/prefix_cache_hit_rate`."""
    source = inspect.getsource(importlib.import_module("verl.workers.rollout.vllm_rollout.vllm_async_server"))
    assert 'extra_fields["num_cached_tokens"]' in source


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
    assert "num_turns" not in row
    assert "rm_scores" not in row
    assert "rollout_log_probs" not in row
    output.num_turns, output.reward_score, output.response_logprobs = 2, 0.5, [-1.0, 0.0]
    row = output.as_dict()
    assert row["rm_scores"].tolist() == [0.0, 0.5]
    assert row["rollout_log_probs"].tolist() == [-1.0, 0.0]
    assert row["num_turns"] == 2
    assert row["extra_fields"] == {}
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


@register("contract_arguments")
class NotingLoop(AgentLoopBase):
    """Keeps the names of the arguments that the worker gives."""

    given = None

    def __init__(self, **kwargs):
        NotingLoop.given = set(kwargs)
        super().__init__(**kwargs)

    @override
    async def run(self, sampling_params, **kwargs):
        raise NotImplementedError


def test_the_worker_gives_loops_no_other_arguments_than_these():
    """base._GIVEN_BY_VERL: whatever else reaches a loop is an option of `loops.yaml`."""
    run_sessions(InProcessWorker(lambda _: "a"), num_sessions=1, agent_name="contract_arguments")
    assert NotingLoop.given == set(parameters(AgentLoopBase.__init__)[1:8]) | {"tools"}


def test_agent_loop_base():
    """base.BranchingAgentLoop uses these methods and attributes."""
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
    client = ScriptedClient(lambda _: "a")

    async def attributes():
        loop = make_loop(SingleTurnAgentLoop, client, response_length=5)
        return loop.server_manager, loop.rollout_config.response_length

    assert asyncio.run(attributes()) == (client, 5)


def test_prompts_are_cut_from_the_left_before_the_first_call():
    """rows.py: what verl's own loops do with a long prompt."""

    async def prompt(**rollout):
        loop = make_loop(SingleTurnAgentLoop, ScriptedClient(lambda _: "a"), **rollout)
        return await loop.ct_build_initial_tokens([{"role": "user", "content": "question"}])

    whole, cut = asyncio.run(prompt()), asyncio.run(prompt(prompt_length=4))
    assert len(whole) > 4
    assert cut == whole[-4:]


def test_merging_reports_how_many_tokens_it_removed():
    """base.BranchingAgentLoop.observe_messages."""
    assert {"token_ids", "removed_prefix_token_count"} <= set(MergeResult.__dataclass_fields__)
    builder = ContinuousTokenBuilder(tokenizer=None)
    merged = MergeResult(
        token_ids=[1, 8, 9], appended_token_count=1, inserted_token_ids=[8], removed_prefix_token_count=1
    )
    assert builder.align_response_metadata(merged, [1, 1], None) == ([1, 0, 0], None)


@pytest.mark.parametrize("loop_class", [SingleTurnAgentLoop, ToolAgentLoop])
def test_verls_loops_cut_the_response_from_the_right(loop_class):
    """rows.py cuts recorded leaves alike."""
    token_ids = list(range(5, 15))
    answer = TokenOutput(token_ids=token_ids, log_probs=[-1.0] * 10, stop_reason="completed")
    output = run_loop(loop_class, ScriptedClient(lambda _: answer), {"logprobs": True}, response_length=6)
    assert (output.response_ids, output.response_mask) == (token_ids[:6], [1] * 6)


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

    async def attributes():
        return vars(make_loop(ToolAgentLoop, ScriptedClient(lambda _: "a")))

    assert {"tools", "tool_parser", "max_parallel_calls", "max_assistant_turns", "max_user_turns"} <= set(
        asyncio.run(attributes())
    )


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
    assert inspect.unwrap(WORKER._run_agent_loop) is inspect.unwrap(AgentLoopWorker._run_agent_loop)
    assert parameters(WORKER._agent_loop_postprocess) == ["self", "output", "validate", "kwargs"]


def test_worker_runs_the_sessions_of_a_prompt():
    """worker.TreeAgentLoopWorkerBase counts them; tests/e2e/test_capture.py sees which prompts are marked as failed."""
    assert parameters(WORKER._run_prompt) == ["self", "prompt", "sampling_params", "trajectory", "trace"]


def test_worker_scores_a_session_only_if_its_last_row_has_no_reward():
    """Why branch.Branch sets `reward_score`, and what worker._check_rewards refuses."""

    def score(reward, handles):
        output = AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], metrics={}, reward_score=reward)
        worker = InProcessWorker(lambda _: "a", reward_handles=handles)
        asyncio.run(worker._compute_score([output], kwargs={}))
        return output.reward_score

    assert (score(0.5, []), score(0.5, None), score(None, None)) == (0.5, 0.5, None)
    with pytest.raises(IndexError):  # no worker to choose
        score(None, [])


def test_manager_sets_its_worker_class_in_init():
    """worker.TreeAgentLoopManager sets it afterwards."""
    assert AgentLoopManagerTQ(config(), llm_client=None).agent_loop_workers_class is AgentLoopWorkerTQ
    assert TreeAgentLoopManager(config(), llm_client=None).agent_loop_workers_class is TreeAgentLoopWorker


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
    assert set(seconds) == {"a", "b"}
    assert seconds["a"] > 0


def test_the_names_of_the_workers(monkeypatch):
    """The watchdog finds the agent loop workers by the beginning of their names (`verl_tree.launch.run.actors`)."""
    names = []

    class Recorded:
        @classmethod
        def options(cls, *, name, **_):
            names.append(name)
            return SimpleNamespace(remote=lambda *_: None)

    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": "0" * 56, "Alive": True, "Resources": {"CPU": 1}}])
    manager = AgentLoopManagerTQ.__new__(AgentLoopManagerTQ)
    manager.config = manager.llm_client = manager.teacher_client = manager.reward_loop_worker_handles = None
    manager.rollout_config = SimpleNamespace(agent=SimpleNamespace(num_workers=2))
    manager.agent_loop_workers_class = Recorded
    asyncio.run(manager._init_agent_loop_workers())
    assert len(set(names)) == 2
    assert all(name.startswith(AGENT_LOOP_WORKER) for name in names)


def test_the_manager_deals_chunks_in_the_order_of_its_workers(monkeypatch):
    """`rollout_hooks.capture.retries` remembers by this who got what; prompts of a worker can be split again."""
    dealt = {}

    def worker(number):
        return SimpleNamespace(generate_sequences=SimpleNamespace(remote=lambda part: dealt.update({number: part})))

    monkeypatch.setattr(ray, "get", lambda answers: answers)
    for num_prompts in (5, 2):
        dealt.clear()
        manager = AgentLoopManagerTQ.__new__(AgentLoopManagerTQ)
        manager.agent_loop_workers = [worker(number) for number in range(3)]
        prompts = tu.get_tensordict({"uid": np.array([f"{n}-u" for n in range(num_prompts)], dtype=object)})
        tu.assign_non_tensor_data(prompts, "validate", True)
        manager.generate_sequences(prompts)
        expected = [list(part["uid"]) for part in prompts.chunk(3)]
        assert [list(dealt[number]["uid"]) for number in sorted(dealt)] == expected
        single = [one for number in sorted(dealt) for one in dealt[number].split(1)]
        assert [list(one["uid"]) for one in single] == [[f"{n}-u"] for n in range(num_prompts)]
        assert all(one["validate"] is True for one in single)


def test_a_death_is_told_apart_from_an_actor_that_cannot_be_reached():
    """A dead worker is started anew, the other one is asked again."""
    assert not issubclass(ActorDiedError, ActorUnavailableError)
    assert not issubclass(ActorUnavailableError, ActorDiedError)
