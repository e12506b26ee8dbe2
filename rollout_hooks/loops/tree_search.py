"""The agent loop `tree_search`: a session is a set of search trees, grown by expanding places on what was sampled.

    prompt ──┬── turn ── result ──┬── turn ── answer              first chain of tree 1
             │                    └── another turn ── answer      expansion of the turn after the result
             └── turn ── result ──┬── tu│rn ── answer             first chain of tree 2
                                  └── tu│other rest ── answer     expansion at a token

M trees (`num_trees`) begin with one chain each: turns and tool results until an answer. In each of L rounds
(`num_rounds`), N places (`num_expansions`) of every tree are expanded by T new chains (`num_samples`), which become
part of the tree. That gives M (1 + L N T) leaves. Which places these are is said by a policy (`select`, see `places`).

All chains of a session use its request id, so they go to one server and find their prefix in its cache.
"""

import asyncio
import inspect
import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from typing_extensions import override
from verl.experimental.agent_loop.agent_loop import register
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.utils.reward_score import default_compute_score
from verl.workers.rollout.replica import TokenOutput

from rollout_hooks.loops.base import Branch, check_at_least
from rollout_hooks.loops.places import POLICIES, Choose, Place, SearchTree, Turn
from rollout_hooks.loops.tool_turns import ToolTurnsLoop
from rollout_hooks.loops.turns import Step


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
        select: str | Choose = "random",
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        check_at_least(1, num_trees=num_trees, num_expansions=num_expansions, num_samples=num_samples)
        check_at_least(0, num_rounds=num_rounds)
        choose = POLICIES.get(select) if isinstance(select, str) else select
        if not callable(choose):
            raise ValueError(
                f"select={select!r}: must be one of {', '.join(POLICIES)}, or a function (`_target_` with `_partial_`)"
            )
        self.num_trees, self.num_expansions = num_trees, num_expansions
        self.num_rounds, self.num_samples = num_rounds, num_samples
        self.select, self.seed, self._choose = select, seed, choose
        if select != "random":
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
                raise ValueError(
                    f"select={self.select!r}: the LLM server returned no log-prob for some tokens; use 'random'"
                )
            return -np.asarray(output.log_probs, dtype=np.float64)
        return np.array([-np.sum(np.exp(log_probs) * log_probs) for log_probs in map(np.asarray, top)])

    @override
    async def run_branches(self, root: Branch, **row: Any) -> None:
        # The root branch stays at the prompt and is no leaf.
        rng = random.Random(f"{self.seed}/{row['session_id']}/{root.token_ids}")
        trees = [SearchTree(self.uncertainty) for _ in range(self.num_trees)]
        await self._grow_all(zip(trees, root.fork(self.num_trees), [None] * self.num_trees, strict=True), row=row)
        for _ in range(self.num_rounds):
            chains = [
                (tree, branch, place)
                for tree, place in self._places(trees, rng)
                for branch in place.turn.step.end.fork(self.num_samples)
            ]
            await self._grow_all(chains, row=row)

    async def _grow_all(
        self, chains: Iterable[tuple[SearchTree, Branch, Place | None]], *, row: dict[str, Any]
    ) -> None:
        """Run chains to their ends and make them part of their trees."""
        # A task group: no chain outlives the session, and an error in a hook ends the session with its cause.
        async with asyncio.TaskGroup() as tasks:
            grown = [(*chain, tasks.create_task(self._grow(*chain[1:], row=row))) for chain in chains]
        for tree, branch, place, task in grown:
            # The first step of a chain begins at the prompt or in the turn of the expanded place.
            parent = place.turn.parent if place else None
            for step in task.result():
                parent = Turn(step, parent)
                tree.turns.append(parent)
            if parent is not None and branch.is_finished:
                tree.leaves.append((parent, branch.reward))

    async def _grow(self, branch: Branch, place: Place | None, *, row: dict[str, Any]) -> list[Step]:
        """Run one chain to its answer and reward it; return its steps."""
        steps: list[Step] = []
        tools = self.row_tools(row)
        if place is None:
            answer = await self.converse(branch, list(row["raw_prompt"]), tools=tools, row=row, steps=steps)
        else:
            branch.rewind(place.position)
            step = place.turn.step
            answer = await self.converse(
                branch, step.messages, tools=tools, row=row, number=step.number, start=step.turn.start, steps=steps
            )
        if answer is not None:
            extra_info = {**(row.get("extra_info") or {}), "tool_rewards": list(branch.tool_rewards)}
            reward = await self.leaf_reward(row={**row, "extra_info": extra_info}, answer=answer)
            branch.finish(reward, role=self.role("answer"))
        return steps

    def _places(self, trees: Sequence[SearchTree], rng: random.Random) -> list[tuple[SearchTree, Place]]:
        """Return the places that this round expands; none in a tree whose first chain failed in its first turn."""
        grown = [tree for tree in trees if tree.turns]
        budget = self.num_expansions * len(grown)
        places = self._choose(grown, budget, rng=rng) if grown else []
        if len(places) > budget:
            raise ValueError(
                f"select={self.select!r} chose {len(places)} places: num_expansions={self.num_expansions} in "
                f"{len(grown)} trees allow {budget}"
            )
        tree_of = {turn: tree for tree in grown for turn in tree.turns}
        for place in places:
            tree_of[place.turn].expanded.add(place)
        return [(tree_of[place.turn], place) for place in places]
