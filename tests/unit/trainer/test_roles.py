"""A baseline for each prompt and role: by hand, and against verl's own estimators on the rows of each role apart."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("verl")

from advantage_cases import Leaf, estimate, rows_of
from torch import Tensor
from verl.protocol import DataProto
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.utils.torch_functional import masked_whiten

from verl_tree.trainer.advantages import ESTIMATORS, Rows, announce_rows
from verl_tree.trainer.portions import whitening
from verl_tree.trainer.portions.by_role import named_by_role

EPSILON = 1e-6

# session 0:  P a T ─┬─ b        planner  r = 1       T: a tool's token
#                    ├─ c ─┬─ d  worker   r = 0
#                    │     └─ e  worker   r = 2
#                    └─ f        answer   r = 8
# session 1:  P g ─┬─ h          planner  r = 0
#                  └─ i          worker   r = 4
# Prompt w has two leaves without a role beside a planner, prompt v one leaf and no roles.
LEAVES = (
    Leaf("u_0_0", "P", "aTb", 1.0, untrained="T"),
    Leaf("u_0_1", "P", "aTcd", 0.0, untrained="T"),
    Leaf("u_0_2", "P", "aTce", 2.0, untrained="T"),
    Leaf("u_0_3", "P", "aTf", 8.0, untrained="T"),
    Leaf("u_1_0", "P", "gh", 0.0),
    Leaf("u_1_1", "P", "gi", 4.0),
    Leaf("w_0_0", "Q", "x", 7.0),
    Leaf("w_1_0", "Q", "y", 5.0),
    Leaf("w_1_1", "Q", "z", 3.0),
    Leaf("v_0_0", "R", "s", 3.0),
)
ROLES = {
    **{"u_0_0": "planner", "u_0_1": "worker", "u_0_2": "worker", "u_0_3": "answer"},
    **{"u_1_0": "planner", "u_1_1": "worker", "w_0_0": "planner"},
}
ALONE = {"u_0_3": [0.0, 0.0, 0.0], "w_0_0": [0.0], "v_0_0": [3.0]}
"""The answer and the planner of w have nobody to be compared with; v has no roles, so its leaf keeps its reward."""

EXPECTED = {
    # planner: 1 and 0, mean 1/2. worker: sessions weigh 1/2, so the mean is (1 + 4) / 2 = 5/2. w: 5 and 3, mean 4.
    "tree_grpo": {
        "u_0_0": [1 / 2, 0, 1 / 2],
        "u_0_1": [-5 / 2, 0, -5 / 2, -5 / 2],
        "u_0_2": [-1 / 2, 0, -1 / 2, -1 / 2],
        "u_1_0": [-1 / 2, -1 / 2],
        "u_1_1": [3 / 2, 3 / 2],
        "w_1_0": [1],
        "w_1_1": [-1],
    },
    # plus -1 and 1 for the workers of session 0, whose mean is 1, and 1 and -1 in session 1 of w
    "tree_grpo_intra": {
        "u_0_0": [1 / 2, 0, 1 / 2],
        "u_0_1": [-7 / 2, 0, -7 / 2, -7 / 2],
        "u_0_2": [1 / 2, 0, 1 / 2, 1 / 2],
        "u_1_0": [-1 / 2, -1 / 2],
        "u_1_1": [3 / 2, 3 / 2],
        "w_1_0": [2],
        "w_1_1": [-2],
    },
    # The tree of the workers alone: "P a T c" with 2 leaves and the mean 1, of 3 leaves with the mean 2.
    # c: 2 (1 - 2) / (2 sqrt 2); d: (-2 - 1) / 2; e: (0 + 1) / 2; i: 2 (4 - 2) / 2
    "treerl": {
        "u_0_0": [1 / 2, 0, 1 / 2],
        "u_0_1": [-1 / 2**0.5, 0, -1 / 2**0.5, -3 / 2],
        "u_0_2": [-1 / 2**0.5, 0, -1 / 2**0.5, 1 / 2],
        "u_1_0": [-1 / 2, -1 / 2],
        "u_1_1": [2, 2],
        "w_1_0": [1],
        "w_1_1": [-1],
    },
    # above d and e: (3 * 2 + 2 * 1) / 5 = 8/5
    "treepo": {
        "u_0_0": [1 / 2, 0, 1 / 2],
        "u_0_1": [-1, 0, -1, -8 / 5],
        "u_0_2": [-1, 0, -1, 2 / 5],
        "u_1_0": [-1 / 2, -1 / 2],
        "u_1_1": [2, 2],
        "w_1_0": [1],
        "w_1_1": [-1],
    },
    # Of the planners from P: a 1, g h 0; b is alone. Of the workers from P: a (0 + 2) / 2 = 1, g i 4; behind T: 0 and
    # 1, because half of a reward is at the first token. w from Q: 5 and 3.
    "gigpo": {
        "u_0_0": [1, 0, 1 / 2],
        "u_0_1": [-5 / 2 - 3 / 2, 0, -5 / 2 - 1 / 2, -5 / 2 - 1 / 2],
        "u_0_2": [-1 / 2 - 3 / 2, 0, -1 / 2 + 1 / 2, -1 / 2 + 1 / 2],
        "u_1_0": [-1, -1],
        "u_1_1": [3, 3],
        "w_1_0": [2],
        "w_1_1": [-2],
    },
}


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("seed", range(3))
def test_three_roles_by_hand(name: str, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(LEAVES)) if seed else range(len(LEAVES))
    leaves = [LEAVES[row] for row in order]
    got = estimate(name, leaves, normalize_by_std=False, roles=ROLES)
    for key, values in (EXPECTED[name] | ALONE).items():
        assert got[key] == pytest.approx(values, rel=1e-12, abs=1e-12), key


def test_each_role_has_a_standard_deviation_of_its_own() -> None:
    # planner: (1/8 + 1/8) / (1 - 1/2) = 1/2. worker: weights 1/4, 1/4, 1/2, so
    # (25/16 + 1/16 + 9/8) / (1 - 3/8) = 22/5
    got = estimate("tree_grpo", LEAVES, roles=ROLES)
    assert got["u_0_0"][0] == pytest.approx(1 / 2 / (0.5**0.5 + EPSILON), rel=1e-12)
    assert got["u_1_1"][0] == pytest.approx(3 / 2 / (4.4**0.5 + EPSILON), rel=1e-12)
    assert got["u_0_3"] == [0.0] * 3
    assert got["v_0_0"] == pytest.approx([3 / (1 + EPSILON)], rel=1e-12)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_prompts_without_roles_are_as_ever_bit_for_bit(name: str) -> None:
    with_roles = [leaf for leaf in LEAVES if leaf.key[0] == "u"]
    others = [Leaf(f"a{leaf.key}", leaf.prompt, leaf.response, leaf.reward, leaf.untrained) for leaf in with_roles]
    expected = estimate(name, others)
    assert any(any(values) for values in expected.values())
    got = estimate(name, [*with_roles, *others], roles=ROLES)
    assert {key: got[key] for key in expected} == expected


# ---- verl's estimators

NUM_ROLES = 3
VERLS = ["grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg"]


def drawn(seed: int) -> tuple[dict[str, str], Tensor, Tensor]:
    """Draw roles by the keys of rows, rewards (R, 5) spread over the tokens, and a mask with holes.

    Prompt a has no roles. In the others each role has leaves in two sessions or more, up to three in each; the fourth
    prompt has a lone leaf of a fourth role as well.
    """
    generator = np.random.default_rng(seed)
    keys: dict[str, str] = {}
    for uid in "abcd":
        for session in range(3):
            roles = ["r0", *generator.integers(0, NUM_ROLES, size=3).tolist()] if session == 2 else [0, 1, 2, 1, 0]
            names = [str(role) if str(role).startswith("r") else f"r{role}" for role in roles]
            for leaf, role in enumerate(generator.permutation(names)):
                keys[f"{uid}_{session}_{leaf}"] = "" if uid == "a" else str(role)
    keys["d_1_9"] = "lone"
    keys = {key: keys[key] for key in generator.permutation(list(keys))}
    rewards = torch.tensor(generator.normal(size=(len(keys), 5)), dtype=torch.float32)
    rewards[generator.random(len(keys)) < 0.2] = 0.0
    mask = torch.tensor(generator.integers(0, 2, size=(len(keys), 5)))
    mask[:, 0] = 1
    return keys, rewards, mask


def announced(roles: Mapping[str, str]) -> Rows:
    sequences = [np.array([1, row]) for row in range(len(roles))]
    named = {key: role for key, role in roles.items() if role}
    return rows_of(keys=list(roles), sequences=sequences, response_lens=[1] * len(roles), roles=named)


def verls(name: str, keys: list[str], rewards: Tensor, mask: Tensor) -> Tensor:
    """Compute advantages as verl's trainer does."""
    data = DataProto.from_dict(
        tensors={"token_level_rewards": rewards, "response_mask": mask},
        non_tensors={"uid": np.array([key.split("_")[0] for key in keys], dtype=object)},
    )
    config: dict[str, Any] = {"norm_adv_by_std_in_grpo": True}
    made = compute_advantage_for_multi_trajectories(data, batch_keys=keys, adv_estimator=name, config=config)
    assert torch.equal(made.batch["advantages"], made.batch["returns"])
    return made.batch["advantages"]


