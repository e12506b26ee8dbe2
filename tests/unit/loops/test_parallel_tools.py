"""`parallel_tools` with verl's real tools, parser and templates: who sees what, in which order, and what is a leaf."""

import re
from pathlib import Path

import pytest
from loop_cases import decode, slow_tool
from loop_cases import run as run_loop
from scripted_llm import END, call_text, tokenizer
from scripted_llm import row as dataset_row
from typing_extensions import override

from rollout_hooks.capture.call_kinds import CallKind
from rollout_hooks.capture.outputs import SessionFailed
from rollout_hooks.capture.roles import ROLE
from rollout_hooks.loops.parallel_tools import ParallelToolsAgentLoop


def results(*values):
    """Return what the chat template makes of tool messages, with the generation prompt after them."""
    return "".join(f"\n<|im_start|>user\n[{value}]{END}" for value in values) + "\n<|im_start|>assistant\n"


class Rewarded(ParallelToolsAgentLoop):
    """Rewards a conclusion that names its result, and an answer that is long; notes what the hooks were given."""

    @override
    async def branch_reward(self, *, row, call, result, conclusion):
        assert row["uid"] == "u"
        return 1.0 if result.text in conclusion else 0.0

    @override
    async def final_reward(self, *, row, answer):
        return float(len(answer))


def reply(prompt):
    """Two calls in the first turn; each conclusion names its result; the answer names both."""
    if "[6]" in prompt and "[8]" in prompt:
        return "6 and 8"
    if "[6]" in prompt:
        return "it is 6"
    if "[8]" in prompt:
        return "no idea"
    return call_text(3) + call_text(4)


def run(reply=reply, loop_class=Rewarded, **settings):
    return run_loop(loop_class, reply, **settings)


def test_every_call_has_a_branch_that_sees_only_its_own_result():
    outputs, client = run()
    turn = call_text(3) + call_text(4) + END
    assert [decode(output.response_ids) for output in outputs] == [
        turn + results(6) + "it is 6" + END,
        turn + results(8) + "no idea" + END,
        turn + results(6, 8)[: -len(results())] + results() + "6 and 8" + END,
    ]
    assert [output.leaf_reward for output in outputs] == [1.0, 0.0, 7.0]
    for output in outputs:
        trained = decode(t for t, mask in zip(output.response_ids, output.response_mask, strict=True) if mask)
        assert trained == turn + decode(output.response_ids).split("assistant\n")[-1]
        assert output.num_turns == 4
    assert client.tree.count_kinds() == {CallKind.ROOT: 1, CallKind.CONTINUATION: 1, CallKind.FORK: 2}


def test_conclusions_run_beside_the_main_branch_and_the_order_of_rows_is_that_of_the_calls():
    slow = run(delay=lambda _: 0.05)
    assert slow[1]._client.most_running == 3  # both conclusions and the answer
    slow_first = run(delay=lambda prompt: 0.05 if "[6]" in prompt and "[8]" not in prompt else 0.0)
    fast = run()
    assert [o.response_ids for o in slow_first[0]] == [o.response_ids for o in fast[0]]


def test_without_hooks_the_reward_is_left_to_verl():
    outputs, _ = run(loop_class=ParallelToolsAgentLoop)
    assert [(output.leaf_reward, output.reward_score) for output in outputs] == [(None, None)] * 3


def test_single_call_branches_if_the_loop_says_so():
    class Plain(Rewarded):
        branch_single_call = False

    def single(prompt):
        return "it is 6" if "[6]" in prompt else call_text(3)

    assert len(run(single)[0]) == 2
    (only,), client = run(single, Plain)
    assert decode(only.response_ids) == call_text(3) + END + results(6) + "it is 6" + END
    assert client.tree.count_kinds() == {CallKind.ROOT: 1, CallKind.CONTINUATION: 1}


def test_several_turns_until_an_answer_without_calls():
    def two_turns(prompt):
        if "[20]" in prompt:
            return "twenty"
        if "[10]" in prompt:
            return call_text(10)
        return call_text(5)

    class Plain(Rewarded):
        branch_single_call = False

    (output,), _ = run(two_turns, Plain)
    expected = call_text(5) + END + results(10) + call_text(10) + END + results(20) + "twenty" + END
    assert decode(output.response_ids) == expected
    assert (output.num_turns, output.leaf_reward) == (6, 6.0)
    # Branches of different turns fork at different depths.
    outputs, client = run(two_turns)
    assert len(outputs) == 3
    assert client.tree.count_kinds() == {CallKind.ROOT: 1, CallKind.CONTINUATION: 2, CallKind.FORK: 2}


@pytest.mark.parametrize("limit", [{"multi_turn__max_assistant_turns": 2}, {"multi_turn__max_user_turns": 1}])
def test_turn_limits_are_verls(limit):
    outputs, client = run(lambda _: call_text(3), **limit)
    assert decode(outputs[-1].response_ids) == call_text(3) + END + results(6) + call_text(3) + END
    assert len(client.tree.calls) == 3  # first turn, conclusion, second turn


