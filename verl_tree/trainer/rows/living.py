"""Nodes of trained trees whose outcome is open, and the prompts of a step that start there (`tree.living`).

A group of sessions whose rewards are all equal teaches nothing. Where the leaves below a node of a trained tree earned
different rewards, a group that starts there is likely to differ again, and it generates only what comes after the node.

A whole group starts at one node, so its baseline is that node's. The data set's prompts whose places nodes take wait
for the next step. A node that was drawn is gone, unless the leaves of its group differ again.
"""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from rollout_hooks.capture.starting_point import STARTING_POINT, StartingPoint
from verl_tree.records import StoredLeaf, StoredTree

FILE = "living_trees.pt"
"""In a checkpoint."""


@dataclass(frozen=True, slots=True, eq=False)
class OpenNode:
    """A node of a tree from which sessions may start.

    Attributes:
        prompt: The data set's row, as a batch of one.
        point: The path to the node.
        weight: How much the rewards below it differ, for each token that a session generates from there.
        born: The step that sampled the first tokens of the path.
    """

    prompt: TensorDict
    point: StartingPoint
    weight: float
    born: int


class LivingTrees:
    """The open nodes of a run, and the prompts that wait because nodes took their places.

    Args:
        num_prompts: Of one fetch from the data set.
        share: How many of them start at nodes, if there are so many; between 0 and 1.
        max_age: Steps after which a node is dropped, because its tokens are those of old weights.
        seed: Of the draws.
    """

    def __init__(self, *, num_prompts: int, share: float, max_age: int, seed: int) -> None:
        self._num_prompts, self._share, self._max_age, self._seed = num_prompts, share, max_age, seed
        self._nodes: list[OpenNode] = []
        self._waiting: list[TensorDict] = []
        self._running: dict[str, tuple[TensorDict, OpenNode | None]] = {}

    @classmethod
    def from_config(cls, config: DictConfig) -> Self | None:
        """Return what `tree.living` asks for; None if no prompt is to start at a node."""
        if not config.tree.living:
            return None
        return cls(
            num_prompts=config.data.get("gen_batch_size") or config.data.train_batch_size,
            share=config.tree.living,
            max_age=config.tree.living_steps,
            seed=config.actor_rollout_ref.actor.data_loader_seed,
        )

    def next_prompts(
        self, fetch: Callable[[], TensorDict], *, name: Callable[[TensorDict], None], step: int
    ) -> TensorDict:
        """Return as many prompts as `fetch` does, those of nodes last, with the column `STARTING_POINT`.

        `name` gives each its final uid.
        """
        nodes = self._draw(step=step)
        num_fresh = self._num_prompts - len(nodes)
        if len(self._waiting) < num_fresh:
            self._waiting += _rows(fetch())
        rows, self._waiting = self._waiting[:num_fresh], self._waiting[num_fresh:]
        rows += [node.prompt for node in nodes]
        starts = [None] * num_fresh + nodes
        batch = tu.concat_tensordict(rows)
        name(batch)
        self._running.update(zip(map(str, batch["uid"]), zip(rows, starts, strict=True), strict=True))
        points = [None if node is None else node.point for node in starts]
        tu.assign_non_tensor_stack(batch, STARTING_POINT, points)
        return batch

    def learn(self, trees: Sequence[StoredTree], *, step: int) -> dict[str, float]:
        """Take over the open nodes of a step's trees, one of each; return the metrics of the step."""
        started: list[OpenNode] = []
        num_equal = 0
        for tree in trees:
            if tree.uid not in self._running:
                continue  # of rollouts that are replayed from files
            prompt, start = self._running[tree.uid]
            if start is not None:
                started.append(start)
                num_equal += not _spread(tree.leaves)
            found = open_node(tree, start=None if start is None else start.point)
            if found is not None:
                point, weight = found
                self._nodes.append(OpenNode(prompt, point, weight, step if start is None else start.born))
        # Prompts without a trajectory are among them.
        self._running.clear()
        metrics = {"groups": len(started) / len(trees), "nodes": float(len(self._nodes))}
        if started:
            metrics["age"] = float(np.mean([step - node.born for node in started]))
            metrics["equal_reward_groups"] = num_equal / len(started)
        return {f"tree/living/{name}": value for name, value in metrics.items()}

    def _draw(self, *, step: int) -> list[OpenNode]:
        """Take nodes out of the store, with a chance that grows with their weight and falls with their age."""
        self._nodes = [node for node in self._nodes if step - node.born <= self._max_age]
        # Where groups are filtered, a step fetches one prompt after the other.
        rng = random.Random(f"{self._seed}/{step}/{len(self._running)}")
        # A share of .3 of 4 prompts is 1 or 2 of them.
        num_wanted = min(int(self._share * self._num_prompts + rng.random()), len(self._nodes))
        # The largest of u^(1 / weight) are a weighted draw without replacement (Efraimidis and Spirakis, 2006); here
        # their logarithms, because small weights would make them all 0.
        weights = [node.weight / (1 + step - node.born) for node in self._nodes]
        lots = [math.log(max(rng.random(), 1e-300)) / weight for weight in weights]
        drawn = sorted(range(len(lots)), key=lambda number: -lots[number])[:num_wanted]
        nodes = [self._nodes[number] for number in sorted(drawn)]
        self._nodes = [node for number, node in enumerate(self._nodes) if number not in set(drawn)]
        return nodes

    def save(self, folder: Path) -> None:
        """Write what a resumed run needs into a checkpoint."""
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"nodes": self._nodes, "waiting": self._waiting}, folder / FILE)

    def load(self, folder: Path) -> None:
        """Read what a checkpoint has; one of a run without living trees has nothing."""
        if (folder / FILE).is_file():
            state: Mapping[str, Any] = torch.load(folder / FILE, weights_only=False)
            self._nodes, self._waiting = state["nodes"], state["waiting"]


