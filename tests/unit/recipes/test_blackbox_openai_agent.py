"""The recipe blackbox_openai_agent: the openai agent behind a real gateway; the model is scripted."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from loop_cases import call, rewards, trained
from recipe_cases import ANSWER, BOTH_CALLS, LAST_CALL, ROOT, instead, loop_of, play, right, task_tools
from scripted_llm import END

from recipes.blackbox_openai_agent.session import MEMORY_VARIABLE

pytestmark = pytest.mark.timeout(120)

OPENAI_AGENT = loop_of("blackbox_openai_agent", "openai_agent")


@pytest.fixture(autouse=True)
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the tools; their memory is named in the environment, as the recipe's configuration does."""
    monkeypatch.setenv(MEMORY_VARIABLE, str(tmp_path / "memory.sqlite"))
    return task_tools(tmp_path)


def test_the_agent_makes_the_tree_of_the_branching_loop(tools: Any) -> None:
    """Tokens, masks, log-probs and rewards; the picture is in the recipe's README."""
    rows, scripted = play(OPENAI_AGENT, right)
    assert [trained(each) for each in rows] == [
        [BOTH_CALLS + END, "Partial result: 107" + END],
        [BOTH_CALLS + END, "Partial result: 53" + END],
        [BOTH_CALLS + END, LAST_CALL + END, ANSWER + END],
    ]
    assert rewards(rows) == [1.0, 1.0, 1.0]
    assert len(scripted.prompts) == 5
    expected, _ = play(loop_of("arithmetic_tools", "arithmetic_tools"), right, tools=tools)
    for name in ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "leaf_reward"):
        assert [getattr(each, name) for each in rows] == [getattr(each, name) for each in expected], name


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (instead("Partial result: 53", "Partial result: 35"), [1.0, 0.0, 1.0]),
        (instead(ANSWER, "<answer>36 107</answer>"), [0.0, 0.0, 0.0]),
        (instead("Partial result: 53", LAST_CALL), [1.0, 0.0, 1.0]),
        # The same call twice, concluded in the same words: two samples, two leaves.
        (instead(BOTH_CALLS, BOTH_CALLS + call("lookup", key="k41")), [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_rewards_of_leaves(reply: Any, expected: list[float]) -> None:
    rows, _ = play(OPENAI_AGENT, reply)
    assert rewards(rows) == expected


def test_a_single_call_has_no_conclusion_and_wrong_calls_are_told() -> None:
    wrong = call("divide", x=1)
    script = iter([wrong, call("lookup", key="k99"), ANSWER])
    rows, scripted = play(OPENAI_AGENT, lambda _: next(script))
    assert [trained(each) for each in rows] == [[wrong + END, call("lookup", key="k99") + END, ANSWER + END]]
    assert "[error: there is no tool divide]" in scripted.prompts[1]
    assert "[error: nothing is stored under this key]" in scripted.prompts[2]
    assert rewards(rows) == [1.0]


def test_sessions_that_do_not_answer_lose_their_reward_and_stay() -> None:
    """Turns are used up; the context is full."""
    rows, scripted = play(OPENAI_AGENT, lambda _: LAST_CALL)
    assert len(scripted.prompts) == 4
    assert rewards(rows) == [0.0]
    prompt_len = len(rows[0].prompt_ids)
    room = len(BOTH_CALLS) + 5
    rows, _ = play(OPENAI_AGENT, right, prompt_length=prompt_len, response_length=room)
    assert [trained(each) for each in rows] == [[BOTH_CALLS + END]]
    assert rewards(rows) == [0.0]


def test_the_agent_needs_nothing_but_the_openai_client() -> None:
    code = "import sys, recipes.blackbox_openai_agent.agent; print({'verl', 'torch', 'ray', 'vllm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