def test_length_limit_ends_the_branches_where_verls_tool_loop_ends():
    turn = call_text(3) + call_text(4) + END
    num_tokens = len(tokenizer().encode(turn, add_special_tokens=False))
    outputs, _ = run(response_length=num_tokens + 20)
    assert [decode(output.response_ids) for output in outputs] == [turn]  # no room for any result
    assert set(outputs[0].response_mask) == {1}


def test_max_parallel_calls_is_verls():
    outputs, _ = run(multi_turn__max_parallel_calls=1)
    assert [decode(output.response_ids).count("[") for output in outputs] == [1, 1]


def test_tool_errors_are_told_to_the_model_and_lose_nothing():
    def broken(prompt):
        return "sorry" if "Error" in prompt or "Unknown" in prompt else call_text(1, "broken") + call_text(1, "nope")

    outputs, client = run(broken, row=dataset_row("fail"))
    assert len(outputs) == 3
    assert "[Error executing tool 'broken': out of order]" in decode(outputs[0].response_ids)
    assert "[Unknown function 'nope'" in decode(outputs[1].response_ids)
    assert [call.cause for call in client.tree.calls] == [None] * 4


def test_tool_selection_of_the_row():
    outputs, _ = run(lambda _: "hello", row=dataset_row(extra_info={"tool_selection": ["broken"]}))
    assert decode(outputs[0].prompt_ids).startswith(f"<|im_start|>system\nbroken {END}")
    assert [decode(output.response_ids) for output in outputs] == ["hello" + END]


def test_failed_conclusion_loses_only_its_branch():
    def failing(prompt):
        return RuntimeError("gone") if "[8]" in prompt and "[6]" not in prompt else reply(prompt)

    outputs, client = run(failing)
    assert [output.leaf_reward for output in outputs] == [1.0, 7.0]
    assert [call.cause for call in client.tree.calls].count("RuntimeError: gone") == 1


def test_failed_main_branch_fails_the_session_and_keeps_rewarded_conclusions():
    def failing(prompt):
        return RuntimeError("gone") if "[8]" in prompt and "[6]" in prompt else reply(prompt)

    with pytest.raises(SessionFailed, match="RuntimeError: gone") as raised:
        run(failing)
    assert [output.leaf_reward for output in raised.value.outputs] == [1.0, 0.0]


def test_error_in_a_hook_fails_the_session_with_its_cause():
    class Buggy(ParallelToolsAgentLoop):
        @override
        async def final_reward(self, *, row, answer):
            return 1.0 / 0.0

    with pytest.raises(SessionFailed, match="ZeroDivisionError: float division by zero"):
        run(loop_class=Buggy)


def test_a_slow_call_ends_its_conclusion_and_the_main_branch_is_told():
    def slow(prompt):
        if "[Error: tool 'slow' took longer" in prompt:
            return "one is late"
        return "it is 6" if "[6]" in prompt else call_text(3) + call_text(1, "slow")

    outputs, client = run(slow, options={"call_timeout_s": 0.5}, more_tools=[slow_tool()])
    assert [output.leaf_reward for output in outputs] == [1.0, 11.0]
    assert "[Error: tool 'slow' took longer than call_timeout_s=0.5]" in decode(outputs[-1].response_ids)
    assert len(client.tree.calls) == 3


def test_tool_errors_that_end_a_branch_end_its_conclusion_only():
    def broken(prompt):
        return "sorry" if "out of order" in prompt else call_text(1, "broken") + call_text(1, "nope")

    outputs, _ = run(broken, ParallelToolsAgentLoop, options={"tool_errors": "end"})
    assert ["Unknown function" in decode(output.response_ids) for output in outputs] == [True, True]
    assert ["out of order" in decode(output.response_ids) for output in outputs] == [False, True]


def test_converse_is_all_that_a_plain_agent_needs():
    """The agent of docs/own_loop.md, as printed: two attempts from the prompt, of which one is right."""
    text = (Path(__file__).parents[3] / "docs/own_loop.md").read_text()
    (source,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "class TwoAttempts" in block]
    scope = {}
    exec(source, scope)
    answers = iter(["six", "five"])
    fields = dataset_row(reward_model={"ground_truth": "six"})
    outputs, _ = run(
        lambda prompt: next(answers) if "[6]" in prompt else call_text(3), scope["TwoAttempts"], row=fields
    )
    said = [call_text(3) + END + results(6) + answer + END for answer in ("six", "five")]
    # Which of them asks first behind its call is chance.
    of_leaf = {decode(output.response_ids): output.leaf_reward for output in outputs}
    assert of_leaf == dict(zip(said, (1.0, 0.0), strict=True))


def test_leaves_have_roles_if_the_loop_is_told_to_name_them():
    (*others, last), _ = run(options={"leaf_roles": True})
    assert others
    assert {output.extra_fields[ROLE] for output in others} == {"tool"}
    assert last.extra_fields[ROLE] == "answer"
    outputs, _ = run()
    assert len(outputs) == 1 + len(others)
    assert all(ROLE not in output.extra_fields for output in outputs)
