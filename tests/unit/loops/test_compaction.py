"""`compaction`: when the history is summarised, what each leaf holds, and what is trained."""

import numpy as np
import pytest
from loop_cases import ASSISTANT, advantages, call, prompt, response, rewards, run, slow_tool, trained, user
from scripted_llm import END, encode
from typing_extensions import override

from rollout_hooks.capture.call_kinds import CallKind
from rollout_hooks.capture.outputs import SessionFailed
from rollout_hooks.capture.roles import ROLE
from rollout_hooks.loops.compaction import CompactionAgentLoop

OPTIONS = {"request": "Sum up.", "preface": "So far: "}
HEAD = f"<|im_start|>system\ndouble broken {END}\n<|im_start|>user\nq{END}\n"
CALLS = [call("double", x=number) for number in (1, 2, 3)]


class Rewarded(CompactionAgentLoop):
    """Half for a summary, one for the right answer."""

    async def summary_reward(self, *, row, summary, number):
        assert (summary, number, row["uid"]) == ("2 and 4", 1, "u")
        return 0.5

    @override
    async def final_reward(self, *, row, answer):
        return float(answer == "12")


def reply(text):
    """Doubles 1, 2, then (summed up or not) 3, and answers when it has seen 6."""
    if "[6]" in text:
        return "12"
    if text.endswith(f"Sum up.{END}\n{ASSISTANT}"):
        return "2 and 4"
    if "So far: 2 and 4" in text or "[4]" in text:
        return CALLS[2]
    return CALLS[1] if "[2]" in text else CALLS[0]


def result(text):
    return f"\n{user(f'[{text}]')}{ASSISTANT}"


FIRST_TURN = CALLS[0] + END + result(2)
BUDGET = len(encode(HEAD + ASSISTANT + FIRST_TURN)) + 60


def test_the_tree_its_masks_rewards_and_advantages():
    """One summary, then the answer.

    prompt ──┬── g ── double 1 ── 2 ── double 2 ── 4, sum up ── summary       leaf 1, reward .5
             └── So far: summary ── g ── double 3 ── 6 ── 12                  leaf 2, reward 1
    """
    outputs, client = run(Rewarded, reply, options={**OPTIONS, "max_context_len": BUDGET})
    asked = f"\n{user('[4]')}{user('Sum up.')}{ASSISTANT}"
    assert [prompt(output) for output in outputs] == [
        HEAD + ASSISTANT,
        HEAD + user("So far: 2 and 4") + ASSISTANT,
    ]
    assert [response(output) for output in outputs] == [
        FIRST_TURN + CALLS[1] + END + asked + "2 and 4" + END,
        CALLS[2] + END + result(6) + "12" + END,
    ]
    assert [trained(output) for output in outputs] == [
        [CALLS[0] + END, CALLS[1] + END, "2 and 4" + END],
        [CALLS[2] + END, "12" + END],
    ]
    assert rewards(outputs) == [0.5, 1.0]
    # Two leaves of one session: mean 3/4, unbiased variance 1/8.
    np.testing.assert_allclose(advantages(outputs), np.array([-1, 1]) / np.sqrt(2), rtol=1e-12)
    kinds = [recorded.kind for recorded in client.tree.calls]
    assert kinds == [CallKind.ROOT, *[CallKind.CONTINUATION] * 2, CallKind.REWRITE, CallKind.CONTINUATION]
    assert client.tree.calls[3].num_shared == len(encode(HEAD)) + 1


def test_without_need_nothing_is_summarised():
    (output,), _ = run(CompactionAgentLoop, reply, options=OPTIONS)
    expected = FIRST_TURN + CALLS[1] + END + result(4) + CALLS[2] + END + result(6) + "12" + END
    assert (response(output), output.leaf_reward) == (expected, None)


def test_several_summaries_and_the_limit_of_turns():
    outputs, _ = run(
        CompactionAgentLoop,
        lambda text: "s" if "Sum up." in text else CALLS[0],
        options={**OPTIONS, "max_context_len": 1},
        multi_turn__max_assistant_turns=3,
    )
    assert [trained(output)[-1] for output in outputs] == ["s" + END, "s" + END, CALLS[0] + END]
    assert [len(trained(output)) for output in outputs] == [2, 2, 1]


def test_length_of_a_summary():
    outputs, client = run(
        CompactionAgentLoop, reply, options={**OPTIONS, "max_context_len": BUDGET, "max_summary_len": 3}
    )
    assert trained(outputs[0])[-1] == "2 a"
    assert client._client.sampling_params[2]["max_tokens"] == 3


def test_no_room_for_a_summary_ends_the_session_at_its_last_turn():
    length = len(encode(FIRST_TURN + CALLS[1] + END)) + 20
    outputs, _ = run(CompactionAgentLoop, reply, options={**OPTIONS, "max_context_len": BUDGET}, response_length=length)
    assert [trained(output) for output in outputs] == [[CALLS[0] + END, CALLS[1] + END]]


def test_a_failed_summary_or_slow_tool_fails_the_branch_and_rewarded_leaves_stay():
    def failing(text):
        return RuntimeError("gone") if "Sum up." in text else reply(text)

    with pytest.raises(SessionFailed, match="RuntimeError: gone") as raised:
        run(Rewarded, failing, options={**OPTIONS, "max_context_len": BUDGET})
    assert raised.value.outputs == []

    def slow(text):
        return call("slow", x=1) if "So far" in text else reply(text)

    options = {**OPTIONS, "max_context_len": BUDGET, "call_timeout_s": 0.5}
    with pytest.raises(SessionFailed, match="tool 'slow' took longer") as raised:
        run(Rewarded, slow, options=options, more_tools=[slow_tool()])
    assert rewards(raised.value.outputs) == [0.5]


def test_leaves_have_roles_if_the_loop_is_told_to_name_them():
    (*others, last), _ = run(Rewarded, reply, options={**OPTIONS, "max_context_len": BUDGET, "leaf_roles": True})
    assert others
    assert {output.extra_fields[ROLE] for output in others} == {"summary"}
    assert last.extra_fields[ROLE] == "answer"
    outputs, _ = run(Rewarded, reply, options={**OPTIONS, "max_context_len": BUDGET})
    assert len(outputs) == 1 + len(others)
    assert all(ROLE not in output.extra_fields for output in outputs)
