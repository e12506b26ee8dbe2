"""`RecordingAsyncLLM` with vLLM's own parameters and outputs; only the engine behind them is scripted."""

import asyncio
from contextlib import aclosing

import pytest
from vllm import RequestOutput, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind

from rollout_hooks.capture.async_llm import RecordingAsyncLLM
from rollout_hooks.capture.call_kinds import CallKind
from rollout_hooks.capture.recorded import LeftOut
from rollout_hooks.capture.session_tree import CallStatus, SessionTree

KINDS = list(RequestOutputKind)


def log_prob(index: int, position: int) -> float:
    return -(1 + index) - position / 10


class ScriptedEngine:
    """Yields what `AsyncLLM.generate` would yield for given outputs, two tokens at a time.

    Args:
        outputs: Tokens of each sample.
        fails_after: Chunks after which the engine fails; None if it does not.
        finish_reason: Of every sample.
    """

    def __init__(self, *outputs, fails_after=None, finish_reason="stop"):
        self.outputs, self.fails_after, self.finish_reason = outputs, fails_after, finish_reason
        self.prompts, self.params, self.kwargs = [], [], []
        self.was_closed, self.num_given = False, 0

    async def generate(self, prompt, sampling_params, request_id, **kwargs):
        self.prompts.append(prompt)
        self.params.append(sampling_params)
        self.kwargs.append(kwargs)
        num_chunks = 0
        try:
            for end in range(2, max(map(len, self.outputs)) + 2, 2):
                await asyncio.sleep(0)
                if num_chunks == self.fails_after:
                    raise RuntimeError("engine is dead")
                for index, token_ids in enumerate(self.outputs):
                    is_last = end >= len(token_ids)
                    kind = sampling_params.output_kind
                    if end - 2 >= len(token_ids) or (kind is RequestOutputKind.FINAL_ONLY and not is_last):
                        continue
                    self.num_given += 1
                    start = end - 2 if kind is RequestOutputKind.DELTA else 0
                    yield self.output(request_id, index, start, token_ids[start:end], is_last, prompt)
                num_chunks += 1
        finally:
            self.was_closed = True

    def output(self, request_id, index, start, token_ids, is_last, prompt):
        values = [{token: Logprob(log_prob(index, start + i))} for i, token in enumerate(token_ids)]
        completion = CompletionOutput(
            index=index,
            text="",
            token_ids=token_ids,
            cumulative_logprob=None,
            logprobs=values,
            finish_reason=self.finish_reason if is_last else None,
        )
        return RequestOutput(request_id, None, prompt["prompt_token_ids"], None, [completion], finished=is_last)


