"""All estimators: the drawn trees by hand, verl's GRPO where a session has one leaf, and the weights of `tree_grpo`."""

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("verl")

from advantage_cases import DRAWN, DrawnTree, Leaf, estimate, rows_of
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, get_adv_estimator_fn

from verl_tree.trainer.advantages import (
    ESTIMATORS,
    Call,
    SessionTrees,
    announce_rows,
    intra_tree_advantages,
    leaf_advantages,
    register,
)

EPSILON = 1e-6


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("tree", DRAWN.values(), ids=DRAWN)
def test_drawn_trees_by_hand(tree: DrawnTree, name: str) -> None:
    got = estimate(name, tree.leaves, normalize_by_std=False)
    assert got.keys() == tree.expected[name].keys()
    for key, values in tree.expected[name].items():
        assert got[key] == pytest.approx(values, rel=1e-12, abs=1e-12), key


@pytest.mark.parametrize("normalize_by_std", [True, False])
@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("tree", DRAWN.values(), ids=DRAWN)
def test_the_order_of_rows_does_not_matter(tree: DrawnTree, name: str, normalize_by_std: bool) -> None:
    expected = estimate(name, tree.leaves, normalize_by_std=normalize_by_std)
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(len(tree.leaves))
        got = estimate(name, [tree.leaves[row] for row in order], normalize_by_std=normalize_by_std)
        for key, values in expected.items():
            assert got[key] == pytest.approx(values, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("num_leaves", [1, 2])
@pytest.mark.parametrize("reward", [1e308, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_reward_that_would_make_advantages_nan_is_refused(name: str, reward: float, num_leaves: int) -> None:
    leaves = [Leaf("u_0_0", "P", "a", reward), Leaf("u_1_0", "P", "b", -1e30)][:num_leaves]
    with pytest.raises(ValueError, match=r"the reward of leaf 0 is .*: give a number that is finite in float32"):
        estimate(name, leaves)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("tree", DRAWN.values(), ids=DRAWN)
def test_rewards_of_any_size_are_compared(tree: DrawnTree, name: str) -> None:
    """Divided by the standard deviation, 1e38 times the rewards have the same advantages, but for epsilon."""
    several = [leaf for leaf in tree.leaves if sum(each.key[0] == leaf.key[0] for each in tree.leaves) > 1]
    largest = max(abs(leaf.reward) for leaf in several) or 1.0
    large = [
        Leaf(leaf.key, leaf.prompt, leaf.response, 1e38 / largest * leaf.reward, leaf.untrained) for leaf in several
    ]
    expected = estimate(name, several)
    for key, values in estimate(name, large).items():
        assert values == pytest.approx(expected[key], rel=1e-4, abs=1e-4), key


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("reward", [0.0, 0.1, -1e6, 1 / 3])
@pytest.mark.parametrize("tree", DRAWN.values(), ids=DRAWN)
def test_equal_rewards_give_exactly_nothing(tree: DrawnTree, name: str, reward: float) -> None:
    leaves = [Leaf(leaf.key, leaf.prompt, leaf.response, reward) for leaf in tree.leaves if leaf.key[0] == "u"]
    for values in estimate(name, leaves).values():
        assert values == [0.0] * len(values)


@pytest.mark.parametrize("normalize_by_std", [True, False])
@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "gigpo"])
@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    responses=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=8),
    rewards=st.lists(st.floats(-10, 10, width=16), min_size=8, max_size=8),
    num_groups=st.integers(1, 3),
)
def test_is_verls_grpo_where_every_session_has_one_leaf(
    name: str, normalize_by_std: bool, responses: list[str], rewards: list[float], num_groups: int
) -> None:
    """Also where independent samples have tokens in common, are duplicates or prefixes of one another."""
    leaves = [
        Leaf(f"{row % num_groups}_{row}_0", "P", response, rewards[row]) for row, response in enumerate(responses)
    ]
    mask = torch.ones(len(leaves), 4)
    expected, _ = compute_grpo_outcome_advantage(
        token_level_rewards=torch.tensor([[leaf.reward, 0, 0, 0] for leaf in leaves], dtype=torch.float64),
        response_mask=mask,
        index=np.array([leaf.key[0] for leaf in leaves], dtype=object),
        norm_adv_by_std_in_grpo=normalize_by_std,
    )
    got = estimate(name, leaves, normalize_by_std=normalize_by_std, width=4)
    for row, leaf in enumerate(leaves):
        assert got[leaf.key] == pytest.approx(expected[row, : len(leaf.response)].tolist(), rel=1e-6, abs=1e-6)


