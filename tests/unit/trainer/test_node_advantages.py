"""`treerl` and `treepo`: one advantage per node of a session's token tree, on every token of the node."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("verl")

from advantage_cases import DRAWN, DrawnTree, Leaf, estimate

from verl_tree.trainer.advantages import SessionTrees, treepo_advantages, treerl_advantages

EPSILON = 1e-6


@pytest.mark.parametrize("name", ["treerl", "treepo"])
@pytest.mark.parametrize("tree", DRAWN.values(), ids=DRAWN)
def test_division_by_the_standard_deviation_of_the_group(tree: DrawnTree, name: str) -> None:
    scaled = estimate(name, tree.leaves, width=7)
    for key, expected in tree.expected[name].items():
        std = tree.std[key.split("_")[0]] + EPSILON
        assert scaled[key] == pytest.approx([value / std for value in expected], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("std", [None, 0.3**0.5])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # V(group) is the mean of 1/2 and 1. a: 2 (1/2 - 3/4) / (2 sqrt 2); b: (1/4 + 1/2) / 2; c: (-3/4 - 1/2) / 2
        ("treerl", {"u_0_0": [-1 / 4 / 2**0.5, 3 / 8, 3 / 8], "u_0_1": [-1 / 4 / 2**0.5, -5 / 8], "u_1_0": [1 / 4]}),
        # above b and c: 3 leaves of value 3/4, 2 leaves of mean 1/2, together (9/4 + 1) / 5 = 13/20
        ("treepo", {"u_0_0": [-1 / 4, 7 / 20, 7 / 20], "u_0_1": [-1 / 4, -13 / 20], "u_1_0": [1 / 4]}),
    ],
)
def test_the_baseline_weighs_sessions_where_the_loss_does(
    name: str, expected: dict[str, list[float]], std: float | None
) -> None:
    """Mean and standard deviation of the group are those of tree_grpo: weights 1/4, 1/4 and 1/2."""
    got = estimate(name, DRAWN["fork"].leaves, normalize_by_std=std is not None, weigh_sessions=True)
    for key, values in expected.items():
        divisor = 1.0 if std is None else std + EPSILON
        assert got[key] == pytest.approx([value / divisor for value in values], rel=1e-12, abs=1e-12)


@st.composite
def forests(draw: st.DrawFn) -> list[Leaf]:
    """Sessions over two letters, so that prefixes, duplicates and strict prefixes are everywhere."""
    leaves = []
    for uid in range(draw(st.integers(1, 3))):
        for session in range(draw(st.integers(1, 3))):
            for leaf in range(draw(st.integers(1, 5))):
                prompt = draw(st.sampled_from(["p", "q", "pa"]))
                response = draw(st.text("ab", min_size=1, max_size=6))
                untrained = draw(st.sampled_from(["", "b"]))
                reward = draw(st.integers(-4, 4)) / 4
                leaves.append(Leaf(f"{uid}_{session}_{leaf}", prompt, response, reward, untrained))
    return draw(st.permutations(leaves))


def naive(name: str, leaves: list[Leaf]) -> dict[str, list[float]]:
    """Follow the definitions: the node of a token is the set of its session's leaves with that prefix."""

    def group_of(leaf: Leaf) -> list[Leaf]:
        return [other for other in leaves if other.key.split("_")[0] == leaf.key.split("_")[0]]

    def value(members: list[Leaf], group: list[Leaf]) -> float:
        # As in GRPO, who is alone is compared with 0.
        return 0.0 if members == group and len(group) == 1 else float(np.mean([leaf.reward for leaf in members]))

    result: dict[str, list[float]] = defaultdict(list)
    for leaf in leaves:
        group = group_of(leaf)
        session = [other for other in group if other.key.split("_")[1] == leaf.key.split("_")[1]]
        tokens, above = leaf.prompt + leaf.response, [group]
        node = session
        for position in range(len(tokens)):
            below = [other for other in session if (other.prompt + other.response).startswith(tokens[: position + 1])]
            if position and below != node:
                above.append(node)
            node = below
            if position < len(leaf.prompt):
                continue
            own = float(np.mean([other.reward for other in node]))
            means = [value(members, group) for members in above]
            if name == "treerl":
                advantage = ((own - means[0]) + (own - means[-1])) / 2 / len(node) ** 0.5
            else:
                sizes = [len(members) for members in above]
                if len(above) > 1 and sizes[0] == sizes[1]:
                    sizes[1] = 0
                advantage = sum(size * (own - mean) for size, mean in zip(sizes, means, strict=True)) / sum(sizes)
            result[leaf.key].append(advantage * (leaf.response[position - len(leaf.prompt)] not in leaf.untrained))
    return result


@pytest.mark.parametrize("name", ["treerl", "treepo"])
@settings(derandomize=True, deadline=None, max_examples=150)
@given(leaves=forests())
def test_agrees_with_the_definition(name: str, leaves: list[Leaf]) -> None:
    expected = naive(name, leaves)
    for key, values in estimate(name, leaves, normalize_by_std=False).items():
        assert values == pytest.approx(expected[key], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", ["treerl", "treepo"])
@settings(derandomize=True, deadline=None, max_examples=50)
@given(leaves=forests())
def test_a_token_has_one_advantage_on_all_leaves_of_its_session(name: str, leaves: list[Leaf]) -> None:
    leaves = [Leaf(leaf.key, leaf.prompt, leaf.response, leaf.reward) for leaf in leaves]
    seen: dict[tuple[str, str], float] = {}
    for key, values in estimate(name, leaves).items():
        (leaf,) = (leaf for leaf in leaves if leaf.key == key)
        for end, advantage in enumerate(values, start=len(leaf.prompt) + 1):
            path = key.rsplit("_", 1)[0], (leaf.prompt + leaf.response)[:end]
            assert seen.setdefault(path, advantage) == advantage


@pytest.mark.parametrize("advantages", [treerl_advantages, treepo_advantages])
def test_a_deep_chain_of_prefixes(advantages: object) -> None:
    """Each turn of a long session may end a leaf; the values stay finite and the last leaf's is by hand."""
    num_turns = 2000
    sequences = [np.arange(turn + 1) for turn in range(num_turns)]
    rewards = np.zeros(num_turns)
    rewards[-1] = 1.0
    trees = SessionTrees.from_leaves(sequences, rewards=rewards, groups=["u"] * num_turns, sessions=[0] * num_turns)
    values = advantages(trees, normalize_by_std=False)
    assert np.isfinite(values).all()
    # The node with k leaves below has value 1 / k; above the last leaf are those with n..2 leaves. treerl compares
    # it with 1 / n and with 1/2; treepo's weights k cancel the values: n - 1 subgroups of k * 1 / k over the sum of k.
    last = {
        treerl_advantages: (1 - 1 / num_turns + 1 / 2) / 2,
        treepo_advantages: 1 - (num_turns - 1) / (num_turns * (num_turns + 1) / 2 - 1),
    }
    assert values[-1] == pytest.approx(last[advantages], rel=1e-9)


def test_no_rows() -> None:
    trees = SessionTrees.from_leaves([], rewards=np.zeros(0), groups=[], sessions=[])
    assert treerl_advantages(trees).shape == treepo_advantages(trees).shape == (0,)
    assert trees.on_responses(np.zeros(0), response_lens=[], width=3).shape == (0, 3)
