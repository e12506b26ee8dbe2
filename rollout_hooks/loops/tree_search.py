"""The agent loop `tree_search`: a session is a set of search trees, grown by expanding places on what was sampled.

    prompt ──┬── turn ── result ──┬── turn ── answer              first chain of tree 1
             │                    └── another turn ── answer      expansion of the turn after the result
             └── turn ── result ──┬── tu│rn ── answer             first chain of tree 2
                                  └── tu│other rest ── answer     expansion at a token

M trees (`num_trees`) begin with one chain each: turns and tool results until an answer. In each of L rounds
(`num_rounds`), N places (`num_expansions`) of every tree are expanded by T new chains (`num_samples`), which become
part of the tree. That gives M (1 + L N T) leaves.

- `select="random"`: places are random turns behind at least one tool result (in a tree without one: its first turn).
  With T = 1 this is the search of Tree-GRPO (arXiv 2509.21240, M, N and L as there).
- `select="entropy"`: places are the generated tokens that the model was least certain of. The token is sampled again,
  with what follows it. This is the search of TreeRL (arXiv 2506.11902, M, N, L and T as there).

All chains of a session use its request id, so they go to one server and find their prefix in its cache.
"""

import asyncio
import inspect
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from typing_extensions import override
from verl.experimental.agent_loop.agent_loop import register
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.utils.reward_score import default_compute_score
from verl.workers.rollout.replica import TokenOutput

from rollout_hooks.loops.base import Branch, check_at_least
from rollout_hooks.loops.tool_turns import ToolTurnsLoop
from rollout_hooks.loops.turns import Step

SELECTIONS = ("random", "entropy")


@dataclass(frozen=True, slots=True)
class _Place:
    """A place to expand: a step, and the position on its path from which all tokens are sampled anew."""

    step: Step
    position: int


@dataclass(slots=True)
class _Tree:
    """The places of one tree that may be expanded."""

    first: Step | None = None  # The first turn of its first chain
    # All turns behind a tool result, in the order in which their chains were started; each context once.
    later: list[Step] = field(default_factory=list)
    # (uncertainty, place) of every generated token that has not been chosen yet.
    tokens: list[tuple[float, _Place]] = field(default_factory=list)


