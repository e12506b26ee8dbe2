"""Open nodes by hand on drawn trees; how a step's prompts are shared out; what a checkpoint has of it."""

from pathlib import Path

import numpy as np
import pytest
from verl.utils import tensordict_utils as tu

from rollout_hooks.capture.starting_point import STARTING_POINT, StartingPoint
from verl_tree.records import CallRun, StoredLeaf, StoredTree
from verl_tree.trainer.rows.living import FILE, LivingTrees, open_node

PROMPT = [1, 2, 3]


def leaf(session, turns, reward, *, role=None, first_call=0):
    """Return a leaf: turns of sampled tokens, each followed by two tokens of the environment."""
    ids, runs = list(PROMPT), []
    for number, turn in enumerate(turns):
        if number:
            ids += [90, 91]
        runs.append(CallRun(first_call + number, "root", len(ids), len(ids) + len(turn)))
        ids += turn
    is_trained = np.zeros(len(ids), dtype=bool)
    for run in runs:
        is_trained[run.start : run.end] = True
    rewards = np.zeros(len(ids) - len(PROMPT))
    rewards[-1] = reward
    log_probs = np.where(is_trained, -np.arange(len(ids)) / 10, np.nan)
    return StoredLeaf(
        session, 0, np.array(ids), len(PROMPT), is_trained, log_probs, rewards, calls=tuple(runs), role=role
    )


def tree(*leaves, uid="a"):
    return StoredTree(1, uid, tuple(leaves))


def test_the_node_that_teaches_most_for_a_token() -> None:
    """Four sessions part at the prompt, with 6 tokens to go; two go on together and part in their last turn."""
    point, weight = open_node(
        tree(
            leaf(0, [[10, 11, 12], [20, 21, 22]], 1.0),
            leaf(1, [[10, 11, 12], [20, 21, 23]], 0.0),
            leaf(2, [[13, 11, 12], [20, 21, 22]], 0.0),
            leaf(3, [[14, 11, 12], [20, 21, 22]], 0.0),
        )
    )
    # At the prompt: 3/16 * 3/5 / 6 = .019. Behind 20 21: 1/4 * 1/3 / 1 = .083.
    assert point.token_ids.tolist() == [*PROMPT, 10, 11, 12, 90, 91, 20, 21]
    assert point.is_sampled.tolist() == [False] * 3 + [True] * 3 + [False] * 2 + [True] * 2
    assert point.is_inside_a_turn
    assert weight == pytest.approx(1 / 12)
    assert point.log_probs[3:6].tolist() == pytest.approx([-0.3, -0.4, -0.5])


def test_where_all_leaves_end_nobody_starts() -> None:
    """Two sessions say the same and earn differently, as leaves do that get a copy of their session's reward."""
    same = leaf(0, [[10, 11]], 1.0), leaf(1, [[10, 11]], 0.0)
    point, _ = open_node(tree(*same, leaf(2, [[10, 11], [20]], 0.0), leaf(3, [[12, 11]], 1.0)))
    assert len(point.token_ids) == 0, "behind 10 11 one leaf goes on, and there is nothing to compare it with"


def test_the_prompt_may_be_the_best_node() -> None:
    leaves = [leaf(number, [[10 + number, 5]], float(number % 2)) for number in range(8)]
    point, weight = open_node(tree(*leaves))
    assert len(point.token_ids) == 0
    assert weight == pytest.approx(1 / 4 * 7 / 9 / 2)


def test_a_path_ends_with_a_sampled_token() -> None:
    """The environment answers two sessions differently: they part behind what it said first."""
    one, other = leaf(0, [[10, 11], [20]], 1.0), leaf(1, [[10, 11], [20]], 0.0)
    other.token_ids[len(PROMPT) + 3] = 92
    point, _ = open_node(tree(one, other))
    assert point.token_ids.tolist() == [*PROMPT, 10, 11]
    assert not point.is_inside_a_turn


def test_rewards_are_compared_within_roles() -> None:
    assert open_node(tree(leaf(0, [[10]], 1.0, role="a"), leaf(1, [[11]], 0.0, role="b"))) is None
    assert open_node(tree(leaf(0, [[10]], 1.0, role="a"), leaf(1, [[11]], 0.0, role="a"))) is not None
    assert open_node(tree(leaf(0, [[10]], 1.0), leaf(1, [[11]], 1.0))) is None


