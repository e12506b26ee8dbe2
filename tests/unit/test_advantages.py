"""`tree_grpo` is verl's GRPO where a session has one leaf, and weighs sessions equally where it has more."""

from collections import defaultdict

import numpy as np
import pytest
import torch

pytest.importorskip("verl")

from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, get_adv_estimator_fn

from verl_tree.advantages import (
    ESTIMATOR_NAME,
    compute_tree_grpo_advantage,
    leaf_advantages,
    register,
    row_keys,
)

EPSILON = 1e-6


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
@pytest.mark.parametrize("seed", range(5))
def test_equals_grpo_of_verl_where_every_session_has_one_leaf(seed: int, normalize_by_std: bool) -> None:
    rewards, mask, uids = random_rows(seed)
    expected, _ = compute_grpo_outcome_advantage(
        token_level_rewards=rewards, response_mask=mask, index=uids, norm_adv_by_std_in_grpo=normalize_by_std
    )
    sessions: dict[str, int] = defaultdict(int)
    keys = []
    for uid in uids:
        keys.append(f"{uid}_{sessions[uid]}_0")
        sessions[uid] += 1
    with row_keys(keys):
        advantages, returns = compute_tree_grpo_advantage(
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


def test_a_session_with_many_leaves_does_not_move_the_baseline() -> None:
    # The branching session's mean is 1 with two leaves and with twenty; the other session's only leaf is 0.
    for num_leaves in (2, 20):
        advantages = leaf_advantages(
            np.array([1.0] * num_leaves + [0.0]),
            groups=["a"] * (num_leaves + 1),
            sessions=[0] * num_leaves + [1],
            normalize_by_std=False,
        )
        np.testing.assert_allclose(advantages, [0.5] * num_leaves + [-0.5], rtol=1e-12)


def test_one_session_is_normalised_over_its_own_leaves() -> None:
    # Four leaves of one session: weights 1/4, the unbiased standard deviation of 0, 0, 0, 1 is 0.5.
    advantages = leaf_advantages(np.array([0.0, 0.0, 0.0, 1.0]), groups=["a"] * 4, sessions=[5] * 4)
    expected = np.array([-0.25, -0.25, -0.25, 0.75]) / (0.5 + EPSILON)
    np.testing.assert_allclose(advantages, expected, rtol=1e-12)


def test_a_leaf_alone_in_its_group_keeps_its_reward() -> None:
    advantages = leaf_advantages(np.array([3.0, 1.0, 2.0]), groups=["a", "b", "b"], sessions=[0, 0, 1])
    assert advantages[0] == pytest.approx(3.0 / (1.0 + EPSILON), rel=1e-12)
    assert leaf_advantages(np.array([3.0]), groups=["a"], sessions=[0], normalize_by_std=False)[0] == 3.0


@pytest.mark.parametrize("reward", [0.0, 0.1, -1e6, 1 / 3])
def test_equal_rewards_give_exactly_no_advantage(reward: float) -> None:
    advantages = leaf_advantages(
        np.full(7, reward), groups=["a"] * 7, sessions=[0, 0, 0, 1, 1, 2, 3], normalize_by_std=True
    )
    np.testing.assert_array_equal(advantages, np.zeros(7))


def test_groups_and_sessions_of_other_groups_do_not_mix() -> None:
    generator = np.random.default_rng(0)
    groups = [*"aaaabbbcc"]
    sessions = [0, 0, 1, 2, 0, 1, 1, 0, 0]
    rewards = generator.normal(size=9)
    together = leaf_advantages(rewards, groups=groups, sessions=sessions)
    for group in "abc":
        rows = [row for row, name in enumerate(groups) if name == group]
        apart = leaf_advantages(rewards[rows], groups=[group] * len(rows), sessions=[sessions[row] for row in rows])
        np.testing.assert_allclose(together[rows], apart, rtol=1e-12)
    shuffled = generator.permutation(9)
    np.testing.assert_allclose(
        leaf_advantages(
            rewards[shuffled],
            groups=[groups[row] for row in shuffled],
            sessions=[sessions[row] for row in shuffled],
        ),
        together[shuffled],
        rtol=1e-9,
    )


def naive_advantages(rewards: list[float], groups: list[str], sessions: list[int]) -> list[float]:
    """The definition, with loops."""
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


def test_the_estimator_is_registered_with_verl_and_needs_the_sessions() -> None:
    register()
    register()
    estimator = get_adv_estimator_fn(ESTIMATOR_NAME)
    rewards, mask = torch.ones(2, 3), torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"verl_tree\.main_ppo"):
        estimator(token_level_rewards=rewards, response_mask=mask, index=np.array(["a", "a"]))
    with row_keys(["a_0_0", "a_1_0"]):
        advantages, _ = estimator(token_level_rewards=rewards, response_mask=mask, index=np.array(["a", "a"]))
    assert torch.equal(advantages, torch.zeros(2, 3))
    with pytest.raises(ValueError, match="sessions of 0 rows"):
        estimator(token_level_rewards=rewards, response_mask=mask, index=np.array(["a", "a"]))