@register("tree_search")
class TreeSearchAgentLoop(ToolTurnsLoop):
    """Tool-calling agent loop that searches. docs/agent_loops.md explains its options.

    Every leaf gets a reward of its own from `leaf_reward`. A chain that fails is no leaf and fails nothing else; the
    session fails if no leaf is left. Estimators that compare within a tree take a session for a tree: for them set
    `num_trees` to 1 and `rollout.n` to M.
    """

    def __init__(
        self,
        *args: Any,
        num_trees: int = 1,
        num_expansions: int = 2,
        num_rounds: int = 1,
        num_samples: int = 1,
        select: str = "random",
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        check_at_least(1, num_trees=num_trees, num_expansions=num_expansions, num_samples=num_samples)
        check_at_least(0, num_rounds=num_rounds)
        if select not in SELECTIONS:
            raise ValueError(f"select={select!r}: must be one of {SELECTIONS}")
        self.num_trees, self.num_expansions = num_trees, num_expansions
        self.num_rounds, self.num_samples = num_rounds, num_samples
        self.select, self.seed = select, seed
        if select == "entropy":
            self.turn_sampling["logprobs"] = True
        self._score = get_custom_reward_fn(self.config) or default_compute_score

    async def leaf_reward(self, *, row: dict[str, Any], answer: str) -> float | None:
        """Return the reward of one leaf, whose last turn is `answer`; override it for a reward of your own.

        By default verl's reward function gives it (`reward.custom_reward_function`, else that of the row's
        `data_source`), which verl would call for the last leaf only. `row["extra_info"]` has the `tool_rewards` of the
        chain, as in verl. None is for a loop whose `reward_leaves` gives it.
        """
        score = self._score(
            data_source=row["data_source"],
            solution_str=answer,
            ground_truth=row["reward_model"]["ground_truth"],
            extra_info=row.get("extra_info"),
        )
        if inspect.isawaitable(score):
            score = await score
        return float(score["score"] if isinstance(score, dict) else score)

    def uncertainty(self, output: TokenOutput) -> np.ndarray:
        """Return how uncertain the model was of each of the N tokens that it generated: (N,) nats.

        It is the entropy of `output.extra_fields["top_log_probs"]` (N sequences of log-probs of the likeliest tokens)
        if a server gives them. verl 0.9.1's servers report the sampled tokens only; then it is their -log-prob.

        Raises:
            ValueError: If some token has no log-prob.
        """
        top = output.extra_fields.get("top_log_probs")
        if top is None:
            if output.log_probs is None or len(output.log_probs) != len(output.token_ids):
                raise ValueError("select='entropy': the LLM server returned no log-prob for some tokens; use 'random'")
            return -np.asarray(output.log_probs, dtype=np.float64)
        return np.array([-np.sum(np.exp(log_probs) * log_probs) for log_probs in map(np.asarray, top)])

    @override
    async def run_branches(self, root: Branch, **row: Any) -> None:
        # The root branch stays at the prompt and is no leaf.
        rng = random.Random(f"{self.seed}/{row['session_id']}/{root.token_ids}")
        trees = [_Tree() for _ in range(self.num_trees)]
        chains = list(zip(trees, root.fork(self.num_trees), strict=True))
        # A task group: no chain outlives the session, and an error in a hook ends the session with its cause.
        async with asyncio.TaskGroup() as tasks:
            first = [tasks.create_task(self._grow(branch, None, row=row)) for _, branch in chains]
        for (tree, _), task in zip(chains, first, strict=True):
            self._add(tree, task.result())
        for _ in range(self.num_rounds):
            grown = []
            async with asyncio.TaskGroup() as tasks:
                for tree in trees:
                    for place in self._choose(tree, rng):
                        for branch in place.step.end.fork(self.num_samples):
                            grown.append((tree, tasks.create_task(self._grow(branch, place, row=row))))
            for tree, task in grown:
                self._add(tree, task.result())

    async def _grow(self, branch: Branch, place: _Place | None, *, row: dict[str, Any]) -> list[Step]:
        """Run one chain to its answer and reward it; return its steps."""
        steps: list[Step] = []
        tools = self.row_tools(row)
        if place is None:
            answer = await self.converse(branch, list(row["raw_prompt"]), tools=tools, row=row, steps=steps)
        else:
            branch.rewind(place.position)
            step = place.step
            answer = await self.converse(
                branch, step.messages, tools=tools, row=row, number=step.number, start=step.turn.start, steps=steps
            )
        if answer is not None:
            extra_info = {**(row.get("extra_info") or {}), "tool_rewards": list(branch.tool_rewards)}
            reward = await self.leaf_reward(row={**row, "extra_info": extra_info}, answer=answer)
            branch.finish(reward, role=self.role("answer"))
        return steps

    def _add(self, tree: _Tree, steps: Sequence[Step]) -> None:
        """Make the steps of a chain part of a tree."""
        tree.first = tree.first or next(iter(steps), None)
        # The first step of a chain begins at the prompt or at the expanded place. The tree has both already.
        tree.later += steps[1:]
        if self.select == "entropy":
            for step in steps:
                values = self.uncertainty(step.turn.output)
                start = step.end.position - len(values)
                tree.tokens += [(float(value), _Place(step, start + i)) for i, value in enumerate(values)]

    def _choose(self, tree: _Tree, rng: random.Random) -> list[_Place]:
        """Return the places of a tree that this round expands; none if its first chain failed in its first turn."""
        if tree.first is None:
            return []
        if self.select == "entropy":
            tree.tokens.sort(key=lambda token: -token[0])  # stable: of equally uncertain ones the earlier one
            chosen, tree.tokens = tree.tokens[: self.num_expansions], tree.tokens[self.num_expansions :]
            return [place for _, place in chosen]
        steps = tree.later or [tree.first]
        draw = rng.sample(steps, self.num_expansions) if len(steps) >= self.num_expansions else None
        return [_Place(step, step.turn.start) for step in draw or rng.choices(steps, k=self.num_expansions)]
