"""The tutorial from fine-tuning to RL, as printed, behind the first one: two training runs and a fine-tuning."""

from pathlib import Path

import pytest
from followed_page import TUTORIALS, follow
from tutorial_runs import metrics, rewards, stored

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_sft_to_rl(tmp_path: Path) -> None:
    """The second generation begins better than the first, by more than three standard errors of the difference."""
    for page in ("01_first_agent.md", "05_sft_to_rl.md"):
        follow(TUTORIALS / page, tmp_path)
    metrics(tmp_path / "second.jsonl")
    before, after = (
        rewards([tree for tree in stored(tmp_path / folder) if tree.step == 1]) for folder in ("trees", "second_trees")
    )
    assert after.mean() - before.mean() > 3 * ((before.var() + after.var()) / len(after)) ** 0.5
