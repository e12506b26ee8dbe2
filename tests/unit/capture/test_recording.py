"""verl's own loops and awkward ones, captured: the rows are what verl would write, plus what loops leave behind."""

import asyncio

import pytest
import torch
from scripted_llm import END, ScriptedClient, call_text, log_prob, run_loop, tokenizer
from typing_extensions import override
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.rollout.replica import TokenOutput

from rollout_hooks.capture.call_kinds import CallKind
from rollout_hooks.capture.outputs import TreeAgentLoopOutput
from rollout_hooks.capture.recording import RecordingClient
from rollout_hooks.capture.rows import RowLimits, session_rows
from rollout_hooks.capture.session_tree import CallStatus, SessionTree

LIMITS = RowLimits(prompt_length=256, response_length=256, wants_log_probs=True)
SAMPLING = {"temperature": 1.0, "logprobs": True}


def recording(reply, **kwargs):
    return RecordingClient(ScriptedClient(reply, **kwargs), tree=SessionTree(decode=tokenizer().decode))


def capture(loop_class, reply, *, limits=LIMITS, sampling=SAMPLING, **rollout):
    """Run a loop as it is and through the recorder; return verl's rows, our rows and the tree."""
    plain = run_loop(loop_class, ScriptedClient(reply), sampling, **rollout)
    client = recording(reply)
    output = run_loop(loop_class, client, sampling, **rollout)
    outputs = output if isinstance(output, list) else [output]
    return (
        [o.as_dict() for o in (plain if isinstance(plain, list) else [plain])],
        session_rows(client.tree, outputs, limits=limits),
        client.tree,
    )


def text(values):
    return tokenizer().decode(list(values))


def assert_same_row(actual, expected):
    """Every field that verl writes is written, with verl's value; added are reward information and recorded calls."""
    extra = dict(actual.pop("extra_fields"))
    trained = {position for _, _, start, end, *_ in extra.pop("recorded_calls") for position in range(start, end)}
    prompt_len = len(expected["prompts"])
    assert trained == {prompt_len + place for place, is_in in enumerate(expected["response_mask"].tolist()) if is_in}
    assert extra.pop("reward_extra_info") == {}
    assert extra == expected.pop("extra_fields")
    assert actual.pop("metrics").keys() == expected.pop("metrics").keys()  # the values are seconds
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value) if isinstance(value, torch.Tensor) else actual[name] == value, name


def tool_reply(prompt):
    return "the sum is 14" if "[" in prompt else call_text(3) + call_text(4)


@pytest.mark.parametrize("response_length", [256, 8])
def test_single_turn_agent_is_captured_unchanged(response_length):
    limits = RowLimits(256, response_length, wants_log_probs=True)
    plain, rows, tree = capture(
        SingleTurnAgentLoop, lambda _: "forty-two", limits=limits, response_length=response_length
    )
    assert [call.kind for call in tree.calls] == [CallKind.ROOT]
    (output,) = rows.outputs
    assert_same_row(output.as_dict(), plain[0])
    assert (rows.num_dropped, rows.num_truncated) == (0, int(response_length == 8))


@pytest.mark.parametrize("response_length", [256, 160, 40])
def test_tool_agent_is_captured_unchanged(response_length):
    """Whole; cut in the tool's answer; cut in the first turn."""
    limits = RowLimits(256, response_length, wants_log_probs=True)
    plain, rows, tree = capture(ToolAgentLoop, tool_reply, limits=limits, response_length=response_length)
    expected = [CallKind.ROOT, CallKind.CONTINUATION] if response_length == 256 else [CallKind.ROOT]
    assert [call.kind for call in tree.calls] == expected
    (output,) = rows.outputs
    assert_same_row(output.as_dict(), plain[0])
    assert rows.num_truncated == int(response_length == 40)
    trained = [token for token, mask in zip(output.response_ids, output.response_mask, strict=True) if mask]
    turns = [call_text(3) + call_text(4) + END, "the sum is 14" + END]
    assert text(trained) == {256: turns[0] + turns[1], 160: turns[0], 40: turns[0][:40]}[response_length]


