"""The tutorials whose training run follows that of the first, as printed, in one folder."""

from pathlib import Path

import pytest
from followed_page import TUTORIALS, follow
from tutorial_runs import NUM_STEPS, metrics, rewards, stored

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which the first tutorial was followed."""
    folder = tmp_path_factory.mktemp("tutorials")
    follow(TUTORIALS / "01_first_agent.md", folder)
    return folder


def test_blackbox_agent(place: Path) -> None:
    """The client's calls become the same trees; each answer is a leaf with the reward that the agent gave it."""
    follow(TUTORIALS / "02_blackbox_agent.md", place)
    metrics(place / "blackbox.jsonl")
    trees = stored(place / "blackbox_trees")
    assert len(trees) == 8 * NUM_STEPS
    sessions = [[leaf for leaf in tree.leaves if leaf.session == number] for tree in trees for number in range(4)]
    # A thought that the client could not send back is one leaf more.
    assert {len(leaves) for leaves in sessions} <= {3, 4}
    plain = [leaves for leaves in sessions if len(leaves) == 3]
    assert len(plain) > len(sessions) / 2
    assert all({run.call for leaf in leaves for run in leaf.calls} == {0, 1, 2, 3} for leaves in plain)
    assert len({leaf.reward for leaves in plain for leaf in leaves}) > 5


def test_sft_to_rl(place: Path) -> None:
    """The second generation begins better than the first, by more than three standard errors of the difference."""
    follow(TUTORIALS / "05_sft_to_rl.md", place)
    metrics(place / "second.jsonl")
    before, after = (
        rewards([tree for tree in stored(place / folder) if tree.step == 1]) for folder in ("trees", "second_trees")
    )
    assert after.mean() - before.mean() > 3 * ((before.var() + after.var()) / len(after)) ** 0.5
