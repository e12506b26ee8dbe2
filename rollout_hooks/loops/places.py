"""Where a search tree is expanded next: a policy is one function, and one row of `POLICIES`.

    prompt ──┬── a ── result ──┬── b ── 1        turns a to e, rewards 1, 0 and 1
             │                 └── c ── 0        beginnings:  None: a,        a: b,      d: e
             └── d ── result ───── e ── 1        outcomes:    None: 1, 0, 1,  a: 1, 0,   d: 1

A place is a position in a turn from which all is sampled anew: the beginning of b, which is that of c; or a token of e.
Before each round ``choose(trees, budget, rng=rng)`` names at most `budget` places for all trees of a session together.
It reads the turns and how uncertain each token was, the leaves and their rewards, and which places were expanded
before. All randomness comes from `rng`.

Legend: N tokens of one call.
"""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from verl.workers.rollout.replica import TokenOutput

from rollout_hooks.loops.turns import Step


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A turn of a search tree. `parent` is the turn before it on its path, None behind the prompt."""

    step: Step
    parent: "Turn | None"

    def path(self) -> "list[Turn]":
        """Return the turns from the prompt to this one, which is last."""
        return [*(self.parent.path() if self.parent else []), self]


@dataclass(frozen=True, slots=True)
class Place:
    """A place to expand: a turn, and the position on its path from which all tokens are sampled anew."""

    turn: Turn
    position: int


@dataclass(slots=True)
class SearchTree:
    """What is known of one tree when its places are chosen.

    `uncertainty` is that of the loop: an output of N tokens to (N,) nats. A reward is None where the loop gives it
    later, in `reward_leaves`.
    """

    uncertainty: Callable[[TokenOutput], np.ndarray]
    turns: list[Turn] = field(default_factory=list)  # In the order in which their chains were started
    leaves: list[tuple[Turn, float | None]] = field(default_factory=list)  # The last turn of each, and its reward
    expanded: set[Place] = field(default_factory=set)

    def beginnings(self) -> dict[Turn | None, Place]:
        """Return the place behind the results of each turn that others follow, in their order; None is the prompt."""
        first: dict[Turn | None, Place] = {}
        for turn in self.turns:
            first.setdefault(turn.parent, Place(turn, turn.step.turn.start))
        return first

    def outcomes(self, success: float) -> dict[Turn | None, list[bool]]:
        """Return for each of `beginnings` whether the rewards of the leaves below are at least `success`.

        Raises:
            ValueError: If a leaf has no reward yet.
        """
        below: dict[Turn | None, list[bool]] = {}
        for last, reward in self.leaves:
            if reward is None:
                raise ValueError(
                    "branpo and trace read the rewards of leaves during the search, and `leaf_reward` gave None: let "
                    "it return a number, or select random, entropy or arpo"
                )
            for turn in last.path():
                below.setdefault(turn.parent, []).append(reward >= success)
        return below


Choose = Callable[..., Sequence[Place]]
"""A policy. Each of the trees that it gets has a turn; arguments beside `trees`, `budget` and `rng` need defaults."""


def random_turns(trees: Sequence[SearchTree], budget: int, *, rng: random.Random) -> list[Place]:
    """Draw turns behind at least one tool result, equally many of each tree: Tree-GRPO (arXiv 2509.21240).

    Without replacement while there are enough. The prompt is a place only in a tree without another one.
    """
    places = []
    for tree in trees:
        prompt, *later = tree.beginnings().values()
        found, k = later or [prompt], budget // len(trees)
        places += rng.sample(found, k) if len(found) >= k else rng.choices(found, k=k)
    return places


def uncertain_tokens(trees: Sequence[SearchTree], budget: int, *, rng: random.Random) -> list[Place]:
    """Take the tokens that the model was least certain of, equally many of each tree: TreeRL (arXiv 2506.11902).

    Each token once. Of equally uncertain ones the earlier one.
    """
    del rng
    places = []
    for tree in trees:
        found = []
        for turn in tree.turns:
            values = tree.uncertainty(turn.step.turn.output)
            start = turn.step.end.position - len(values)
            tokens = [(float(value), Place(turn, start + i)) for i, value in enumerate(values)]
            found += [token for token in tokens if token[1] not in tree.expanded]
        places += [place for _, place in heapq.nlargest(budget // len(trees), found, key=lambda token: token[0])]
    return places


def arpo(
    trees: Sequence[SearchTree],
    budget: int,
    *,
    rng: random.Random,
    alpha: float = 0.5,
    beta: float = 0.2,
    tau: float = 0.5,
    num_tokens: int = 20,
) -> list[Place]:
    """Take turns behind tool results which made the model less certain: ARPO (arXiv 2507.19849, section 3.1).

        P = alpha + beta (H - H_initial),    a place where P > tau

    H is the mean uncertainty of the turn's first `num_tokens` tokens, H_initial that of the first turn of its path. The
    paper sums over the tokens and divides by the size of the vocabulary: another scale of beta, without effect while
    alpha equals tau. (The authors' code, commit e257337, branches with probability P.) Each place once, the largest P
    first. As in the paper, what is left of the budget goes to new chains from the prompts.
    """
    del rng
    found = []
    for tree in trees:
        for before, place in tree.beginnings().items():
            if before is not None and place not in tree.expanded:
                turns = place.turn, place.turn.path()[0]
                now, initial = (tree.uncertainty(each.step.turn.output)[:num_tokens].mean() for each in turns)
                found.append((alpha + beta * float(now - initial), place))
    branching = [each for each in found if each[0] > tau]
    chosen = [place for _, place in heapq.nlargest(budget, branching, key=lambda each: each[0])]
    prompts = [tree.beginnings()[None] for tree in trees]
    return chosen + [prompts[i % len(prompts)] for i in range(budget - len(chosen))]


def branpo(trees: Sequence[SearchTree], budget: int, *, rng: random.Random, success: float = 0.5) -> list[Place]:
    """Cut leaves in their last turns until a right and a wrong one part there: BranPO (arXiv 2602.03719).

    A leaf is right if its reward is at least `success`. Of each leaf the last turn is sampled anew. If all leaves
    behind that place turn out alike, the next round goes one turn further back, and so on, as far as the authors' code
    (commit 7863ebc) goes for that difficulty, with a the share of right leaves:

        1 turn if a = 1,    3 if a < 1/2 and the leaf is wrong,    2 if a <= 3/4 or it is wrong,    else none

    Shorter cuts first, then wrong leaves; each place once. There are fewer than `budget` where all leaves have what
    they are compared with. The authors also look for shorter ways to a right answer; that is not done here.
    """
    del rng
    below = [tree.outcomes(success) for tree in trees]
    outcomes = [each for found in below for each in found.get(None, [])]
    share = sum(outcomes) / max(len(outcomes), 1)
    cuts: dict[Place, tuple[int, bool]] = {}
    for tree, found in zip(trees, below, strict=True):
        places = tree.beginnings()
        for last, reward in tree.leaves:
            is_right = reward is not None and reward >= success
            tail = last.path()[::-1][: _max_cut(share, is_right)]
            for num_turns, turn in enumerate(tail, start=1):
                if len(set(found[turn.parent])) == 2:
                    break
                if places[turn.parent] not in tree.expanded:
                    cuts.setdefault(places[turn.parent], (num_turns, is_right))
                    break
    return heapq.nsmallest(budget, cuts, key=lambda place: cuts[place])


def _max_cut(share: float, is_right: bool) -> int:
    if share == 1:
        return 1
    if share < 0.5 and not is_right:
        return 3
    return 2 if share <= 0.75 or not is_right else 0


def trace(trees: Sequence[SearchTree], budget: int, *, rng: random.Random, success: float = 0.5) -> list[Place]:
    """Take beginnings of turns whose outcome is least decided, the largest p (1 - p): TRACE (arXiv 2606.11119).

        p = (right + 1) / (leaves + 2)    of the leaves below (Laplace's rule of succession)

    A leaf is right if its reward is at least `success`. TRACE gives continuations to the prefixes that most probably
    lead to mixed rewards. It learns p from the history of a prefix; here p is what the search has found so far, so the
    first round draws: all places of a lone chain have the same p. Prompts are places too, and a place may come again
    in a later round. Equal ones are drawn.
    """
    found = []
    for tree in trees:
        outcomes = tree.outcomes(success)
        for before, place in tree.beginnings().items():
            if before in outcomes:  # not where every chain failed
                num_right, num_leaves = sum(outcomes[before]), len(outcomes[before])
                # In integers, so that p and 1 - p are equal.
                undecided = (num_right + 1) * (num_leaves - num_right + 1) / (num_leaves + 2) ** 2
                found.append((undecided, rng.random(), place))
    return [place for _, _, place in heapq.nlargest(budget, found, key=lambda each: each[:2])]


POLICIES: dict[str, Choose] = {
    "random": random_turns,
    "entropy": uncertain_tokens,
    "arpo": arpo,
    "branpo": branpo,
    "trace": trace,
}
"""By the names that the option `select` of `tree_search` takes."""
