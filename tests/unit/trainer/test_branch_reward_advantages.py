"""What estimators make of rewards of nodes: the drawn session of `branch_reward_cases`, every number by hand."""

import asyncio

import numpy as np
import pytest
import torch
from advantage_cases import rows_of
from branch_reward_cases import decode, drawn_rows, encode, session, written
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from verl_tree.trainer.advantages import ESTIMATORS, announce_rows
from verl_tree.trainer.rows.calls import calls_of_row


def padded(rows, name):
    values = [row[name].double() for row in rows]
    return torch.nn.utils.rnn.pad_sequence(values, batch_first=True)


def is_trained(row):
    return torch.cat([torch.zeros_like(row["prompts"]), row["response_mask"]]).bool().numpy()


def estimate(name, rows_by_key):
    """Advantages by the letter of each leaf's trained tokens, not divided by a standard deviation."""
    rows = list(rows_by_key.values())
    announced = rows_of(
        keys=list(rows_by_key),
        sequences=[torch.cat([row["prompts"], row["responses"]]).numpy() for row in rows],
        response_lens=[len(row["responses"]) for row in rows],
        calls=[calls_of_row(row["extra_fields"], is_trained=is_trained(row)) for row in rows],
    )
    with announce_rows(announced):
        advantages, _ = ESTIMATORS[name](
            token_level_rewards=padded(rows, "rm_scores"),
            response_mask=padded(rows, "response_mask"),
            config={"norm_adv_by_std_in_grpo": False},
        )
    return {
        key: {
            letter: advantages[number, place].item()
            for place, letter in enumerate(decode(row["responses"]))
            if row["response_mask"][place]
        }
        for number, (key, row) in enumerate(rows_by_key.items())
    }


def of_turns(a, b, c, d):
    """Name the expected advantages: `a` as (on the way to b, on the way to c)."""
    return {
        "u_0_0": pytest.approx({"a": a[0], "A": a[0], "b": b, "B": b}),
        "u_0_1": pytest.approx({"a": a[1], "A": a[1], "c": c}),
        "u_1_0": pytest.approx({"d": d}),
    }


# Rewards 3, 0, 3. Sessions: 3/2 and 3, their mean 9/4. Group: 3 leaves, mean 2; below a: 2 leaves, mean 3/2.
BY_HAND = {
    "tree_grpo": of_turns(a=(3 / 4, -9 / 4), b=3 / 4, c=-9 / 4, d=3 / 4),
    # plus -+3/2 in session 0
    "tree_grpo_intra": of_turns(a=(9 / 4, -15 / 4), b=9 / 4, c=-15 / 4, d=3 / 4),
    # a: 2 (3/2 - 2) / (2 sqrt 2); b: (1 + 3/2) / 2; c: (-2 - 3/2) / 2; d: 2 (3 - 2) / 2
    "treerl": of_turns(a=(-1 / 2 / 2**0.5,) * 2, b=5 / 4, c=-7 / 4, d=1.0),
    # above b and c: (3 * 2 + 2 * 3/2) / 5 = 9/5
    "treepo": of_turns(a=(-1 / 2,) * 2, b=6 / 5, c=-9 / 5, d=1.0),
    # tree_grpo, and from Q: a with 3/2, the mean of 1 + 2 and 1 - 1, and d with 3; b and c are alone in their states
    "gigpo": of_turns(a=(3 / 4 - 3 / 4, -9 / 4 - 3 / 4), b=3 / 4, c=-9 / 4, d=3 / 4 + 3 / 4),
}

# What the reward 1 on a adds; without it the rewards are 2, -1, 3.
ADDED_BY_A = {
    "tree_grpo": of_turns(a=(1 / 2, 1 / 2), b=1 / 2, c=1 / 2, d=-1 / 2),
    "tree_grpo_intra": of_turns(a=(1 / 2, 1 / 2), b=1 / 2, c=1 / 2, d=-1 / 2),
    "treerl": of_turns(a=(1 / 3 / 2**0.5,) * 2, b=1 / 6, c=1 / 6, d=-2 / 3),
    "treepo": of_turns(a=(1 / 3, 1 / 3), b=1 / 5, c=1 / 5, d=-2 / 3),
    "gigpo": of_turns(a=(1.0, 1.0), b=1 / 2, c=1 / 2, d=-1.0),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_by_hand_in_any_order_of_the_leaves(name):
    rows = drawn_rows()
    for order in (["u_0_0", "u_0_1", "u_1_0"], ["u_1_0", "u_0_1", "u_0_0"], ["u_0_1", "u_1_0", "u_0_0"]):
        assert estimate(name, {key: rows[key] for key in order}) == BY_HAND[name]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_what_a_shared_reward_adds_to_each_advantage(name):
    """A reward that all leaves of a session share cancels against the session, and counts once against the group."""
    with_reward, without = estimate(name, drawn_rows()), estimate(name, drawn_rows(of_a=0.0))
    added = {
        key: {letter: value - without[key][letter] for letter, value in values.items()}
        for key, values in with_reward.items()
    }
    assert added == ADDED_BY_A[name]


def gae_returns(rows, values):
    """Compute verl's returns of the trained tokens, gamma 1, lambda 1/2."""
    data = DataProto.from_dict(
        tensors={
            "token_level_rewards": padded(rows, "rm_scores"),
            "response_mask": padded(rows, "response_mask").long(),
            "values": torch.tensor(values, dtype=torch.float64),
        },
        non_tensors={"uid": np.array(["u"] * len(rows), dtype=object)},
    )
    data = compute_advantage_for_multi_trajectories(
        data,
        batch_keys=[f"u_0_{leaf}" for leaf in range(len(rows))],
        adv_estimator="gae",
        gamma=1.0,
        lam=0.5,
        config=AlgoConfig(),
    )
    return [
        pytest.approx(returns[mask.bool()].tolist())
        for returns, mask in zip(data.batch["returns"], data.batch["response_mask"], strict=True)
    ]


def test_gae_counts_a_reward_at_its_token_and_before_but_not_behind():
    """The values are a 1, A 2, b 1, B 1, c 0, d 1; that of the tool's token is not read."""
    values = [[1, 2, 9, 1, 1], [1, 2, 0, 9, 9], [1, 9, 9, 9, 9]]
    with_reward, without = (gae_returns(list(drawn_rows(of_a).values()), values) for of_a in (1.0, 0.0))
    # B: 2 - 1 = 1; b: 0 + 1/2; A: (1 + 1 - 2) + 1/4 = 1/4; a: (2 - 1) + 1/8; each plus its value
    # c: -1; A: (1 + 0 - 2) - 1/2 = -3/2; a: (2 - 1) - 3/4 = 1/4; d: 3 - 1
    assert with_reward == [[17 / 8, 9 / 4, 3 / 2, 2], [5 / 4, 1 / 2, -1], [3]]
    # Without: A 1 less, a 1/2 less, and nothing behind it.
    assert without == [[13 / 8, 5 / 4, 3 / 2, 2], [3 / 4, -1 / 2, -1], [3]]


def test_gae_does_not_see_a_reward_on_a_token_that_was_only_read():
    """Why a node's reward lies on a sampled token: the leaf's own, on the last token as in verl, is lost here."""

    async def run():
        running = session("a")
        await running.root.generate()
        running.root.observe(encode("T"))
        running.root.add_reward(1.0)
        running.root.finish(8.0)
        return running

    (row,) = written(asyncio.run(run()))
    assert row["rm_scores"].tolist() == [1, 8]
    # Two rows: verl's whitening needs more than one trained token.
    assert gae_returns([row, row], [[0, 0]] * 2) == [[1], [1]]