def apart(name: str, roles: Mapping[str, str], rewards: Tensor, mask: Tensor) -> Tensor:
    """Run verl's estimator on the rows of each role and on those without one."""
    keys, expected = list(roles), torch.zeros_like(rewards)
    for role in sorted(set(roles.values()) - {"lone"}):
        rows = [row for row, key in enumerate(keys) if roles[key] == role]
        expected[rows] = verls(name, [keys[row] for row in rows], rewards[rows], mask[rows])
        if name == "gpg":  # it multiplies with the rows per row with a reward, in the batch
            nonzero = [torch.count_nonzero(each.sum(dim=-1)).item() for each in (rewards[rows], rewards)]
            lone = torch.count_nonzero(rewards[keys.index("d_1_9")].sum()).item()
            expected[rows] *= (len(keys) / (nonzero[1] - lone)) / (len(rows) / nonzero[0])
    return expected


@pytest.mark.parametrize("name", VERLS)
@pytest.mark.parametrize("seed", range(3))
def test_verls_estimators_are_what_they_are_on_each_role_apart(name: str, seed: int) -> None:
    roles, rewards, mask = drawn(seed)
    expected = apart(name, roles, rewards, mask)
    with announce_rows(announced(roles)):
        got = verls(named_by_role(name), list(roles), rewards, mask)
    torch.testing.assert_close(got, expected, rtol=1e-6 if name == "gpg" else 0, atol=0)
    assert not got[list(roles).index("d_1_9")].any()
    assert expected.abs().max() > 0.1
    assert not torch.allclose(got, verls(name, list(roles), rewards, mask)), "roles make a difference"