def test_contexts_of_their_own_start_nothing() -> None:
    leaves = (leaf(0, [[10]], 1.0, first_call=1), leaf(1, [[11]], 0.0, first_call=1))
    assert open_node(tree(*leaves)) is None


def test_a_group_that_started_at_a_node_keeps_its_path() -> None:
    old = leaf(0, [[10, 11, 12], [20, 21, 22]], 1.0)
    start, _ = open_node(tree(old, leaf(1, [[10, 11, 12], [20, 21, 23]], 0.0)))
    new = []
    for number, end in enumerate(([30, 31, 32], [30, 31, 33], [30, 34, 32])):
        ids = [*start.token_ids.tolist(), *end]
        run = CallRun(1, "root", len(start.token_ids), len(ids))
        is_trained = np.arange(len(ids)) >= run.start
        rewards = np.zeros(len(ids) - len(PROMPT))
        rewards[-1] = float(number == 0)
        values = np.full(len(ids), -0.5)
        new.append(StoredLeaf(number, 0, np.array(ids), 3, is_trained, values, rewards, calls=(run,)))
    point, _ = open_node(tree(*new), start=start)
    assert point.token_ids.tolist() == [*start.token_ids.tolist(), 30, 31]
    assert point.is_sampled.tolist() == [*start.is_sampled.tolist(), True, True]
    assert point.log_probs[:10].tolist() == pytest.approx(start.log_probs.tolist(), nan_ok=True)
    assert point.is_inside_a_turn


class Data:
    """A data set of numbered prompts, `size` of them at a time."""

    def __init__(self, size=4):
        self.size, self.num, self.names = size, 0, 0

    def fetch(self):
        numbers = list(range(self.num, self.num + self.size))
        self.num += self.size
        return tu.get_tensordict({"number": numbers, "uid": [f"x{each}" for each in numbers]})

    def name(self, batch):
        uids = [f"{self.names + row:03d}" for row in range(len(batch))]
        self.names += len(batch)
        tu.assign_non_tensor_stack(batch, "uid", uids)


def run_step(living, data, step, *, rewards):
    """Draw prompts, let each group earn two rewards, and learn; return the numbers, the points and the metrics."""
    batch = living.next_prompts(data.fetch, name=data.name, step=step)
    points = list(batch[STARTING_POINT])
    trees = [
        tree(leaf(0, [[10]], rewards[0]), leaf(1, [[11]], rewards[1]), uid=str(uid))
        if point is None
        else tree(leaf(0, [[12]], 1.0), leaf(1, [[13]], 1.0), uid=str(uid))
        for uid, point in zip(batch["uid"], points, strict=True)
    ]
    return list(batch["number"]), points, living.learn(trees, step=step)


def test_prompts_wait_where_nodes_take_their_places() -> None:
    living, data = LivingTrees(num_prompts=4, share=0.5, max_age=4, seed=0), Data()
    numbers, points, metrics = run_step(living, data, 1, rewards=(1.0, 0.0))
    assert numbers == [0, 1, 2, 3]
    assert points == [None] * 4
    assert metrics == {"tree/living/groups": 0.0, "tree/living/nodes": 4.0}
    fresh = numbers
    for step in range(2, 8):
        numbers, points, metrics = run_step(living, data, step, rewards=(1.0, 0.0))
        assert [point is None for point in points] == [True, True, False, False]
        assert all(isinstance(point, StartingPoint) for point in points[2:])
        assert set(numbers[2:]) <= set(fresh), "a node comes with the row of its prompt"
        fresh = fresh + numbers[:2]
        assert metrics["tree/living/groups"] == 0.5
        assert metrics["tree/living/age"] >= 1
    # No prompt was left out, none came twice.
    assert fresh == list(range(len(fresh)))


