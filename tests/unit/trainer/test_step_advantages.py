"""`gigpo`: steps from one state are a group; by hand, against its definition, and where it is another estimator."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("verl")

from advantage_cases import DRAWN, DrawnTree, Leaf, estimate, rows_of
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

from verl_tree.launch.command.composition import compose_config
from verl_tree.trainer.advantages import ESTIMATORS, Call, Rows, announce_rows, gigpo_advantages
from verl_tree.trainer.rows.calls import calls_of_row
from verl_tree.tree import TokenForest
from verl_tree.tree.shape import ForestShape


def shape_of(sequences: list[np.ndarray]) -> ForestShape:
    return ForestShape.of(TokenForest.from_sequences(sequences))


# The tree of docs/advantages.md; t is a tool's token:
#
# session 0:  P a t ─┬─ b   r = 1
#                    └─ c   r = 0
# session 1:  P a t d       r = 1
P, A, T, B, C, D = range(6)
SEQUENCES = [np.array([P, A, T, B]), np.array([P, A, T, C]), np.array([P, A, T, D])]
TREE = {
    "shape": shape_of(SEQUENCES),
    "response_lens": [3, 3, 3],
    "calls": [[Call(1, 2), Call(3, 4)]] * 3,
    "groups": ["u"] * 3,
    "sessions": [0, 0, 1],
}
REWARDS = [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0]]


def test_the_first_tree_of_the_page() -> None:
    # From P: a of session 0 with the mean of 1 and 0, d with 1. From P a: b 1, c 0. tree_grpo: 1/4, -3/4, 1/4
    got = gigpo_advantages(
        [[0.0, 1.0], [0.0, 0.0], [1.0, 0.0]],
        shape=shape_of([np.array([P, A, B]), np.array([P, A, C]), np.array([P, D])]),
        response_lens=[2, 2, 1],
        calls=[[Call(1, 2), Call(2, 3)], [Call(1, 2), Call(2, 3)], [Call(1, 2)]],
        groups=["u"] * 3,
        sessions=[0, 0, 1],
        normalize_by_std=False,
    )
    assert [*got[0], *got[1], got[2][0]] == pytest.approx([0.0, 3 / 4, -1.0, -5 / 4, 1 / 2])


def test_the_options_are_those_of_a_composed_command() -> None:
    options = ["algorithm.gamma=0.5", "algorithm.gigpo.step_advantage_w=3"]
    config = compose_config(["profile=cpu", "algorithm.adv_estimator=gigpo", *options])
    rows = Rows(["u_0_0", "u_0_1", "u_1_0"], TREE["shape"], TREE["response_lens"], calls=TREE["calls"])
    with announce_rows(rows):
        got, _ = ESTIMATORS["gigpo"](
            token_level_rewards=torch.tensor(REWARDS, dtype=torch.float64),
            response_mask=torch.tensor([[1, 0, 1]] * 3),
            config=config.algorithm,
        )
    expected = gigpo_advantages(REWARDS, **TREE, gamma=0.5, step_weight=3.0)
    np.testing.assert_array_equal(got.numpy(), expected * [1, 0, 1])


@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_the_documented_tree_by_hand(weight: float) -> None:
    # gamma 1/2. From P: a of session 0 with the mean of 1/2 and 0, a of session 1 with 1/2; their mean is 3/8.
    # From P a t: b 1, c 0, d 1; their mean is 2/3. tree_grpo: 1/4, -3/4, 1/4
    got = gigpo_advantages(REWARDS, **TREE, gamma=0.5, step_weight=weight, normalize_by_std=False)
    a, b = -1 / 8 * weight, 1 / 3 * weight
    of_a, of_bcd = [a, a, -a], [b, -2 * b, b]
    for row, leaf in enumerate([1 / 4, -3 / 4, 1 / 4]):
        assert got[row] == pytest.approx([leaf + of_a[row]] * 2 + [leaf + of_bcd[row]], rel=1e-12)


def test_both_parts_are_divided_by_their_own_standard_deviation() -> None:
    # tree_grpo: sqrt(0.3). From P: (1/8)^2 * 2 / 1. From P a t: (1/9 + 4/9 + 1/9) / 2.
    got = gigpo_advantages(REWARDS, **TREE, gamma=0.5)
    leaf = 1 / 4 / (0.3**0.5 + 1e-6)
    assert got[0][0] == pytest.approx(leaf - 1 / 8 / (2**0.5 / 8 + 1e-6), rel=1e-12)
    assert got[0][2] == pytest.approx(leaf + 1 / 3 / ((1 / 3) ** 0.5 + 1e-6), rel=1e-12)


def test_a_key_of_the_loop_is_the_state() -> None:
    # The states before b and c are told apart, and that before d is the one before b.
    keys = ["left", "right", "left"]
    calls = [[Call(1, 2), Call(3, 4, key)] for key in keys]
    got = gigpo_advantages([[0.0, 0, 1], [0, 0, 0], [0, 0, 2]], **TREE | {"calls": calls}, normalize_by_std=False)
    # tree_grpo: 1/2 and 2, mean 5/4. b and d: 1 and 2, mean 3/2; c is alone.
    assert [row[2] for row in got] == pytest.approx([1 - 5 / 4 - 1 / 2, -5 / 4, 2 - 5 / 4 + 1 / 2])


def test_a_step_of_several_leaves_counts_once() -> None:
    """A third leaf below a session's step moves that step's mean, but adds no step to its state."""
    repeated = {name: [*values, values[0]] for name, values in TREE.items() if name != "shape"}
    more = repeated | {"shape": shape_of([*SEQUENCES, SEQUENCES[0]]), "sessions": [0, 0, 1, 0]}
    got = gigpo_advantages([*REWARDS, [0.0, 0.0, 1.0]], **more, gamma=0.5, normalize_by_std=False)
    # From P: (1/2 + 0 + 1/2) / 3 and 1/2, mean 5/12. b twice is one step. tree_grpo: 2/3 and 1, mean 5/6.
    assert got[0] == pytest.approx([1 / 6 - 1 / 12] * 2 + [1 / 6 + 1 / 3])
    assert got[2] == pytest.approx([1 / 6 + 1 / 12] * 2 + [1 / 6 + 1 / 3])
    np.testing.assert_array_equal(got[0], got[3])


def test_what_comes_before_the_first_call_and_calls_in_the_prompt_have_no_step() -> None:
    """A prompt written anew holds a call (of another row); the response begins with what was read."""
    got = gigpo_advantages(
        [[1.0, 0.0], [0.0, 0.0]],
        shape=shape_of([np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5])]),
        response_lens=[2, 2],
        calls=[[Call(0, 2), Call(3, 4)]] * 2,
        groups=["u", "u"],
        sessions=[0, 1],
        normalize_by_std=False,
    )
    # The reward on the token 3 is before the calls of 4 and 5, which are both worth 0.
    np.testing.assert_array_equal(got, [[0.5, 0.5], [-0.5, -0.5]])


@pytest.mark.parametrize("normalize_by_std", [True, False])
@pytest.mark.parametrize("tree", DRAWN.values(), ids=DRAWN)
def test_without_step_advantages_it_is_tree_grpo(tree: DrawnTree, normalize_by_std: bool) -> None:
    none = OmegaConf.create({"gigpo": {"step_advantage_w": 0.0}, "gamma": 0.9})
    got = estimate("gigpo", tree.leaves, normalize_by_std=normalize_by_std, options=none)
    assert got == estimate("tree_grpo", tree.leaves, normalize_by_std=normalize_by_std)


@pytest.mark.parametrize("name", ["gigpo", "tree_grpo"])
def test_where_every_state_is_distinct_it_is_verls_grpo(name: str) -> None:
    """Sessions of one leaf, every step from a state of its own; rewards anywhere."""
    generator = np.random.default_rng(1)
    rewards = torch.tensor(generator.normal(size=(6, 5)))
    uids = np.array(["u", "v", "u", "u", "v", "v"], dtype=object)
    rows = rows_of(
        keys=[f"{uid}_{row}_0" for row, uid in enumerate(uids)],
        sequences=[np.arange(7)] * 6,
        response_lens=[5] * 6,
        calls=[[Call(2, 4, f"{row} first"), Call(5, 7, f"{row} second")] for row in range(6)],
    )
    mask = torch.tensor([[1, 1, 0, 1, 1]] * 6)
    with announce_rows(rows):
        got, _ = ESTIMATORS[name](token_level_rewards=rewards, response_mask=mask, config={"gamma": 0.9})
    expected, _ = compute_grpo_outcome_advantage(token_level_rewards=rewards, response_mask=mask, index=uids)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_where_every_session_is_one_step_it_is_verls_grpo_twice() -> None:
    """The prompt is then the state of all steps, so that both parts are the same."""
    leaves = [Leaf(f"{'uv'[row % 2]}_{row}_0", "P", "abcd"[: 1 + row % 4], reward) for row, reward in enumerate([
        0.0, 1.0, 0.5, -1.0, 2.0, 0.25])]  # fmt: skip
    got = estimate("gigpo", leaves, width=4, options={"gamma": 0.3})
    expected, _ = compute_grpo_outcome_advantage(
        token_level_rewards=torch.tensor([[leaf.reward, 0, 0, 0] for leaf in leaves], dtype=torch.float64),
        response_mask=torch.ones(6, 4),
        index=np.array([leaf.key[0] for leaf in leaves], dtype=object),
    )
    for row, leaf in enumerate(leaves):
        assert got[leaf.key] == pytest.approx((2 * expected[row, : len(leaf.response)]).tolist(), rel=1e-9)


@st.composite
def sessions_with_tools(draw: st.DrawFn) -> list[Leaf]:
    """Draw sessions over two letters and a tool's T, so that states and steps recur everywhere."""
    leaves = []
    for uid in range(draw(st.integers(1, 2))):
        for session in range(draw(st.integers(1, 3))):
            for leaf in range(draw(st.integers(1, 4))):
                turns = draw(st.lists(st.sampled_from(["a", "b", "ab"]), min_size=1, max_size=3))
                prompt = draw(st.sampled_from(["p", "q"]))
                reward = draw(st.integers(-4, 4)) / 4
                leaves.append(Leaf(f"{uid}_{session}_{leaf}", prompt, "T".join(turns), reward, untrained="T"))
    return draw(st.permutations(leaves))


