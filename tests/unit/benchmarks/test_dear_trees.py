"""The simulation of dear trajectories: parts as groups of their own, and what a team computes together."""

import pytest

pytest.importorskip("verl")

import numpy as np
from dear_trees import COSTS, part_profile, team_loads

from verl_tree.cost.cuts import GroupPart, GroupTimes
from verl_tree.cost.model import WorkProfile
from verl_tree.testing.synthetic import tree_search
from verl_tree.tree import TokenForest


def chain(num_tokens: int) -> WorkProfile:
    return WorkProfile.from_forest(TokenForest.from_sequences([np.arange(num_tokens)]))


def whole(profiles: list[WorkProfile]) -> list[GroupPart]:
    return [
        GroupTimes.of(profile, model=COSTS).part(group, start=0, end=profile.num_leaves)
        for group, profile in enumerate(profiles)
    ]


def test_a_part_costs_as_a_group_what_it_costs_in_its_group() -> None:
    """All ranges of leaves of a part have the work that they have in the whole group."""
    profile = WorkProfile.from_forest(TokenForest.from_sequences(tree_search(seed=0, prompt_len=9, step_len=(2, 7))))
    part = GroupPart(0, start=3, end=9, cost_s=0.0)
    own = part_profile(profile, part)
    assert profile.lcp[3] > 0
    for start in range(6):
        for end in range(start + 1, 7):
            assert own.range_work(start, end) == profile.range_work(3 + start, 3 + end)


def test_only_what_is_dear_is_computed_together() -> None:
    """Two equal parts are a rank's each; beside them a longer one is the team's, half of it on each rank."""
    profiles = [chain(80_000), chain(20_000), chain(20_000)]
    loads = team_loads(whole(profiles), profiles, team=2, only_dear=True)
    assert [(load.together, load.alone) for load in loads] == [(40_000, 20_000)] * 2
    dear, rest, _ = (part.cost_s for part in whole(profiles))
    assert [load.seconds for load in loads] == pytest.approx([dear / 2 + rest] * 2)
    # A static team has all in common.
    loads = team_loads(whole(profiles), profiles, team=2, only_dear=False)
    assert [(load.together, load.alone) for load in loads] == [(60_000, 0)] * 2


def test_a_team_is_not_formed_for_an_even_rest() -> None:
    profiles = [chain(20_000), chain(20_000)]
    assert [load.together for load in team_loads(whole(profiles), profiles, team=2, only_dear=True)] == [0, 0]
