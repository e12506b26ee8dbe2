"""Rewards that tools return: which rows report them, and which turns get them with `tool_rewards="add"`."""

import math

import pytest
from branch_reward_cases import encode, scores, session, written
from loop_cases import call, response, run
from scripted_llm import row as dataset_row
from typing_extensions import override
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema

from rollout_hooks.capture.outputs import SessionFailed
from rollout_hooks.loops.compaction import CompactionAgentLoop
from rollout_hooks.loops.memory import MemoryAgentLoop
from rollout_hooks.loops.parallel_tools import ParallelToolsAgentLoop
from rollout_hooks.loops.subagents import SubagentsAgentLoop
from rollout_hooks.loops.tool_turns import ToolTurnsLoop
from rollout_hooks.loops.tree_search import TreeSearchAgentLoop


def graded(reward=None):
    """Make a tool whose reward is its argument, or the given one."""
    parameters = {"type": "object", "properties": {"x": {"type": "number", "description": "X."}}, "required": ["x"]}
    function = {"name": "graded", "description": "Grade.", "parameters": parameters}
    schema = OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})
    return FunctionTool("graded", lambda x: (f"<{x}>", x if reward is None else reward), schema, is_async=False)


def reported(outputs):
    return [output.extra_fields["tool_rewards"] for output in outputs]


def on_turns(outputs):
    """Rewards of nodes, each with the number of response tokens up to its token."""
    return [[(position + 1, value) for position, value in output.node_rewards] for output in outputs]


def run_graded(loop_class, reply, *, tool=None, options=None, **rollout):
    return run(loop_class, reply, options=options, more_tools=[tool or graded()], **rollout)[0]


TURN = call("graded", x=0.5) + call("graded", x=0.25)
TURN_LEN = len(encode(TURN)) + 1  # and its end token


def two_calls(prompt):
    """Two calls, then one more behind both results, then an answer."""
    if "<0.5>" in prompt and "<0.25>" in prompt and "<2>" not in prompt:
        return call("graded", x=2)
    return "done" if "<0.5>" in prompt or "<0.25>" in prompt else TURN


@pytest.mark.parametrize("tool_rewards", ["report", "add"])
def test_a_row_has_the_rewards_of_the_calls_whose_results_it_read(tool_rewards):
    """Two conclusions in the first turn and one in the second; the last row has all results.

    prompt ── calls .5 and .25 ──┬── .5 ── done
                                 ├── .25 ── done
                                 └── .5, .25 ── call 2 ──┬── 2 ── done
                                                         └── 2 ── done   (the last row)
    """
    outputs = run_graded(ParallelToolsAgentLoop, two_calls, options={"tool_rewards": tool_rewards})
    assert reported(outputs) == [[0.5], [0.25], [0.5, 0.25, 2], [0.5, 0.25, 2]]
    if tool_rewards == "report":
        assert on_turns(outputs) == [[], [], [], []]
        return
    second = len(encode(response(outputs[2]).partition("done")[0].rpartition("<|im_end|>\n<|im_start|>user")[0])) + 1
    assert on_turns(outputs) == [
        [(TURN_LEN, 0.5)],
        [(TURN_LEN, 0.25)],
        [(TURN_LEN, 0.5), (TURN_LEN, 0.25), (second, 2)],
        [(TURN_LEN, 0.5), (TURN_LEN, 0.25), (second, 2)],
    ]


def test_expansions_of_a_tree_search_have_and_are_scored_with_the_rewards_of_the_calls_before_their_place():
    answers, seen = iter("012"), []

    def reply(prompt):
        return next(answers) if "<0.5>" in prompt else call("graded", x=0.5)

    class Scored(TreeSearchAgentLoop):
        @override
        async def leaf_reward(self, *, row, answer):
            seen.append(row["extra_info"]["tool_rewards"])
            return 0.0

    outputs = run_graded(Scored, reply, options={"tool_rewards": "add"})
    assert reported(outputs) == seen == [[0.5]] * 3
    turn_len = len(encode(call("graded", x=0.5))) + 1
    assert on_turns(outputs) == [[(turn_len, 0.5)]] * 3