def naive(leaves: Sequence[Leaf], *, gamma: float) -> dict[str, list[float]]:
    """Follow the definition: dicts of strings. `estimate` puts half of a reward on the first and on the last token."""
    values = defaultdict(list)
    for leaf in leaves:
        tokens, turns = leaf.prompt, leaf.response.split("T")
        for number, turn in enumerate(turns):
            tokens += ("T" if number else "") + turn
            first = leaf.reward / 2 if number == 0 else 0.0
            value = first + leaf.reward / 2 * gamma ** (len(turns) - 1 - number)
            values[(*leaf.key.split("_")[:2], len(tokens) - len(turn), tokens)].append(value)
    states = defaultdict(list)
    for (uid, _, start, tokens), own in values.items():
        states[uid, tokens[:start]].append(sum(own) / len(own))
    result = {}
    for leaf in leaves:
        tokens, result[leaf.key] = leaf.prompt, []
        uid, session = leaf.key.split("_")[:2]
        for number, turn in enumerate(leaf.response.split("T")):
            result[leaf.key] += [0.0] * (number > 0)
            tokens += "T" * (number > 0)
            own, state = values[uid, session, len(tokens), tokens + turn], states[uid, tokens]
            result[leaf.key] += [sum(own) / len(own) - sum(state) / len(state)] * len(turn)
            tokens += turn
    return result


