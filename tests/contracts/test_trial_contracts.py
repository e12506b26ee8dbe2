"""What the check of loops and a session without a training run rely on in verl and vLLM."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from scripted_llm import config
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopWorker, _agent_loop_registry
from vllm.entrypoints.openai.completion.protocol import (
    CompletionLogProbs,
    CompletionRequest,
    CompletionResponse,
    CompletionResponseChoice,
    UsageInfo,
)
from worker_cases import InProcessWorker

from rollout_hooks.trial.clients import ServedAnswers
from verl_tree.launch.checks.arguments import arguments_of
from verl_tree.launch.checks.loop_entries import GIVEN_BY_VERL, VERL_BASE
from verl_tree.launch.checks.source import find_target


class Recorder:
    """A loop that keeps what verl gives it and returns what nobody would make of it."""

    given: frozenset[str] = frozenset()

    def __init__(self, **given: Any) -> None:
        type(self).given = frozenset(given)

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[Any]:
        return [sampling_params, row]


class Worker(AgentLoopWorker):
    """verl's own worker, with the attributes of one that runs in this process."""

    def __init__(self) -> None:
        vars(self).update(vars(InProcessWorker(lambda _: "")))

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> Any:
        return output, validate, kwargs


def test_verl_gives_every_loop_the_same_arguments_and_returns_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_agent_loop_registry, "recorder", {"_target_": f"{__name__}.Recorder", "name": "recorder"})
    trajectory = {"step": 0, "sample_index": 0, "rollout_n": 0, "validate": False}
    result = Worker()._run_agent_loop({"top_p": 1.0}, trajectory, agent_name="recorder", trace=False, uid="u")
    assert asyncio.run(result) == ([{"top_p": 1.0}, {"uid": "u"}], False, {"uid": "u"})
    assert Recorder.given == GIVEN_BY_VERL


def test_the_base_class_of_loops_takes_them_and_drops_others() -> None:
    assert f"{AgentLoopBase.__module__}.{AgentLoopBase.__name__}" == VERL_BASE
    found = find_target(VERL_BASE)
    assert found is not None
    taken = arguments_of(found)
    assert taken is not None
    assert taken.names == GIVEN_BY_VERL - {"name", "tools"}
    assert taken.takes_others
    assert not taken.refuses_others


class Server(BaseHTTPRequestHandler):
    """The wire format of vLLM's server: its own classes read the request and write the answer."""

    asked: CompletionRequest

    def do_GET(self) -> None:
        self.answer(json.dumps({"data": [{"id": "tiny"}]}))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        type(self).asked = CompletionRequest.model_validate_json(body)
        log_probs = CompletionLogProbs(token_logprobs=[-0.5, -0.25], tokens=["a", "b"])
        choice = CompletionResponseChoice(index=0, text="ab", logprobs=log_probs, token_ids=[7, 8])
        self.answer(CompletionResponse(model="tiny", choices=[choice], usage=UsageInfo()).model_dump_json())

    def answer(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Be silent."""


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_served_model_gets_tokens_and_gives_tokens(url: str) -> None:
    client = ServedAnswers(config(prompt_length=4, response_length=6), url=url)
    params = {"temperature": 0.5, "top_k": -1, "top_p": 0.9, "repetition_penalty": 1.0, "logprobs": True}
    output = asyncio.run(client.generate("r", prompt_ids=[1, 2, 3, 4, 5, 6, 7], sampling_params=params))
    assert (output.token_ids, output.log_probs, output.stop_reason) == ([7, 8], [-0.5, -0.25], "completed")
    asked = Server.asked
    assert (asked.prompt, asked.model, asked.max_tokens, asked.return_token_ids) == (
        [1, 2, 3, 4, 5, 6, 7],
        "tiny",
        3,
        True,
    )
    sampling = asked.to_sampling_params(3, {})
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.logprobs) == (0.5, -1, 0.9, 0)
    asyncio.run(client.generate("r", prompt_ids=[1], sampling_params={"max_tokens": 2}))
    assert Server.asked.max_tokens == 2
    with pytest.raises(ValueError, match="takes text only"):
        asyncio.run(client.generate("r", prompt_ids=[1], sampling_params={}, image_data=[object()]))


def test_an_address_without_a_server_is_told() -> None:
    with pytest.raises(ConnectionError, match=r"http://127\.0\.0\.1:9/v1/models: .*give the address"):
        ServedAnswers(config(), url="http://127.0.0.1:9/v1")
