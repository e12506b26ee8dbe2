"""`subagents`: who sees what, what is a leaf, and the limits."""

import re

import numpy as np
import pytest
from loop_cases import ASSISTANT, advantages, call, prompt, response, rewards, run, slow_tool, trained, user
from scripted_llm import END
from typing_extensions import override

from rollout_hooks.capture.outputs import SessionFailed
from rollout_hooks.capture.roles import ROLE
from rollout_hooks.loops.subagents import SubagentsAgentLoop

OPTIONS = {"child_system_prompt": "C"}
TWO = call("spawn", task="three") + call("spawn", task="four")


class Rewarded(SubagentsAgentLoop):
    """A child earns what its task says, the first agent one for the right answer."""

    async def child_reward(self, *, row, task, answer, depth):
        assert (row["uid"], depth) == ("u", 1)
        return {"three": 0.0, "four": 0.5}[task] if answer in ("6", "8") else -1.0

    @override
    async def final_reward(self, *, row, answer):
        return float(answer == "14")


def child_head(task, tools="double broken "):
    return f"<|im_start|>system\n{tools}{END}\n<|im_start|>system\nC{END}\n{user(task)}{ASSISTANT}"


def result(*texts):
    return "\n" + "".join(user(f"[{text}]") for text in texts) + ASSISTANT


def reply(text):
    """Let the first agent spawn two children and add; each child doubles its number with the tool."""
    if "three" in text.split("system\nC")[-1] and "system\nC" in text:
        return "6" if "[6]" in text else call("double", x=3)
    if "system\nC" in text:
        return "8" if "[8]" in text else call("double", x=4)
    return "14" if "[6]" in text and "[8]" in text else TWO


def test_the_tree_its_masks_rewards_and_advantages():
    """Two children, then the answer of the first agent.

    prompt ── spawn three, spawn four ── 6, 8 ── 14                leaf 3, reward 1
    C ──┬── three ── double 3 ── 6 ── 6                            leaf 1, reward 0
        └── four ── double 4 ── 8 ── 8                             leaf 2, reward .5
    """
    outputs, client = run(Rewarded, reply, options=OPTIONS)
    root = f"<|im_start|>system\ndouble broken spawn {END}\n{user('q')}{ASSISTANT}"
    assert [prompt(output) for output in outputs] == [child_head("three"), child_head("four"), root]
    assert [response(output) for output in outputs] == [
        call("double", x=3) + END + result(6) + "6" + END,
        call("double", x=4) + END + result(8) + "8" + END,
        TWO + END + result(6, 8) + "14" + END,
    ]
    assert [trained(output) for output in outputs] == [
        [call("double", x=3) + END, "6" + END],
        [call("double", x=4) + END, "8" + END],
        [TWO + END, "14" + END],
    ]
    assert rewards(outputs) == [0.0, 0.5, 1.0]
    # Weights 1/3, mean 1/2, unbiased variance 1/4.
    np.testing.assert_allclose(advantages(outputs), [-1.0, 0.0, 1.0], atol=1e-12)
    assert len(client.tree.calls) == 6


def test_children_run_at_the_same_time_and_their_order_is_that_of_the_calls():
    def delay(text):
        return 0.05 if "three" in text and "system\nC" in text else 0.0

    slow_first, _ = run(Rewarded, reply, options=OPTIONS, delay=delay)
    fast, _ = run(Rewarded, reply, options=OPTIONS)
    assert [o.response_ids for o in slow_first] == [o.response_ids for o in fast]
    _, client = run(Rewarded, reply, options=OPTIONS, delay=lambda _: 0.02)
    assert client._client.most_running == 2


def nested(text):
    """Every agent that can spawn does: agents of depth 0 and 1 pass the task on."""
    if "[leaf]" in text:
        return "leaf"
    has_spawn = text.startswith("<|im_start|>system\ndouble broken spawn ")
    return call("spawn", task="deeper") if has_spawn else "leaf"


def test_limit_of_depth():
    outputs, _ = run(SubagentsAgentLoop, nested, options={**OPTIONS, "max_depth": 2})
    assert [prompt(output) for output in outputs[:2]] == [
        child_head("deeper", "double broken spawn "),
        child_head("deeper"),
    ]
    assert [trained(output)[-1] for output in outputs] == ["leaf" + END] * 3
    assert rewards(outputs) == [None] * 3


def test_limit_of_children():
    def greedy(text):
        if "system\nC" in text:
            return "ok"
        return "end" if "[ok]" in text else call("spawn", task="a") * 3

    outputs, _ = run(SubagentsAgentLoop, greedy, options={**OPTIONS, "max_children": 2})
    assert len(outputs) == 3
    refused = "Not done: this session may have no more than 2 subagents."
    assert response(outputs[-1]) == call("spawn", task="a") * 3 + END + result("ok", "ok", refused) + "end" + END


def test_a_child_that_fails_is_told_to_its_parent_and_no_leaf():
    def failing(text):
        if "system\nC" in text and "four" in text:
            return RuntimeError("gone")
        return "sorry" if "failed" in text else reply(text)

    outputs, client = run(Rewarded, failing, options=OPTIONS)
    assert rewards(outputs) == [0.0, 0.0]
    assert "[The subagent failed: RuntimeError: gone]" in response(outputs[-1])
    assert [recorded.cause for recorded in client.tree.calls].count("RuntimeError: gone") == 1


def test_a_slow_tool_ends_the_child_and_not_the_session():
    def slow(text):
        if "system\nC" in text:
            return call("slow", x=1)
        return "told" if "failed" in text else call("spawn", task="four")

    outputs, _ = run(SubagentsAgentLoop, slow, options={**OPTIONS, "call_timeout_s": 0.5}, more_tools=[slow_tool()])
    (output,) = outputs
    reason = re.escape("[The subagent failed: tool 'slow' took longer than call_timeout_s=0.5]")
    assert re.search(reason, response(output))
    assert trained(output)[-1] == "told" + END


def test_the_time_limit_of_a_call_does_not_cut_a_child_short():
    """Each call of a child stays below the limit, all of them together do not."""
    outputs, _ = run(Rewarded, reply, options={**OPTIONS, "call_timeout_s": 0.15}, delay=lambda _: 0.1)
    assert rewards(outputs) == [0.0, 0.5, 1.0]


def test_error_in_a_hook_of_a_child_fails_the_session_with_its_cause():
    class Buggy(SubagentsAgentLoop):
        @override
        async def child_reward(self, *, row, task, answer, depth):
            if task == "three":  # children run concurrently: of several errors any may come first
                raise KeyError(task)

    with pytest.raises(SessionFailed, match="KeyError: 'three'"):
        run(Buggy, reply, options=OPTIONS)


def test_own_tools_may_not_be_hidden_by_configured_ones():
    class Clash(SubagentsAgentLoop):
        own_schemas = (slow_tool().tool_schema.model_copy(deep=True),)

    Clash.own_schemas[0].function.name = "double"
    with pytest.raises(ValueError, match=r"tools named \['double'\]"):
        run(Clash, reply)


def test_leaves_have_roles_if_the_loop_is_told_to_name_them():
    (*others, last), _ = run(Rewarded, reply, options={**OPTIONS, "leaf_roles": True})
    assert others
    assert {output.extra_fields[ROLE] for output in others} == {"subagent"}
    assert last.extra_fields[ROLE] == "answer"
    outputs, _ = run(Rewarded, reply, options={**OPTIONS})
    assert len(outputs) == 1 + len(others)
    assert all(ROLE not in output.extra_fields for output in outputs)
