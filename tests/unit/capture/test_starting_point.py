"""Sessions that start at a node of an earlier tree: their answers, what is trained, where they leave the path."""

import math

import numpy as np
import pytest
from scripted_llm import END, ScriptedClient, call_text, log_prob, run_loop, tokenizer
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop

from rollout_hooks.capture.recording import RecordingClient
from rollout_hooks.capture.report import CaptureReport
from rollout_hooks.capture.rows import RowLimits, session_rows
from rollout_hooks.capture.session_tree import SessionTree
from rollout_hooks.capture.starting_point import StartingPoint
from rollout_hooks.loops.parallel_tools import ParallelToolsAgentLoop

LIMITS = RowLimits(prompt_length=256, response_length=256, wants_log_probs=True)
SAMPLING = {"temperature": 1.0, "logprobs": True}


def first(prompt):
    return "It is 42, I am sure." if "42" in prompt else call_text(21)


def later(prompt):
    return "no, 43" if prompt.endswith("sure") else "another answer"


def run(reply, *, start=None, asks_for_shift=False, loop=ToolAgentLoop, **rollout):
    """Run a session; return its rows, its recorder and the server."""
    server = ScriptedClient(reply)
    client = RecordingClient(server, tree=SessionTree(decode=tokenizer().decode), start=start)
    client.asks_for_shift = asks_for_shift
    output = run_loop(loop, client, SAMPLING, **rollout)
    outputs = output if isinstance(output, list) else [output]
    return session_rows(client.tree, outputs, limits=LIMITS).outputs, client, server


def point_at(text, *, is_inside):
    """Return the path of the first session up to the end of a text."""
    (row,), *_ = run(first)
    ids = row.prompt_ids + row.response_ids
    (end,) = [place for place in range(1, len(ids) + 1) if tokenizer().decode(ids[:place]).endswith(text)][:1]
    sampled = np.array([0] * len(row.prompt_ids) + row.response_mask, dtype=bool)[:end]
    log_probs = np.array([math.nan] * len(row.prompt_ids) + row.response_logprobs, dtype=np.float32)[:end]
    log_probs[~sampled] = math.nan
    return StartingPoint(np.array(ids[:end], dtype=np.int32), sampled, log_probs, is_inside)


def trained_text(row):
    kept = [token for token, bit in zip(row.response_ids, row.response_mask, strict=True) if bit]
    return tokenizer().decode(kept)


def test_a_session_goes_on_inside_a_turn() -> None:
    start = point_at("I am sure", is_inside=True)
    (row,), client, server = run(later, start=start)
    ids = row.prompt_ids + row.response_ids
    assert ids[: len(start.token_ids)] == start.token_ids.tolist()
    # The tool ran again, and the server was asked once: to go on.
    assert len(server.prompts) == 1
    assert server.prompts[0].endswith("It is 42, I am sure")
    assert trained_text(row) == "no, 43" + END
    replayed = np.flatnonzero(start.is_sampled) - len(row.prompt_ids)
    assert np.allclose(np.array(row.response_logprobs)[replayed], start.log_probs[start.is_sampled])
    assert row.response_logprobs[-1] == pytest.approx(log_prob(len(ids) - 1, ids[-1]))
    assert client.has_reached_start
    report = CaptureReport.of_calls(client.tree)
    assert report.num_replayed_tokens == len(replayed)
    assert report.num_sampled_tokens == sum(row.response_mask)


def test_a_session_goes_on_behind_a_turn() -> None:
    start = point_at("</tool_call>" + END, is_inside=False)
    (row,), client, server = run(later, start=start)
    assert len(server.prompts) == 1
    assert "42" in server.prompts[0]  # the tool's result, of now
    assert trained_text(row) == "another answer" + END
    assert client.has_reached_start


def test_another_answer_of_the_environment_leaves_the_path() -> None:
    start = point_at("I am sure", is_inside=True)
    changed = start.token_ids.copy()
    changed[np.flatnonzero(~start.is_sampled)[-5]] += 1  # what the tool said then
    point = StartingPoint(changed, start.is_sampled, start.log_probs, is_inside_a_turn=True)
    (row,), client, server = run(later, start=point)
    assert len(server.prompts) == 1
    assert trained_text(row) == "another answer" + END
    assert not client.has_reached_start


def test_the_limit_of_a_call_counts_what_is_replayed() -> None:
    start = point_at("I am sure", is_inside=True)
    server = ScriptedClient(later)
    client = RecordingClient(server, tree=SessionTree(decode=tokenizer().decode), start=start)
    run_loop(ToolAgentLoop, client, {**SAMPLING, "max_tokens": 40})
    before = np.flatnonzero(~start.is_sampled)[-1] + 1
    assert server.sampling_params[0]["max_tokens"] == 40 - (len(start.token_ids) - before)


def test_branches_of_other_places_are_sampled() -> None:
    """The conclusion of the call alone parts from the path, and has a row of its own."""
    start = point_at("</tool_call>" + END, is_inside=False)
    rows, client, server = run(later, start=start, loop=ParallelToolsAgentLoop)
    assert {trained_text(row) for row in rows} == {"another answer" + END}
    assert len(server.prompts) == len(rows) == 2
    assert client.has_reached_start


def test_the_shift_is_that_of_the_sampled_tokens() -> None:
    start = point_at("I am sure", is_inside=True)

    def reply(prompt):
        from verl.workers.rollout.replica import TokenOutput

        ids = tokenizer().encode(later(prompt) + END, add_special_tokens=False)
        values = [[value] for value in np.nan_to_num(start.log_probs[1:], nan=-9.0) + 0.25] + [[0.0]]
        fields = {"prompt_logprobs": values, "prompt_ids": [[0]] * len(values)}
        return TokenOutput(token_ids=ids, log_probs=[-1.0] * len(ids), stop_reason="completed", extra_fields=fields)

    _, client, server = run(reply, start=start, asks_for_shift=True)
    assert client.shift == pytest.approx(0.25)
    assert server.sampling_params[0]["prompt_logprobs"] == 0
    _, client, server = run(reply, start=start)
    assert client.shift is None
    assert "prompt_logprobs" not in server.sampling_params[0]


def test_the_prompt_itself_is_a_starting_point() -> None:
    empty = StartingPoint(np.zeros(0, np.int32), np.zeros(0, bool), np.zeros(0, np.float32), is_inside_a_turn=False)
    (row,), client, server = run(first, start=empty)
    assert len(server.prompts) == 2
    assert CaptureReport.of_calls(client.tree).num_replayed_tokens == 0
    assert trained_text(row).startswith("<tool_call>")
