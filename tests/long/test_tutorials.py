"""The first tutorial and the one that reads its trees, as printed.

Two more are followed in `test_later_tutorials.py`. The first one's command and agent are also checked in
`tests/unit/test_tutorial_pages.py`, without a run.
"""

from pathlib import Path

import pytest
from followed_page import TUTORIALS, follow
from tutorial_runs import NUM_STEPS, metrics, rewards, stored

from verl_tree.records import StoredTree

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which both tutorials are followed."""
    return tmp_path_factory.mktemp("tutorials")


@pytest.fixture(scope="module")
def first(place: Path) -> list[StoredTree]:
    """Follow the first tutorial and return the trees of its steps."""
    follow(TUTORIALS / "01_first_agent.md", place)
    return stored(place / "trees")


def test_first_agent(first: list[StoredTree], place: Path) -> None:
    """Each of 4 sessions a question has three answers that go on from one thought."""
    metrics(place / "metrics.jsonl")
    assert [len(tree.leaves) for tree in first] == [12] * 8 * NUM_STEPS
    for tree in first:
        assert 0 <= rewards([tree]).min() < rewards([tree]).max() <= 1
        for session in range(4):
            thoughts = [leaf.calls[0] for leaf in tree.leaves if leaf.session == session]
            assert len(thoughts) == 3
            assert len({(run.call, run.start, run.end) for run in thoughts}) == 1
    assert all(leaf.calls[0].kind == "root" for tree in first for leaf in tree.leaves)


def test_reading_trees(first: list[StoredTree], place: Path) -> None:
    assert first
    summary, _, table = follow(TUTORIALS / "04_reading_trees.md", place)
    assert sum(line.startswith("12 leaves") for line in summary.splitlines()) == 8
    assert first[0].uid in (place / "page.html").read_text()
    tree, trained = first[0].forest(), int(table.splitlines()[2].split()[2])
    assert int(table.splitlines()[2].split()[1]) == tree.num_tokens
    assert 0 < trained < tree.num_tokens