@settings(derandomize=True, deadline=None, max_examples=200)
@given(leaves=sessions_with_tools(), gamma=st.sampled_from([1.0, 0.5]))
def test_agrees_with_the_definition(leaves: list[Leaf], gamma: float) -> None:
    got = estimate("gigpo", leaves, normalize_by_std=False, options={"gamma": gamma})
    of_leaves = estimate("tree_grpo", leaves, normalize_by_std=False)
    for key, values in naive(leaves, gamma=gamma).items():
        step = np.subtract(got[key], of_leaves[key])
        assert step == pytest.approx(values, abs=1e-12), key


def test_calls_of_rows_from_three_sources() -> None:
    is_trained = np.array([0, 0, 1, 1, 1, 0, 1, 0], dtype=bool)
    # A loop's own: calls at 2, 4 and 6, and one whose tokens were cut off.
    states = {"call_states": [(2, None), (4, "s"), (6, None), (9, "cut")], "recorded_calls": [(0, "root", 2, 5, 1, 1)]}
    assert calls_of_row(states, is_trained=is_trained) == [Call(2, 4), Call(4, 5, "s"), Call(6, 7)]
    # The last as rows say it that an earlier release stored.
    recorded = {"recorded_calls": [(0, "root", 2, 4, 1, 2), (3, "fork", 4, 5, None, None), (4, "continuation", 6, 7)]}
    assert calls_of_row(recorded, is_trained=is_trained) == [Call(2, 4), Call(4, 5), Call(6, 7)]
    assert calls_of_row({}, is_trained=is_trained) == [Call(2, 5), Call(6, 7)]
    assert calls_of_row({}, is_trained=np.ones(2, dtype=bool)) == [Call(0, 2)]
