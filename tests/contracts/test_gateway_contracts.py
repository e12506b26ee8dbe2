"""What `rollout_hooks.gateway`, `async_llm` and `blackbox` rely on in verl, vLLM, uvicorn and transformers."""

import asyncio
import inspect
import signal

import pytest
import uvicorn
from ray.exceptions import RayTaskError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from uvicorn.server import HANDLED_SIGNALS
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from vllm import RequestOutput, SamplingParams
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from rollout_hooks.capture.errors import is_of_dead_server
from rollout_hooks.gateway import Gateway, serve

TEMPLATE = "{% for message in messages %}{{ message.role[0] + message.content }}{% endfor %}<s>"


def parameters(function):
    return list(inspect.signature(function).parameters)


def tokenizer():
    raw = Tokenizer(models.WordLevel({"<s>": 0, "<end>": 1, "?": 2, "u": 3, "q": 4}, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="<end>", chat_template=TEMPLATE)


def test_builder_renders_prompts_from_messages_and_tools():
    """gateway.chat_format.ChatFormat calls `render(messages, tools=)`; blackbox takes the loop's own builder."""
    assert {"messages", "tools"} <= set(parameters(ContinuousTokenBuilder.build_initial_tokens))
    builder = create_continuous_token_builder(tokenizer(), hf_model_type=None)
    token_ids = builder.build_initial_tokens([{"role": "user", "content": "q"}], tools=None)
    assert list(token_ids) == [3, 4, 0]


def test_tool_parsers_are_found_by_the_configured_name():
    """blackbox: `rollout.multi_turn.format`."""
    assert parameters(ToolParser.get_tool_parser) == ["name", "tokenizer"]
    assert {"hermes", "qwen3_coder", "gpt-oss"} <= set(ToolParser._registry), (
        "what the check of the name looks it up in"
    )
    with pytest.raises(ValueError, match="Unknown tool parser: nonsense"):
        ToolParser.get_tool_parser("nonsense", tokenizer())
    assert parameters(ToolParser.extract_tool_calls) == ["self", "responses_ids", "tools"]
    assert set(FunctionCall.model_fields) == {"name", "arguments", "tool_call_id"}


def test_parsers_take_schemas_with_the_types_of_arguments():
    """gateway.chat_format._parser_schema: verl refuses a property without a plain type, so it is given one."""
    properties = {"x": {"type": "object"}, "y": {"type": ["integer", "null"]}}
    parameters = {"type": "object", "properties": properties, "required": []}
    schema = OpenAIFunctionToolSchema(
        type="function", function={"name": "f", "description": "", "parameters": parameters}
    )
    assert schema.function.parameters.properties["y"].type == ["integer", "null"]


def test_sampling_parameters_have_vllms_names():
    """gateway.session.SessionSettings; that verl's server passes them on is checked by tests/e2e/test_gateway.py."""
    assert "sampling_params" in parameters(vLLMHttpServer.generate)
    SamplingParams(temperature=1.0, top_p=0.9, top_k=-1, repetition_penalty=1.0, seed=1, stop=["x"], max_tokens=1)


def test_async_llm_streams_request_outputs():
    """async_llm.RecordingAsyncLLM."""
    assert parameters(AsyncLLM.generate)[:4] == ["self", "prompt", "sampling_params", "request_id"]
    assert inspect.isasyncgenfunction(AsyncLLM.generate)
    fields = {"index", "token_ids", "logprobs", "finish_reason"}
    assert fields <= set(CompletionOutput.__dataclass_fields__)
    assert {"outputs", "finished"} <= set(parameters(RequestOutput.__init__))
    assert {kind.name for kind in RequestOutputKind} == {"CUMULATIVE", "DELTA", "FINAL_ONLY"}


def test_cloned_sampling_parameters_are_independent():
    params = SamplingParams()
    clone = params.clone()
    clone.logprobs = 0
    assert (params.logprobs, params.n, params.output_kind) == (None, 1, RequestOutputKind.CUMULATIVE)


def test_a_gateway_leaves_the_signals_to_the_program_that_it_is_a_part_of():
    """gateway.server overrides the method in which uvicorn takes them."""

    def handlers():
        return [signal.getsignal(number) for number in HANDLED_SIGNALS]

    async def before_and_while_it_serves():
        before = handlers()
        async with serve(Gateway()):
            return before, handlers()

    before, served = asyncio.run(before_and_while_it_serves())
    assert served == before
    assert {"sockets"} <= set(parameters(uvicorn.Server.serve))
    server = uvicorn.Server(uvicorn.Config(app=None))
    assert (server.started, server.should_exit) == (False, False)


def test_tokenizers_say_which_tokens_are_special():
    """gateway.chat_format.ChatFormat: a special token at the end of a turn is no text."""
    special = {token_id for token_id, token in tokenizer().added_tokens_decoder.items() if token.special}
    assert special == {0, 1}


def test_the_error_of_a_dead_engine_is_known_by_its_name():
    """capture.errors: vLLM raises it in the server, and Ray hands it to the agent loop's worker."""
    error = RayTaskError("generate", "Traceback", EngineDeadError(), proctitle="p", pid=1, ip="x").as_instanceof_cause()
    assert is_of_dead_server(error)
    assert is_of_dead_server(EngineDeadError())
    assert not is_of_dead_server(
        RayTaskError("generate", "Traceback", ValueError("long"), proctitle="p", pid=1, ip="x")
    )