def test_prompts_that_are_fetched_one_by_one_draw_each_for_itself() -> None:
    """As with `algorithm.filter_groups`, which refills a step."""
    living, data = LivingTrees(num_prompts=1, share=0.5, max_age=100, seed=0), Data(size=1)
    shares = []
    for step in range(1, 11):
        batches = [living.next_prompts(data.fetch, name=data.name, step=step) for _ in range(8)]
        points = [point for batch in batches for point in batch[STARTING_POINT]]
        leaves = leaf(0, [[10]], 1.0), leaf(1, [[11]], 0.0)
        living.learn([tree(*leaves, uid=str(uid)) for batch in batches for uid in batch["uid"]], step=step)
        shares.append(sum(point is not None for point in points) / len(points))
    assert shares[0] == 0
    assert 0 < min(shares[1:]) <= max(shares[1:]) < 1
    assert np.mean(shares[1:]) == pytest.approx(0.5, abs=0.15)


def test_old_nodes_are_dropped() -> None:
    living, data = LivingTrees(num_prompts=4, share=1.0, max_age=2, seed=0), Data()
    run_step(living, data, 1, rewards=(1.0, 0.0))
    _, points, metrics = run_step(living, data, 4, rewards=(1.0, 1.0))
    assert points == [None] * 4
    assert metrics["tree/living/nodes"] == 0
    living, data = LivingTrees(num_prompts=4, share=1.0, max_age=3, seed=0), Data()
    run_step(living, data, 1, rewards=(1.0, 0.0))
    _, points, metrics = run_step(living, data, 4, rewards=(1.0, 1.0))
    assert None not in points
    assert metrics["tree/living/age"] == 3


def test_draws_are_repeatable_and_prefer_weight() -> None:
    def drawn(seed, step):
        living, data = LivingTrees(num_prompts=4, share=0.25, max_age=100, seed=seed), Data()
        batch = living.next_prompts(data.fetch, name=data.name, step=1)
        uids = [str(uid) for uid in batch["uid"]]
        long = leaf(0, [[10] + [7] * 60], 1.0), leaf(1, [[11] + [7] * 60], 0.0)
        short = leaf(0, [[10]], 1.0), leaf(1, [[11]], 0.0)
        living.learn([tree(*(long if row else short), uid=uid) for row, uid in enumerate(uids)], step=1)
        batch = living.next_prompts(data.fetch, name=data.name, step=step)
        return list(batch["number"])[3]

    assert [drawn(3, step) for step in range(2, 12)] == [drawn(3, step) for step in range(2, 12)]
    # The short one weighs 61 times the others: it is drawn with a chance of 61 in 64.
    assert sum(drawn(seed, 2) == 0 for seed in range(60)) > 45


def test_a_checkpoint_has_nodes_and_waiting_prompts(tmp_path: Path) -> None:
    living, data = LivingTrees(num_prompts=4, share=0.5, max_age=4, seed=0), Data()
    for step in (1, 2, 3):
        run_step(living, data, step, rewards=(1.0, 0.0))
    living.save(tmp_path)
    resumed, again = LivingTrees(num_prompts=4, share=0.5, max_age=4, seed=0), Data()
    again.num, again.names = data.num, data.names
    resumed.load(tmp_path)
    for step in (4, 5, 6):
        numbers, points, metrics = run_step(living, data, step, rewards=(1.0, 0.0))
        other_numbers, other_points, other_metrics = run_step(resumed, again, step, rewards=(1.0, 0.0))
        assert numbers == other_numbers
        assert metrics == other_metrics
        assert [p and p.token_ids.tolist() for p in points] == [p and p.token_ids.tolist() for p in other_points]


def test_a_checkpoint_without_them_starts_anew(tmp_path: Path) -> None:
    living = LivingTrees(num_prompts=4, share=0.5, max_age=4, seed=0)
    living.load(tmp_path)
    assert not (tmp_path / FILE).exists()
    numbers, points, _ = run_step(living, Data(), 9, rewards=(1.0, 0.0))
    assert numbers == [0, 1, 2, 3]
    assert points == [None] * 4


def test_rollouts_from_files_are_left_alone() -> None:
    living, data = LivingTrees(num_prompts=4, share=0.5, max_age=4, seed=0), Data()
    living.next_prompts(data.fetch, name=data.name, step=1)
    metrics = living.learn([tree(leaf(0, [[10]], 1.0), leaf(1, [[11]], 0.0), uid="other")], step=1)
    assert metrics == {"tree/living/groups": 0.0, "tree/living/nodes": 0.0}
