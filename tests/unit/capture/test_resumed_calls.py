"""Calls that a weight update interrupts: verl's resuming client, real, over an engine that stops in mid-answer."""

import asyncio
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

from forking_loop import TURN_LEN, ForkingLoop
from scripted_llm import ScriptedClient, config, log_prob, run_loop, tokenizer
from typing_extensions import override
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
from verl.workers.rollout.replica import TokenOutput

from rollout_hooks.capture.recording import RecordingClient
from rollout_hooks.capture.report import CaptureReport
from rollout_hooks.capture.rows import CALLS_FIELD, RowLimits, session_rows
from rollout_hooks.capture.session_tree import SessionTree
from rollout_hooks.gateway.engine import ClientEngine

FIRST_VERSION = 3
LIMITS = RowLimits(256, 256, wants_log_probs=True)
SAMPLING = {"logprobs": True}


def next_token(prompt_ids: list[int]) -> int:
    """Return the token that the engine samples: a function of all tokens before it, as under greedy sampling."""
    return 3 + (sum(prompt_ids) * 7 + len(prompt_ids)) % 80


class StoppingEngine:
    """A server whose answers stop at `stop_at` tokens in calls with that many generated so far, once per prompt."""

    def __init__(self, *, stops: dict[int, int]) -> None:
        self.stops, self.num_calls = stops, 0
        self.version, self.asked = FIRST_VERSION, list[tuple[int, int]]()
        self.generate = SimpleNamespace(remote=self._generate)

    async def _generate(self, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> TokenOutput:
        """Answer request number k with at most `stops[k]` tokens; weights change whenever a request was stopped."""
        limit = sampling_params["max_tokens"]
        stop = self.stops.get(self.num_calls)
        self.num_calls += 1
        self.asked.append((len(prompt_ids), limit))
        token_ids: list[int] = []
        while len(token_ids) < (limit if stop is None else min(stop, limit)):
            token_ids.append(next_token([*prompt_ids, *token_ids]))
        version = self.version
        if stop is not None:
            self.version += 1
        return TokenOutput(
            token_ids=token_ids,
            # The version is in the log-prob, so that every token says under which weights it was sampled.
            log_probs=[log_prob(len(prompt_ids) + i, token) - version for i, token in enumerate(token_ids)],
            stop_reason="completed" if stop is None else "aborted",
            extra_fields={"global_steps": version},
        )


class Client(FullyAsyncLLMServerClient):
    """verl's client of the asynchronous trainers, with one server in this process."""

    def __init__(self, engine: StoppingEngine) -> None:
        super().__init__(config=config(name="vllm"))
        self._engine = engine

    @override
    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        return "server", self._engine

    @override
    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        """There is no balancer to tell."""


def recorded(engine: StoppingEngine) -> RecordingClient:
    return RecordingClient(Client(engine), tree=SessionTree(decode=tokenizer().decode))


def test_a_tree_whose_calls_were_stopped_is_the_tree_of_undisturbed_calls() -> None:
    """The root is stopped after 2 tokens and again after none; one call of a branch is stopped after 1."""
    disturbed, quiet = StoppingEngine(stops={0: 2, 1: 0, 4: 1}), StoppingEngine(stops={})
    rows, trees = [], []
    for engine in (disturbed, quiet):
        client = recorded(engine)
        outputs = run_loop(ForkingLoop, client, SAMPLING)
        rows.append(session_rows(client.tree, outputs, limits=LIMITS).outputs)
        trees.append(client.tree)
    assert disturbed.num_calls == quiet.num_calls + 3
    assert [len(tree.calls) for tree in trees] == [7, 7]
    report = CaptureReport.of_calls(trees[0])
    assert (report.num_aborted_calls, report.num_failed_calls) == (0, 0)
    assert report == CaptureReport.of_calls(trees[1])
    for here, there in zip(*rows, strict=True):
        assert (here.prompt_ids, here.response_ids) == (there.prompt_ids, there.response_ids)
        assert here.response_mask == there.response_mask

    # The first request asked for 5 tokens, the resumed ones for what was missing.
    (prompt_len, _), *_ = disturbed.asked
    assert disturbed.asked[:3] == [
        (prompt_len, TURN_LEN),
        (prompt_len + 2, TURN_LEN - 2),
        (prompt_len + 2, TURN_LEN - 2),
    ]


def test_every_token_has_the_log_prob_of_its_version_and_every_call_the_range_of_its_versions() -> None:
    client = recorded(StoppingEngine(stops={0: 2, 1: 0, 4: 1}))
    outputs = run_loop(ForkingLoop, client, SAMPLING)
    rows = session_rows(client.tree, outputs, limits=LIMITS).outputs
    assert len(rows) == 4
    sampled_under: dict[int, list[int]] = defaultdict(list)
    for row in rows:
        ids, prompt_len = row.prompt_ids + row.response_ids, len(row.prompt_ids)
        versions, log_probs = [], row.response_logprobs or []
        for call, _, start, end, first, last in row.extra_fields[CALLS_FIELD]:
            here = [round(log_prob(place, ids[place]) - log_probs[place - prompt_len]) for place in range(start, end)]
            assert (here[0], here[-1]) == (first, last)
            assert len(here) == TURN_LEN
            sampled_under[call] = here
            versions += here
        assert (row.extra_fields["min_global_steps"], row.extra_fields["max_global_steps"]) == (
            min(versions),
            max(versions),
        )
    # Version 3 sampled two tokens of the root, 4 none, 5 the rest; the other stop was after one token of call 2.
    assert sampled_under[0] == [3, 3, 5, 5, 5]
    assert sampled_under[2] == [5, 6, 6, 6, 6]
    assert sum(len(set(versions)) > 1 for versions in sampled_under.values()) == 2
    assert {version for call in (3, 4, 5, 6) for version in sampled_under[call]} == {6}


def test_the_gateways_engine_sees_one_call_too() -> None:
    client = recorded(StoppingEngine(stops={0: 2}))
    engine = ClientEngine(client)

    async def chunks() -> list[Any]:
        return [each async for each in engine.stream([5, 6, 7], sampling_params={"logprobs": True, "max_tokens": 6})]

    (chunk,) = asyncio.run(chunks())
    assert (chunk.call, len(chunk.token_ids), len(chunk.log_probs)) == (0, 6, 6)
    (call,) = client.tree.calls
    assert (call.min_global_steps, call.max_global_steps) == (FIRST_VERSION, FIRST_VERSION + 1)


def test_what_stays_aborted_is_counted() -> None:
    """The synchronous trainer's client does not resume."""
    output = TokenOutput(token_ids=[5], log_probs=[-1.0], stop_reason="aborted")
    client = RecordingClient(ScriptedClient(lambda _: output), tree=SessionTree(decode=tokenizer().decode))
    asyncio.run(client.generate("r", prompt_ids=[5], sampling_params={"logprobs": True}))
    assert CaptureReport.of_calls(client.tree).num_aborted_calls == 1