def open_node(tree: StoredTree, *, start: StartingPoint | None = None) -> tuple[StartingPoint, float] | None:
    """Find the node of a group's tree where a session teaches most for each token that it generates, and how much.

    That is the variance of the rewards of the n leaves that go on behind a node, within roles, times (n - 1) / (n + 1),
    because that of few leaves is chance, over the mean number of tokens that they sampled behind it. `start` is where
    the sessions of the group had started. None if the leaves of no node differ.

    Only paths that begin as their sessions did are looked at: a context of its own, such as a summary's, needs the
    calls before it.
    """
    forest, best = tree.forest(), None
    sampled = [_sampled(leaf, start) for leaf in tree.leaves]
    num_old = 0 if start is None else len(start.token_ids)
    bounds = (forest.node_first_leaf, forest.node_last_leaf, forest.node_end)
    nodes = zip(*(each.tolist() for each in bounds), strict=True)
    for first, last, end in nodes:
        if end < num_old:
            continue
        below = forest.order[first:last].tolist()
        able = [leaf for leaf in below if _begins_its_session(tree.leaves[leaf], start)]
        if not able:
            continue
        # The longest goes on behind the node, if any does.
        leaf = max(able, key=lambda each: len(tree.leaves[each].token_ids))
        point = _point(tree.leaves[leaf], sampled[leaf], end, start)
        num_left = {each: int(sampled[each][len(point.token_ids) :].sum()) for each in below}
        going_on = [each for each in below if num_left[each]]
        if leaf not in going_on:
            continue
        spread = _spread([tree.leaves[each] for each in going_on])
        shrunk = spread * (len(going_on) - 1) / (len(going_on) + 1)
        weight = float(shrunk / np.mean([num_left[each] for each in going_on]))
        if weight and (best is None or weight > best[1]):
            best = point, weight
    return best


def _spread(leaves: Sequence[StoredLeaf]) -> float:
    """Return the variance of rewards within roles."""
    rewards: dict[str | None, list[float]] = defaultdict(list)
    for leaf in leaves:
        if leaf.reward is not None:
            rewards[leaf.role].append(leaf.reward)
    return float(sum(np.var(each) * len(each) for each in rewards.values()) / len(leaves))


def _begins_its_session(leaf: StoredLeaf, start: StartingPoint | None) -> bool:
    if start is not None and len(start.token_ids):
        return start.is_passed_by(leaf.token_ids)
    return bool(leaf.calls) and leaf.calls[0].call == 0


def _sampled(leaf: StoredLeaf, start: StartingPoint | None) -> np.ndarray:
    """Return which tokens of a leaf the model sampled, now or before the session started: (L,) bool."""
    sampled = np.zeros(len(leaf.token_ids), dtype=bool)
    for run in leaf.calls:
        sampled[run.start : run.end] = True
    if start is not None and start.is_passed_by(leaf.token_ids):
        sampled[: len(start.token_ids)] |= start.is_sampled
    return sampled


def _point(leaf: StoredLeaf, sampled: np.ndarray, end: int, start: StartingPoint | None) -> StartingPoint:
    """Return the path of the first `end` tokens of a leaf, without what its environment said last."""
    before = np.flatnonzero(sampled[:end])
    num_tokens = int(before[-1]) + 1 if before.size else 0
    is_inside = num_tokens > 0 and bool(sampled[num_tokens : num_tokens + 1].any())
    log_probs = leaf.log_probs[:num_tokens].copy()
    if start is not None:
        num_known = min(num_tokens, len(start.log_probs))
        log_probs[:num_known] = start.log_probs[:num_known]
    return StartingPoint(leaf.token_ids[:num_tokens].copy(), sampled[:num_tokens].copy(), log_probs, is_inside)


def _rows(batch: TensorDict) -> list[TensorDict]:
    """Return each row of a batch as a batch of one."""
    return [tu.index_select_tensor_dict(batch, [row]) for row in range(len(batch))]
