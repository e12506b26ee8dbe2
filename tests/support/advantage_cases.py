"""Drawn trees for the tests of advantages, with expected values by hand; docs/advantages.md shows the first."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verl_tree.trainer.advantages import ESTIMATORS, Call, Rows, announce_rows
from verl_tree.tree import TokenForest
from verl_tree.tree.shape import ForestShape


@dataclass(frozen=True)
class Leaf:
    """One trajectory; a letter is a token."""

    key: str
    prompt: str
    response: str
    reward: float
    untrained: str = ""
    """Letters of the response that a tool wrote."""

    @property
    def calls(self) -> list[Call]:
        """The stretches of the response that no tool wrote."""
        starts = len(self.prompt)
        pattern = f"[^{re.escape(self.untrained)}]+" if self.untrained else ".+"
        return [Call(starts + match.start(), starts + match.end()) for match in re.finditer(pattern, self.response)]


@dataclass(frozen=True)
class DrawnTree:
    """Leaves with what estimators make of them.

    `expected` has, by estimator and row key, the advantages of the response's tokens, not divided by a standard
    deviation. `std` is, by uid, the standard deviation that treerl and treepo divide by.
    """

    leaves: tuple[Leaf, ...]
    expected: dict[str, dict[str, list[float]]]
    std: dict[str, float]


# session 0:  P a ─┬─ b b   r = 1        leaves 3, mean 2/3; below "P a" 1/2
#                  └─ c     r = 0
# session 1:  P d          r = 1
# variance (1/9 + 4/9 + 1/9) / 2 = 1/3
FORK = DrawnTree(
    leaves=(
        Leaf("u_0_0", "P", "abb", 1.0),
        Leaf("u_0_1", "P", "ac", 0.0),
        Leaf("u_1_0", "P", "d", 1.0),
    ),
    expected={
        # sessions weigh 1/2, so the mean is (1/2 + 1) / 2 = 3/4
        "tree_grpo": {"u_0_0": [1 / 4] * 3, "u_0_1": [-3 / 4] * 2, "u_1_0": [1 / 4]},
        # plus +-1/2 in session 0, plus 0 for the only leaf of session 1
        "tree_grpo_intra": {"u_0_0": [3 / 4] * 3, "u_0_1": [-5 / 4] * 2, "u_1_0": [1 / 4]},
        # a: 2 (1/2 - 2/3) / (2 sqrt 2); b: (1/3 + 1/2) / 2; c: (-2/3 - 1/2) / 2; d: 2 (1/3) / 2
        "treerl": {
            "u_0_0": [-1 / 6 / 2**0.5, 5 / 12, 5 / 12],
            "u_0_1": [-1 / 6 / 2**0.5, -7 / 12],
            "u_1_0": [1 / 3],
        },
        # above b and c: 3 leaves of mean 2/3, 2 leaves of mean 1/2, together (2 + 1) / 5 = 3/5
        "treepo": {"u_0_0": [-1 / 6, 2 / 5, 2 / 5], "u_0_1": [-1 / 6, -3 / 5], "u_1_0": [1 / 3]},
        # every response is one step from P: tree_grpo plus 1/3, -2/3, 1/3
        "gigpo": {"u_0_0": [7 / 12] * 3, "u_0_1": [-17 / 12] * 2, "u_1_0": [7 / 12]},
    },
    std={"u": (1 / 3) ** 0.5},
)

# Depth 3, a strict prefix, duplicates, and a second session that sampled the same tokens:
#
# session 0:  P a ─┬─ b ──┬── (ends: r = 0)      b: 3 leaves, mean 3
#   4 leaves,      │      └── c  r = 3, r = 6    c: 2 leaves (duplicates), mean 9/2
#   mean 5         └─ d  r = 11
# session 1:  P a b  r = 0                       group: 5 leaves, mean 4
# variance (16 + 1 + 4 + 49 + 16) / 4 = 43/2
DEEP = DrawnTree(
    leaves=(
        Leaf("u_0_0", "P", "ab", 0.0),
        Leaf("u_0_1", "P", "abc", 3.0),
        Leaf("u_0_2", "P", "abc", 6.0),
        Leaf("u_0_3", "P", "ad", 11.0),
        Leaf("u_1_0", "P", "ab", 0.0),
    ),
    expected={
        # sessions weigh 1/2: mean 5/2
        "tree_grpo": {
            "u_0_0": [-5 / 2] * 2,
            "u_0_1": [1 / 2] * 3,
            "u_0_2": [7 / 2] * 3,
            "u_0_3": [17 / 2] * 2,
            "u_1_0": [-5 / 2] * 2,
        },
        # plus r - 5 in session 0
        "tree_grpo_intra": {
            "u_0_0": [-15 / 2] * 2,
            "u_0_1": [-3 / 2] * 3,
            "u_0_2": [9 / 2] * 3,
            "u_0_3": [29 / 2] * 2,
            "u_1_0": [-5 / 2] * 2,
        },
        # a: (1 + 1) / (2 sqrt 4); b: (-1 - 2) / (2 sqrt 3); c: (1/2 + 3/2) / (2 sqrt 2); d: (7 + 6) / 2; last: -4
        "treerl": {
            "u_0_0": [1 / 2, -3 / 2 / 3**0.5],
            "u_0_1": [1 / 2, -3 / 2 / 3**0.5, 1 / 2**0.5],
            "u_0_2": [1 / 2, -3 / 2 / 3**0.5, 1 / 2**0.5],
            "u_0_3": [1 / 2, 13 / 2],
            "u_1_0": [-4.0, -4.0],
        },
        # a: 5 - 4; above b and d: (5 * 4 + 4 * 5) / 9; above c: (5 * 4 + 4 * 5 + 3 * 3) / 12
        "treepo": {
            "u_0_0": [1.0, 3 - 40 / 9],
            "u_0_1": [1.0, 3 - 40 / 9, 9 / 2 - 49 / 12],
            "u_0_2": [1.0, 3 - 40 / 9, 9 / 2 - 49 / 12],
            "u_0_3": [1.0, 11 - 40 / 9],
            "u_1_0": [-4.0, -4.0],
        },
        # steps from P: a b 0, a b c 9/2 (the duplicates are one), a d 11, a b 0, mean 31/8
        "gigpo": {
            "u_0_0": [-5 / 2 - 31 / 8] * 2,
            "u_0_1": [1 / 2 + 5 / 8] * 3,
            "u_0_2": [7 / 2 + 5 / 8] * 3,
            "u_0_3": [17 / 2 + 57 / 8] * 2,
            "u_1_0": [-5 / 2 - 31 / 8] * 2,
        },
    },
    std={"u": 21.5**0.5},
)

# An agent: a fork at the end of the prompt, a tool's token (T), a rewritten context (Q shares nothing with P), and a
# second prompt, whose only leaf keeps its reward:
#
# session 0:  P ─┬─ x T y   r = 1       P: 2 leaves, mean 1/2
#                └─ z       r = 0
#             Q w           r = 2       a root of its own
# session 1:  P x T y       r = 1       group: 4 leaves, mean 1
# variance (0 + 1 + 1 + 0) / 3 = 2/3
AGENT = DrawnTree(
    leaves=(
        Leaf("u_0_0", "P", "xTy", 1.0, untrained="T"),
        Leaf("u_0_1", "P", "z", 0.0),
        Leaf("u_0_2", "Q", "w", 2.0),
        Leaf("u_1_0", "P", "xTy", 1.0, untrained="T"),
        Leaf("v_0_0", "R", "s", 3.0),
    ),
    expected={
        # both sessions have mean 1
        "tree_grpo": {"u_0_0": [0.0] * 3, "u_0_1": [-1.0], "u_0_2": [1.0], "u_1_0": [0.0] * 3, "v_0_0": [3.0]},
        "tree_grpo_intra": {"u_0_0": [0.0] * 3, "u_0_1": [-2.0], "u_0_2": [2.0], "u_1_0": [0.0] * 3, "v_0_0": [3.0]},
        # x T y: (0 + 1/2) / 2; z: (-1 - 1/2) / 2; the parent of Q is the group: (1 + 1) / 2
        "treerl": {
            "u_0_0": [1 / 4, 0.0, 1 / 4],
            "u_0_1": [-3 / 4],
            "u_0_2": [1.0],
            "u_1_0": [0.0] * 3,
            "v_0_0": [3.0],
        },
        # above x and z: (4 * 1 + 2 * 1/2) / 6 = 5/6; above Q: 1
        "treepo": {
            "u_0_0": [1 / 6, 0.0, 1 / 6],
            "u_0_1": [-5 / 6],
            "u_0_2": [1.0],
            "u_1_0": [0.0] * 3,
            "v_0_0": [3.0],
        },
        # from P: x 1, z 0, x 1; from P x T: y 1/2, y 1/2, because half of a reward is at the first token; w is alone
        "gigpo": {
            "u_0_0": [1 / 3, 0.0, 0.0],
            "u_0_1": [-5 / 3],
            "u_0_2": [1.0],
            "u_1_0": [1 / 3, 0.0, 0.0],
            "v_0_0": [3.0],
        },
    },
    std={"u": (2 / 3) ** 0.5, "v": 1.0},
)

DRAWN = {"fork": FORK, "deep": DEEP, "agent": AGENT}


def rows_of(
    *, keys: Sequence[str], sequences: Sequence[np.ndarray], response_lens: Sequence[int], **others: Any
) -> Rows:
    """Announce rows whose tokens are known."""
    uids = [key.rsplit("_", 2)[0] for key in keys]
    return Rows(keys, ForestShape.of(TokenForest.from_sequences(sequences, merge_keys=uids)), response_lens, **others)


def estimate(
    name: str,
    leaves: Sequence[Leaf],
    *,
    normalize_by_std: bool = True,
    width: int | None = None,
    weigh_sessions: bool = False,
    options: Mapping[str, Any] | None = None,
    roles: Mapping[str, str] | None = None,
) -> dict[str, list[float]]:
    """Run an estimator as the trainer does, on padded rows; return the advantages of each row's response tokens."""
    lens = [len(leaf.response) for leaf in leaves]
    rewards = torch.zeros(len(leaves), width or max(lens), dtype=torch.float64)
    mask = torch.zeros(rewards.shape, dtype=torch.int64)
    for row, leaf in enumerate(leaves):
        # Half of the reward is at the first token, because only the sum counts.
        rewards[row, 0] += leaf.reward / 2
        rewards[row, lens[row] - 1] += leaf.reward / 2
        mask[row, : lens[row]] = torch.tensor([letter not in leaf.untrained for letter in leaf.response])
    rows = rows_of(
        keys=[leaf.key for leaf in leaves],
        sequences=[np.array([ord(letter) for letter in leaf.prompt + leaf.response]) for leaf in leaves],
        response_lens=lens,
        weigh_sessions=weigh_sessions,
        calls=[leaf.calls for leaf in leaves],
        roles=roles or {},
    )
    config = {"norm_adv_by_std_in_grpo": normalize_by_std, **(options or {})}
    with announce_rows(rows):
        advantages, returns = ESTIMATORS[name](token_level_rewards=rewards, response_mask=mask, config=config)
    assert torch.equal(advantages, returns)
    assert not advantages[mask == 0].any(), "tokens that are not trained have no advantage"
    return {leaf.key: advantages[row, : lens[row]].tolist() for row, leaf in enumerate(leaves)}