async def collect(llm, prompt, params, **kwargs):
    return [output async for output in llm.generate(prompt, params, "r", **kwargs)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_output_is_recorded_alike(kind):
    engine = ScriptedEngine([7, 8, 9])
    llm = RecordingAsyncLLM(engine)
    outputs = asyncio.run(collect(llm, [1, 2], SamplingParams(output_kind=kind), priority=3))
    assert len(outputs) == (1 if kind is RequestOutputKind.FINAL_ONLY else 2)
    assert engine.kwargs == [{"priority": 3}]
    assert engine.prompts[0]["prompt_token_ids"] == [1, 2]
    (leaf,) = llm.tree.leaves()
    assert (leaf.token_ids.tolist(), leaf.source.tolist()) == ([1, 2, 7, 8, 9], [-1, -1, 0, 0, 0])
    assert leaf.log_probs.tolist() == [0.0, 0.0, -1.0, -1.1, -1.2]
    (call,) = llm.tree.calls
    assert (call.status, call.stop_reason) == (CallStatus.COMPLETED, "stop")


def test_log_probs_are_asked_for_without_touching_the_callers_parameters():
    engine = ScriptedEngine([7])
    params = SamplingParams()
    asyncio.run(collect(RecordingAsyncLLM(engine), [1], params))
    assert (params.logprobs, engine.params[0].logprobs) == (None, 0)
    asked = SamplingParams(logprobs=5)
    asyncio.run(collect(RecordingAsyncLLM(engine), [1], asked))
    assert engine.params[1] is asked


@pytest.mark.parametrize("kind", KINDS)
def test_n_samples_are_n_calls(kind):
    llm = RecordingAsyncLLM(ScriptedEngine([7, 8, 9], [6]))
    asyncio.run(collect(llm, TokensPrompt(prompt_token_ids=[1, 2]), SamplingParams(n=2, output_kind=kind)))
    assert [call.kind for call in llm.tree.calls] == [CallKind.ROOT, CallKind.FORK]
    assert [leaf.token_ids.tolist() for leaf in llm.tree.leaves()] == [[1, 2, 7, 8, 9], [1, 2, 6]]
    assert [leaf.log_probs[-1] for leaf in llm.tree.leaves()] == [-1.2, -2.0]


async def test_a_call_has_ended_when_its_last_output_arrives():
    """So the next call may be made from within the loop and goes on from it."""
    llm = RecordingAsyncLLM(ScriptedEngine([7, 8]))
    async for output in llm.generate([1], SamplingParams(), "r"):
        if output.finished:
            await collect(llm, [1, 7, 8, 3], SamplingParams())
    assert [call.kind for call in llm.tree.calls] == [CallKind.ROOT, CallKind.CONTINUATION]


async def test_a_prompt_that_has_drifted_is_healed_on_its_way():
    """Token 9 reads like the tokens 7 and 8, which the model sampled."""
    text = {1: "Q", 7: "a", 8: "b", 9: "ab", 3: "u"}
    engine = ScriptedEngine([7, 8])
    tree = SessionTree(decode=lambda token_ids: "".join(text[token] for token in token_ids))
    llm = RecordingAsyncLLM(engine, new_tree=lambda: tree)
    await collect(llm, [1], SamplingParams())
    await collect(llm, {"prompt_token_ids": [1, 9, 3]}, SamplingParams())
    assert engine.prompts[1]["prompt_token_ids"] == [1, 7, 8, 3]
    (leaf,) = llm.tree.leaves()
    assert (leaf.token_ids.tolist(), leaf.source.tolist()) == ([1, 7, 8, 3, 7, 8], [-1, 0, 0, -1, 1, 1])


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
async def test_a_call_that_is_closed_early_keeps_its_tokens(kind):
    engine = ScriptedEngine([7, 8, 9, 10])
    llm = RecordingAsyncLLM(engine)
    async with aclosing(llm.generate([1], SamplingParams(output_kind=kind), "r")) as outputs:
        async for _ in outputs:
            break
    assert engine.was_closed
    (call,) = llm.tree.calls
    assert (call.status, call.num_output, call.stop_reason) == (CallStatus.ABORTED, 2, "cancelled")
    (leaf,) = llm.tree.leaves()
    assert (leaf.token_ids.tolist(), leaf.log_probs.tolist()) == ([1, 7, 8], [0.0, -1.0, -1.1])


async def test_a_call_that_is_cancelled_gave_its_caller_no_answer():
    llm = RecordingAsyncLLM(ScriptedEngine([7, 8, 9, 10]))
    asked = asyncio.create_task(collect(llm, [1], SamplingParams()))
    while not llm.engine.num_given:
        await asyncio.sleep(0)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    assert [(call.status, call.num_output) for call in llm.tree.calls] == [(CallStatus.ABORTED, 2)]
    assert llm.tree.leaves() == []
    assert [reason for _, reason in llm.tree.left_out_leaves()] == [LeftOut.ABANDONED]


def test_failures_are_recorded_with_their_cause_and_raised():
    for fails_after, status, num_output in ((0, CallStatus.FAILED, 0), (1, CallStatus.ABORTED, 2)):
        llm = RecordingAsyncLLM(ScriptedEngine([7, 8, 9], fails_after=fails_after))
        with pytest.raises(RuntimeError, match="engine is dead"):
            asyncio.run(collect(llm, [1], SamplingParams()))
        (call,) = llm.tree.calls
        assert (call.status, call.num_output) == (status, num_output)
        assert "RuntimeError: engine is dead" in (call.cause, call.stop_reason)
        assert llm.tree.leaves() == []
        assert [reason for _, reason in llm.tree.left_out_leaves()] == [LeftOut.ABANDONED] * (num_output > 0)


@pytest.mark.parametrize("is_left", [False, True])
def test_every_sample_ends_if_the_tokens_of_one_cannot_be_recorded(is_left):
    engine = ScriptedEngine([7, 8], [-1, 9, 9], [6, 6, 6])
    llm = RecordingAsyncLLM(engine)

    async def ask():
        async with aclosing(llm.generate([1], SamplingParams(n=3), "r")) as outputs:
            async for output in outputs:
                if is_left and output.outputs[0].index == 2:
                    break

    with pytest.raises(ValueError, match="at least 0"):
        asyncio.run(ask())
    statuses = [call.status for call in llm.tree.calls]
    assert statuses == [CallStatus.COMPLETED, CallStatus.FAILED, CallStatus.ABORTED]
    assert [leaf.token_ids.tolist() for leaf in llm.tree.leaves()] == [[1, 7, 8], [1, 6, 6]] if is_left else True


def test_an_engines_abort_is_an_aborted_call():
    llm = RecordingAsyncLLM(ScriptedEngine([7, 8], finish_reason="abort"))
    asyncio.run(collect(llm, [1], SamplingParams()))
    assert [(call.status, call.num_output) for call in llm.tree.calls] == [(CallStatus.ABORTED, 2)]


async def test_sessions_have_trees_of_their_own():
    llm = RecordingAsyncLLM(ScriptedEngine([7]))
    one, other = llm.session("a"), llm.session("b")
    assert llm.session("a") is one
    assert one.engine is other.engine
    await asyncio.gather(collect(one, [1], SamplingParams()), collect(other, [2], SamplingParams()))
    assert [session.tree.leaves()[0].token_ids.tolist() for session in (one, other)] == [[1, 7], [2, 7]]
    assert not llm.tree.calls
    llm.close_session("a")
    assert llm.session("a") is not one


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("text", "is text"),
        ({"prompt": "text"}, "give prompt_token_ids"),
        ({"prompt_token_ids": [1], "multi_modal_data": {"image": 1}}, "nothing beside them"),
    ],
)
def test_prompts_that_are_not_tokens_are_refused(prompt, message):
    llm = RecordingAsyncLLM(ScriptedEngine([7]))
    with pytest.raises(ValueError, match=message):
        asyncio.run(collect(llm, prompt, SamplingParams()))
    assert not llm.tree.calls