def test_captured_leaf_is_the_row_that_verls_loop_would_have_made():
    """Without the loop's own output the tree alone gives the same row."""
    plain, _, tree = capture(ToolAgentLoop, tool_reply)
    (output,) = session_rows(tree, [], limits=LIMITS).outputs
    captured = output.as_dict()
    for name in ("prompts", "responses", "response_mask", "rollout_log_probs"):
        assert torch.equal(captured[name], plain[0][name]), name
    assert captured["num_turns"] == plain[0]["num_turns"] == 4
    assert captured["extra_fields"]["min_global_steps"] == captured["extra_fields"]["max_global_steps"] == 7


def test_log_probs_are_in_the_row_if_and_only_if_sampling_asked_for_them():
    for wanted in (True, False):
        limits = RowLimits(256, 256, wants_log_probs=wanted)
        _, rows, _ = capture(ToolAgentLoop, tool_reply, limits=limits, sampling={"logprobs": wanted})
        row_dict = rows.outputs[0].as_dict()
        assert ("rollout_log_probs" in row_dict) is wanted
    limits = RowLimits(256, 256, wants_log_probs=True)
    with pytest.raises(ValueError, match="calculate_log_probs"):
        capture(ToolAgentLoop, tool_reply, limits=limits, sampling={"logprobs": False})


def row_of(prompt_ids, response_ids, mask=None, **fields):
    mask = [1] * len(response_ids) if mask is None else mask
    return AgentLoopOutput(
        prompt_ids=prompt_ids, response_ids=response_ids, response_mask=mask, metrics=AgentLoopMetrics(), **fields
    )


class LoopBase(AgentLoopBase):
    """Loops that do what users' loops do; both methods save words."""

    async def ask(self, prompt_ids, sampling_params):
        return await self.server_manager.generate("r", prompt_ids=prompt_ids, sampling_params=sampling_params)

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False)


class BestOfThree(LoopBase):
    """Samples three answers at once and returns the longest."""

    @override
    async def run(self, sampling_params, **row):
        prompt = self.encode("Q")
        answers = await asyncio.gather(*(self.ask(prompt, sampling_params) for _ in range(3)))
        best = max((answer.token_ids for answer in answers), key=len)
        return row_of(prompt, best)


def test_samples_that_a_loop_throws_away_become_leaves_before_its_own_output():
    def answers(texts):
        replies = iter(texts)
        return lambda _: next(replies)

    client = recording(answers(["first", "the longest", "last"]))
    output = run_loop(BestOfThree, client, SAMPLING)
    rows = session_rows(client.tree, [output], limits=LIMITS)
    assert [text(o.response_ids) for o in rows.outputs] == ["first" + END, "last" + END, "the longest" + END]
    assert client.tree.count_kinds() == {CallKind.ROOT: 1, CallKind.FORK: 2}
    # All rows have the same fields, so verl's one batch of them holds every field of every row.
    fields = [o.as_dict() for o in rows.outputs]
    assert fields[0].keys() == fields[1].keys() == fields[2].keys()
    batch = list_of_dict_to_tensordict(fields)
    assert batch["rollout_log_probs"][0].tolist() == pytest.approx(
        [log_prob(1 + i, token) for i, token in enumerate(rows.outputs[0].response_ids)]
    )


class Summarising(LoopBase):
    """Rewrites the prompt and carries the first turn along."""

    @override
    async def run(self, sampling_params, **row):
        first = await self.ask(self.encode("Q: question"), sampling_params)
        summary = self.encode("Q: summary " + self.tokenizer.decode(first.token_ids) + "go on:")
        second = await self.ask(summary, sampling_params)
        return row_of(summary[:3], summary[3:] + second.token_ids)


def test_rewritten_copy_is_not_trained_and_the_original_is():
    _, rows, tree = capture(Summarising, lambda prompt: "done" if "go on" in prompt else "blah blah")
    assert [call.kind for call in tree.calls] == [CallKind.ROOT, CallKind.REWRITE]
    original, final = rows.outputs
    assert (text(original.response_ids), original.response_mask) == ("blah blah" + END, [1] * 10)
    trained = [token for token, mask in zip(final.response_ids, final.response_mask, strict=True) if mask]
    assert text(trained) == "done" + END  # the loop claimed all of the response, summary included