@pytest.mark.parametrize("seed", range(3))
def test_what_reinforce_plus_plus_whitens_has_a_baseline_by_role(seed: int) -> None:
    """It takes off the means of groups, as Dr. GRPO does over all leaves, and whitens over all rows."""
    roles, rewards, mask = drawn(seed)
    whitening.register()
    unwhitened = whitening.unwhitened("reinforce_plus_plus_baseline")
    baseline = apart(unwhitened, roles, rewards, mask)
    with announce_rows(announced(roles)):
        got = verls(named_by_role("reinforce_plus_plus_baseline"), list(roles), rewards, mask)
        in_portions = verls(named_by_role(unwhitened), list(roles), rewards, mask)
    torch.testing.assert_close(in_portions, baseline, rtol=0, atol=0)
    torch.testing.assert_close(got, masked_whiten(baseline, mask) * mask, rtol=1e-6, atol=1e-6)


def test_where_every_leaf_is_alone_nothing_is_trained() -> None:
    roles = {"a_0_0": "x", "a_0_1": "y", "a_1_0": "z"}
    rewards, mask = torch.ones(3, 2), torch.ones(3, 2)
    for name in VERLS:
        with announce_rows(announced(roles)):
            assert not verls(named_by_role(name), list(roles), rewards, mask).any(), name


def test_verls_grpo_compares_the_sessions_of_a_role() -> None:
    """By hand: the last worker of each session counts, and the only session with an answer has none to compare with."""
    roles = {"a_0_0": "worker", "a_0_1": "worker", "a_0_2": "answer", "a_0_3": "answer", "a_1_0": "worker"}
    rewards = torch.tensor([[9.0], [1.0], [2.0], [3.0], [0.0]])
    with announce_rows(announced(roles)):
        got = verls(named_by_role("grpo"), list(roles), rewards, torch.ones(5, 1))
    # 1 and 0: mean 1/2, standard deviation sqrt(1/2)
    expected = [2**-0.5, 2**-0.5, 0.0, 0.0, -(2**-0.5)]
    assert got[:, 0].tolist() == pytest.approx(expected, rel=1e-5)
