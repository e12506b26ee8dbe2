"""The recipe arithmetic_tools: a branch earns what its session earns, if it concluded rightly."""

from pathlib import Path
from typing import Any

import pytest
from loop_cases import rewards
from recipe_cases import ANSWER, BOTH_CALLS, instead, loop_of, play, right, task_tools
from scripted_llm import call_text


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (right, [1.0, 1.0, 1.0]),
        (instead("Partial result: 53", "Partial result: 35"), [1.0, 0.0, 1.0]),
        (instead(ANSWER, "<answer>36 107</answer>"), [0.0, 0.0, 0.0]),
        (instead(BOTH_CALLS, ANSWER), [1.0]),
        (instead(BOTH_CALLS, call_text(1, name="lookup")), [0.0]),
    ],
)
def test_rewards_of_leaves(reply: Any, expected: list[float], tmp_path: Path) -> None:
    rows, _ = play(loop_of("arithmetic_tools", "arithmetic_tools"), reply, tools=task_tools(tmp_path))
    assert rewards(rows) == expected
    assert [row.as_dict()["rm_scores"].sum() for row in rows] == expected
