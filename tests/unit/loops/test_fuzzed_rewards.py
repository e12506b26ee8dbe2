"""Random rewards: a row gets a number that is finite in float32, or a ValueError says what to return."""

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fuzzing import fuzzed, outcome
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("verl")

from rollout_hooks.capture.outputs import MAX_REWARD, TreeAgentLoopOutput, is_reward
from rollout_hooks.loops.blackbox import _read_result, _rewards_of_calls

LARGE = [10**39, -(10**400), 1e39, 1e308, -1e308, float("inf"), -float("inf"), float("nan")]
NUMBERS = st.one_of(st.sampled_from(LARGE), st.integers(), st.floats(), st.booleans())
OTHERS = st.sampled_from([None, "", "1", b"1", [1], {}, {"a": 1}, 1j, object(), torch.tensor([1.0, 2.0])])
ARRAYS = st.sampled_from(
    [np.float32(1.5), np.float64("inf"), np.int64(3), torch.tensor(2.0), torch.tensor(float("nan"))]
)
VALUES = NUMBERS | OTHERS | ARRAYS
LEAF_REWARDS = st.dictionaries(st.sampled_from(["a", "b"]), VALUES)
MAPPINGS = st.fixed_dictionaries(
    {}, optional={"reward": VALUES, "leaf_rewards": LEAF_REWARDS | VALUES, "acc": VALUES, 1: VALUES}
)
SESSION: Any = SimpleNamespace(calls_of_response={"a": [0], "b": [1]})


@fuzzed(80)
@given(VALUES | MAPPINGS)
@example(10**400)
@example({"reward": "x"})
@example({"reward": {"a": 1}})
@example({"leaf_rewards": [1]})
@example({"leaf_rewards": 3})
@example({"leaf_rewards": {"a": "x"}})
@example({1: 2, "reward": 1.0})
def test_what_an_agent_returns_is_read_or_refused(result: Any) -> None:
    def read() -> tuple[float | None, dict[int, float | None], dict[str, Any]]:
        reward, leaf_rewards, extra_info = _read_result(result)
        return reward, _rewards_of_calls(SESSION, leaf_rewards, last_calls=[0, 1]), extra_info

    found, refusal = outcome(read)
    if refusal is not None:
        assert refusal.startswith("the agent returned")
        assert any(remedy in refusal for remedy in ("return a number", "None leaves it to verl", "map ids"))
        return
    reward, of_calls, extra_info = found
    for each in (reward, *of_calls.values()):
        assert each is None or (type(each) is float and abs(each) <= MAX_REWARD)
    assert all(isinstance(name, str) for name in extra_info)


@fuzzed(50)
@given(NUMBERS | st.none(), st.lists(st.tuples(st.integers(-2, 5), NUMBERS), max_size=3))
@example(1e300, [])
@example(0.0, [(0, 1e39)])
def test_a_row_has_finite_rewards_or_is_refused(reward: Any, node_rewards: list[tuple[int, Any]]) -> None:
    row, refusal = outcome(
        lambda: TreeAgentLoopOutput(
            prompt_ids=[1],
            response_ids=[2, 3, 4],
            response_mask=[1, 0, 1],
            metrics={},  # pyright: ignore[reportArgumentType]
            leaf_reward=reward,
            node_rewards=tuple(node_rewards),
        ).as_dict()
    )
    if refusal is not None:
        assert "reward" in refusal
        return
    if reward is not None:
        # What exceeds float32 together is refused by the driver, which adds up the rows of everybody.
        total = float(reward) + sum(float(value) for _, value in node_rewards)
        assert row["rm_scores"].dtype == torch.float32
        assert abs(total) > MAX_REWARD / 2 or row["rm_scores"].isfinite().all()


def test_a_reward_is_a_real_number_that_float32_holds() -> None:
    for value in (
        0,
        True,
        -1.5,
        np.float32(3),
        np.int64(3),
        Fraction(1, 3),
        torch.tensor([0.5]),
        MAX_REWARD,
        -MAX_REWARD,
    ):
        assert is_reward(value)
    for value in (
        float("nan"),
        float("inf"),
        np.float16("inf"),
        np.float32("inf"),
        1e39,
        10**400,
        "1",
        None,
        1j,
        [1.0],
        torch.tensor([1.0, 2.0]),
    ):
        assert not is_reward(value)