def test_a_new_context_keeps_what_was_done_and_not_what_lay_on_its_tokens():
    """`memory`: the turn's leaf has its call's reward, the last leaf reports it without having the turn."""

    def reply(prompt):
        return "done" if "<0.5>" in prompt else call("graded", x=0.5)

    outputs = run_graded(MemoryAgentLoop, reply, options={"tool_rewards": "add"})
    assert reported(outputs) == [[0.5], [0.5]]
    assert on_turns(outputs) == [[(len(encode(call("graded", x=0.5))) + 1, 0.5)], []]


def test_a_summary_reports_the_calls_that_it_sums_up():
    def reply(prompt):
        if "Summarise" in prompt.rpartition("user\n")[2]:
            return "half"
        return "done" if "half" in prompt else call("graded", x=0.5)

    options = {"max_context_len": len(encode(call("graded", x=0.5))) + 60, "request": "Summarise"}
    outputs = run_graded(CompactionAgentLoop, reply, options=options)
    assert len(outputs) == 2
    assert reported(outputs) == [[0.5], [0.5]]


def test_a_child_has_the_rewards_of_its_own_calls():
    """The parent's call came before the spawn; the child makes one of its own."""

    def reply(prompt):
        if "subtask" in prompt and "root" not in prompt:
            return "answer" if "<0.25>" in prompt else call("graded", x=0.25)
        if "answer" in prompt:
            return "done"
        return call("spawn", task="subtask") if "<0.5>" in prompt else call("graded", x=0.5)

    outputs = run_graded(SubagentsAgentLoop, reply, row=dataset_row("root"))
    assert reported(outputs) == [[0.25], [0.5, 0.0]]


def test_a_turn_with_a_failing_call_keeps_the_rewards_of_the_others():
    class Kept(ToolTurnsLoop):
        async def run_branches(self, root, **row):
            await self.converse(root, row["raw_prompt"], tools=self.row_tools(row), row=row)
            assert "out of order" in root.failure
            root.finish(0.0)

    turn = call("graded", x=0.5) + call("broken", x=1)
    assert reported(run_graded(Kept, lambda _: turn, options={"tool_errors": "end"})) == [[0.5, 0.0]]


def test_unknown_tools_and_tools_without_a_reward_are_verls_zero():
    def reply(prompt):
        return "done" if "Unknown" in prompt else call("nope", x=1) + call("double", x=1)

    class Single(ParallelToolsAgentLoop):
        branch_single_call = False

    assert reported(run_graded(Single, reply))[-1] == [0.0, 0.0]


async def test_rewind_drops_the_tool_rewards_behind_it_and_forks_have_those_before():
    running = session("ab", "cd", "e", "f")
    root = running.root
    await root.generate()
    behind_first = root.position
    root.add_tool_reward(1.0)
    root.observe(encode("T"))
    await root.generate()
    (before,) = root.fork()
    root.add_tool_reward(2.0)
    (after,) = root.fork()
    root.rewind(behind_first + 1)  # the result of the first call stays
    assert root.tool_rewards == (1.0,)
    root.rewind(behind_first)  # its turn stays
    assert root.tool_rewards == (1.0,)
    root.rewind(behind_first - 1)  # the end of its turn goes
    assert root.tool_rewards == ()
    root.fail("only the forks are rows")
    await before.generate()
    await after.generate()
    before.finish(0.0)
    after.finish(0.0)
    assert [row["extra_fields"]["tool_rewards"] for row in written(running)] == [[1.0], [1.0, 2.0]]
    assert scores(running) == {"abTcde": [0.0] * 6, "abTcdf": [0.0] * 6}


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused_where_it_would_be_trained_on(reward):
    def reply(prompt):
        return "done" if "<1>" in prompt else call("graded", x=1)

    with pytest.raises(SessionFailed, match=rf"reward of tool 'graded' with tool_rewards=add: add_reward\({reward}\)"):
        run_graded(ParallelToolsAgentLoop, reply, tool=graded(reward), options={"tool_rewards": "add"})