def test_prompt_longer_than_the_limit_keeps_its_tokens_untrained_in_the_response():
    tree = SessionTree()
    tree.complete(tree.begin(range(1, 11)), [50, 51], log_probs=[-1.0, -2.0])
    (output,) = session_rows(tree, [], limits=RowLimits(4, 7, wants_log_probs=True)).outputs
    assert (output.prompt_ids, output.response_ids) == ([1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 50])
    assert (output.response_mask, output.response_logprobs) == ([0] * 6 + [1], [0.0] * 6 + [-1.0])


def test_leaves_without_a_trained_token_are_dropped_and_counted():
    tree = SessionTree()
    tree.complete(tree.begin(range(1, 11)), [50], log_probs=[-1.0])
    rows = session_rows(tree, [], limits=RowLimits(4, 6, wants_log_probs=True))  # the generated token is cut off
    assert (rows.outputs, rows.num_dropped, rows.num_truncated) == ([], 1, 0)
    rows = session_rows(SessionTree(), [row_of([1], [])], limits=LIMITS)
    assert (rows.outputs, rows.num_dropped) == ([], 1)


def test_a_row_that_reads_what_was_sampled_there_does_not_stand_for_the_sample():
    """The loop cuts the last token off and reads the same token as text."""
    tree = SessionTree()
    tree.complete(tree.begin([1, 2]), [5, 6], log_probs=[-0.5, -0.6])
    fields = {"prompt_ids": [1, 2], "response_ids": [5, 6, 3], "response_mask": [1, 0, 0], "metrics": {}}
    rows = session_rows(tree, [TreeAgentLoopOutput(**fields)], limits=LIMITS)
    assert [row.response_mask for row in rows.outputs] == [[1, 0, 0]]
    assert [stretch[:4] for stretch in rows.outputs[0].extra_fields["recorded_calls"]] == [(0, "root", 2, 3)]
    assert rows.num_dropped == 1


def test_a_sample_that_the_loops_own_row_shows_as_text_is_a_row():
    """Its own row goes on from a history that shows the answer without the thinking, which is sampled afterwards."""
    tree = SessionTree()
    tree.complete(tree.begin([1, 2, 5, 6, 3]), [4], log_probs=[-0.4])
    tree.complete(tree.begin([1, 2]), [5, 6], log_probs=[-0.5, -0.6])
    rows = session_rows(tree, [row_of([1, 2], [5, 6, 3, 4], [0, 0, 0, 1])], limits=LIMITS)
    assert [(row.response_ids, row.response_mask) for row in rows.outputs] == [
        ([5, 6], [1, 1]),
        ([5, 6, 3, 4], [0, 0, 0, 1]),
    ]
    assert rows.num_dropped == 0


def test_a_leaf_beyond_the_limits_is_dropped_though_another_row_begins_like_it():
    tree = SessionTree()
    tree.complete(tree.begin([1, 2, 3, 4, 5, 6]), [7], log_probs=[-0.7])
    tree.complete(tree.begin([1, 2, 3, 4]), [8, 9], log_probs=[-0.8, -0.9])
    rows = session_rows(tree, [row_of([1, 2, 3, 4], [8, 9])], limits=RowLimits(2, 2, wants_log_probs=True))
    assert ([row.response_ids for row in rows.outputs], rows.num_dropped) == ([[8, 9]], 1)


@pytest.mark.parametrize("response", [[], [9]])
def test_a_row_without_a_trained_token_does_not_stand_for_what_its_prompt_shows(response):
    """The last call of the loop gave nothing; what it sampled before is in the prompt of the loop's row."""
    tree = SessionTree()
    tree.complete(tree.begin([1, 2]), [5, 6], log_probs=[-0.5, -0.6])
    rows = session_rows(tree, [row_of([1, 2, 5, 6, 3], response)], limits=LIMITS)
    assert ([row.response_ids for row in rows.outputs], rows.num_dropped) == ([[5, 6]], 1)