def random_rows(seed: int) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Token rewards (R, 5) spread over the tokens, a mask with holes, and uids in mixed order."""
    generator = np.random.default_rng(seed)
    group_sizes = [1, 4, *generator.integers(1, 6, size=5)]
    uids = np.repeat(np.array([f"u{group}" for group in range(7)], dtype=object), group_sizes)
    generator.shuffle(uids)
    rewards = torch.tensor(generator.normal(size=(len(uids), 5)), dtype=torch.float32)
    mask = torch.tensor(generator.integers(0, 2, size=(len(uids), 5)))
    mask[:, 0] = 1
    return rewards, mask, uids


@pytest.mark.parametrize("normalize_by_std", [True, False])
@pytest.mark.parametrize("name", ["tree_grpo", "tree_grpo_intra"])
@pytest.mark.parametrize("seed", range(5))
def test_leaf_estimators_read_rewards_and_mask_as_verls_grpo(seed: int, name: str, normalize_by_std: bool) -> None:
    rewards, mask, uids = random_rows(seed)
    expected, _ = compute_grpo_outcome_advantage(
        token_level_rewards=rewards, response_mask=mask, index=uids, norm_adv_by_std_in_grpo=normalize_by_std
    )
    sessions: dict[str, int] = defaultdict(int)
    keys = []
    for uid in uids:
        keys.append(f"{uid}_{sessions[uid]}_0")
        sessions[uid] += 1
    sequences = [np.array([1, row]) for row in range(len(keys))]
    with announce_rows(rows_of(keys=keys, sequences=sequences, response_lens=[1] * len(keys))):
        advantages, returns = ESTIMATORS[name](
            token_level_rewards=rewards,
            response_mask=mask,
            index=uids,
            config={"norm_adv_by_std_in_grpo": normalize_by_std},
        )
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(advantages, expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(returns, advantages, rtol=0, atol=0)
    assert torch.equal(advantages[mask == 0], torch.zeros(int((mask == 0).sum())))


def test_unequal_leaf_counts_by_hand() -> None:
    # Session 0 has the leaves 1 and 0, session 1 the leaf 1: weights 1/4, 1/4, 1/2.
    # mean = 0.75; sum(w (r - mean)^2) = (0.0625 + 0.5625) / 4 + 0.0625 / 2 = 0.1875
    # sum(w^2) = 0.375, so the unbiased variance is 0.1875 / 0.625 = 0.3
    rewards = np.array([1.0, 0.0, 1.0])
    plain = leaf_advantages(rewards, groups=["a"] * 3, sessions=[0, 0, 1], normalize_by_std=False)
    np.testing.assert_allclose(plain, [0.25, -0.75, 0.25], rtol=1e-12)
    scaled = leaf_advantages(rewards, groups=["a"] * 3, sessions=[0, 0, 1])
    np.testing.assert_allclose(scaled, np.array([0.25, -0.75, 0.25]) / (np.sqrt(0.3) + EPSILON), rtol=1e-12)


def test_a_leaf_alone_in_its_group_keeps_its_reward() -> None:
    advantages = leaf_advantages(np.array([3.0, 1.0, 2.0]), groups=["a", "b", "b"], sessions=[0, 0, 1])
    assert advantages[0] == pytest.approx(3.0 / (1.0 + EPSILON), rel=1e-12)
    assert leaf_advantages(np.array([3.0]), groups=["a"], sessions=[0], normalize_by_std=False)[0] == 3.0


def naive_advantages(rewards: list[float], groups: list[str], sessions: list[int]) -> list[float]:
    """Follow the definition, with loops."""
    advantages = []
    for row, reward in enumerate(rewards):
        members = [other for other in range(len(rewards)) if groups[other] == groups[row]]
        if len(members) == 1:
            advantages.append(reward / (1 + EPSILON))
            continue
        num_sessions = len({sessions[other] for other in members})
        weight = {
            other: 1 / num_sessions / sum(sessions[third] == sessions[other] for third in members) for other in members
        }
        mean = sum(weight[other] * rewards[other] for other in members)
        variance = sum(weight[other] * (rewards[other] - mean) ** 2 for other in members)
        std = (variance / (1 - sum(weight[other] ** 2 for other in members))) ** 0.5
        advantages.append((reward - mean) / (std + EPSILON))
    return advantages


@pytest.mark.parametrize("seed", range(10))
def test_agrees_with_the_definition(seed: int) -> None:
    generator = np.random.default_rng(seed)
    num_rows = int(generator.integers(1, 40))
    groups = [f"g{group}" for group in generator.integers(0, 6, size=num_rows)]
    sessions = generator.integers(0, 4, size=num_rows).tolist()
    rewards = generator.normal(size=num_rows)
    np.testing.assert_allclose(
        leaf_advantages(rewards, groups=groups, sessions=sessions),
        naive_advantages(rewards.tolist(), groups, sessions),
        rtol=1e-9,
        atol=1e-12,
    )


def test_the_part_within_the_session_by_hand() -> None:
    # Session 0: 1 and 0, mean 1/2, unbiased standard deviation sqrt(1/2); session 1 has one leaf.
    rewards, sessions = np.array([1.0, 0.0, 1.0]), [0, 0, 1]
    got = intra_tree_advantages(rewards, groups=["a"] * 3, sessions=sessions)
    question = leaf_advantages(rewards, groups=["a"] * 3, sessions=sessions)
    within = 0.5 / (0.5**0.5 + EPSILON)
    np.testing.assert_allclose(got - question, [within, -within, 0.0], rtol=1e-12)


def test_equally_many_leaves_give_the_advantage_of_tree_grpo() -> None:
    """The paper's case: GRPO over the question's leaves plus GRPO over the tree's, both by verl's own function."""
    rewards = np.random.default_rng(3).normal(size=12)
    uids, trees = np.repeat(["u", "v"], 6), np.repeat(["u0", "u1", "v0", "v1"], 3)
    parts = [
        compute_grpo_outcome_advantage(torch.from_numpy(rewards)[:, None], torch.ones(12, 1), index=index)[0][:, 0]
        for index in (uids, trees)
    ]
    got = intra_tree_advantages(rewards, groups=uids.tolist(), sessions=[0, 0, 0, 1, 1, 1] * 2)
    np.testing.assert_allclose(got, sum(parts).numpy(), rtol=1e-6)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_are_registered_with_verl_and_need_the_rows(name: str) -> None:
    register()
    register()
    estimator = get_adv_estimator_fn(name)
    assert estimator is ESTIMATORS[name]
    arguments = {
        "token_level_rewards": torch.ones(2, 3),
        "response_mask": torch.ones(2, 3),
        "index": np.array(["a", "a"]),
    }
    with pytest.raises(ValueError, match=rf"adv_estimator={name} .* 0 rows and got 2.*verl_tree\.main_ppo"):
        estimator(**arguments)
    sequences = [np.array([1, 2, 3]), np.array([1, 2, 4])]
    calls = [[Call(1, 3)], [Call(1, 3)]]
    with announce_rows(rows_of(keys=["a_0_0", "a_1_0"], sequences=sequences, response_lens=[2, 2], calls=calls)):
        advantages, _ = estimator(**arguments)
    assert torch.equal(advantages, torch.zeros(2, 3))
    with pytest.raises(ValueError, match="of 0 rows"):
        estimator(**arguments)


def test_arguments_of_unlike_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(2,\) for 2 groups, 3 sessions: give one of each per leaf"):
        leaf_advantages([1.0, 0.0], groups=["u", "u"], sessions=[0, 0, 1])
    with pytest.raises(ValueError, match=r"for 1 sequences, 2 groups, 2 sessions"):
        SessionTrees.from_leaves([[1, 2]], rewards=[1.0, 0.0], groups=["u", "u"], sessions=[0, 0])


def test_the_documented_trial_prints_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "advantages.md").read_text()
    example = page.split("```python\n")[1].split("```")[0]
    exec(compile(example, "docs/advantages.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4
    assert [line for line in printed if f"# {line}\n" not in example] == []