def test_the_calls_of_a_row_are_looked_up_once_each(monkeypatch):
    """A session of many turns, each sampled twice, must not copy the list of its calls for each call of each leaf."""
    tree, prompt = SessionTree(), [1, 2]
    for _ in range(30):
        for token in (3, 7):
            tree.complete(tree.begin(prompt), [token, 4], log_probs=[-1.0, -1.0])
        prompt = [*prompt, 3, 4, 9]
    copies, calls = [], tree.calls
    monkeypatch.setattr(SessionTree, "calls", property(lambda _: copies.append(1) or calls))
    assert len(session_rows(tree, [], limits=LIMITS).outputs) == 31
    assert len(copies) <= 1


class TwoOutputs(LoopBase):
    """A multi-output loop of verl's kind, with a reward of its own for each output."""

    @override
    async def run(self, sampling_params, **row):
        prompt = self.encode("Q")
        first = await self.ask(prompt, sampling_params)
        second = await self.ask(prompt + first.token_ids + self.encode("more"), sampling_params)
        end = len(first.token_ids)
        return [
            row_of(prompt, first.token_ids, reward_score=0.25),
            row_of(
                prompt,
                first.token_ids + self.encode("more") + second.token_ids,
                [1] * end + [0] * 4 + [1] * len(second.token_ids),
                reward_score=1.0,
            ),
        ]


def test_multi_output_loops_keep_their_outputs_in_their_order_and_their_rewards():
    _, rows, _ = capture(TwoOutputs, lambda prompt: "b" if "more" in prompt else "a")
    assert [text(o.response_ids) for o in rows.outputs] == ["a" + END, "a" + END + "more" + "b" + END]
    for output in rows.outputs[:-1]:  # what verl's worker does to all but the last output
        output.reward_score = rows.outputs[-1].reward_score
    assert [float(o.as_dict()["rm_scores"].sum()) for o in rows.outputs] == [0.25, 1.0]


def test_outputs_without_any_recorded_call_are_left_alone():
    output = row_of([1], [2, 3], num_turns=2)
    rows = session_rows(SessionTree(), [output], limits=RowLimits(8, 8, wants_log_probs=False))
    assert (rows.outputs[0].response_mask, rows.outputs[0].num_turns) == ([1, 1], 2)
    assert isinstance(rows.outputs[0], TreeAgentLoopOutput)


def test_client_hands_arguments_results_and_errors_through():
    seen = {}

    class Inner(ScriptedClient):
        async def generate(self, request_id, **kwargs):
            seen.update(kwargs, request_id=request_id)
            return await super().generate(request_id, **kwargs)

    client = RecordingClient(Inner(lambda _: "x"), tree=SessionTree())
    assert client.config is client._client.config
    arguments = {"prompt_ids": [5, 6], "sampling_params": {"logprobs": False}, "priority": 3, "image_data": None}
    output = asyncio.run(client.generate("r1", **arguments))
    assert seen == {**arguments, "request_id": "r1"}
    assert (text(output.token_ids), output.log_probs) == ("x" + END, None)


def test_failed_aborted_and_cancelled_calls_keep_their_reason():
    error = RuntimeError("no server left")
    replies = {
        "a": error,
        "b": TokenOutput(token_ids=[9], log_probs=[-1.0], stop_reason="aborted"),
        "c": TokenOutput(token_ids=[], stop_reason="abort"),
    }
    client = recording(lambda prompt: replies.get(prompt, "late"), delay=lambda prompt: 30.0 * (prompt == "d"))

    async def calls():
        def ask(prompt):
            ids = tokenizer().encode(prompt, add_special_tokens=False)
            return client.generate("r", prompt_ids=ids, sampling_params={})

        with pytest.raises(RuntimeError) as raised:
            await ask("a")
        assert raised.value is error
        await ask("b")
        await ask("c")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask("d"), timeout=0.01)

    asyncio.run(calls())
    assert [(call.status, call.cause) for call in client.tree.calls] == [
        (CallStatus.FAILED, "RuntimeError: no server left"),
        (CallStatus.ABORTED, "aborted after 1 tokens"),
        (CallStatus.ABORTED, "aborted after 0 tokens"),
        (CallStatus.FAILED, "cancelled"),
    ]
    assert len(client.tree.leaves()) == 1
