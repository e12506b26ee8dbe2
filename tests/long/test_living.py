"""A real run whose groups start at nodes of earlier trees, and one that is killed and goes on from its nodes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import read_metrics, run, run_and_kill_engine

from verl_tree.records import read_trees
from verl_tree.trainer.rows.living import FILE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

NUM_STEPS = 5
OPTIONS = (
    "tree.living=0.5",
    "trainer.save_freq=2",
    "trainer.resume_mode=auto",
)


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[int, dict[str, Any]]:
    """Run without a fault; return the metrics."""
    steps, place = f"trainer.total_training_steps={NUM_STEPS}", f"trainer.default_local_dir={folder}/whole"
    return run(folder, "whole", *OPTIONS, steps, place, f"tree.dump_dir={folder}/trees")


def test_groups_start_at_nodes(whole: dict[int, dict[str, Any]]) -> None:
    assert sorted(whole) == list(range(1, NUM_STEPS + 1))
    assert whole[1]["tree/living/groups"] == 0
    for step in range(2, NUM_STEPS + 1):
        metrics = whole[step]
        assert metrics["tree/living/groups"] == 0.5
        assert metrics["tree/living/age"] >= 1
        assert metrics["tree/failed_sessions"] == 0
        if "tree/living/reached" in metrics:
            assert metrics["tree/living/reached"] == 1.0, "nothing in this loop is random but the model"
            assert metrics["tree/living/replayed_tokens"] > 0
    shifts = [metrics["tree/living/shift"] for metrics in whole.values() if "tree/living/shift" in metrics]
    assert shifts
    # A rate of .1 moves the model, but not far in a step.
    assert max(map(abs, shifts)) < 1.0


def test_what_is_replayed_is_not_trained(folder: Path, whole: dict[int, dict[str, Any]]) -> None:
    assert whole
    num_found = 0
    for step in range(2, NUM_STEPS + 1):
        *fresh, one, other = read_trees(folder / "trees" / f"step_{step:06d}.parquet")
        assert len(fresh) == 2
        for tree in fresh:
            assert all(leaf.is_trained[leaf.prompt_len] for leaf in tree.leaves)
        for tree in (one, other):
            begins = {(*leaf.token_ids[: leaf.prompt_len + 1].tolist(),) for leaf in tree.leaves}
            is_trained = {bool(leaf.is_trained[leaf.prompt_len]) for leaf in tree.leaves}
            assert len(is_trained) == 1, "all start at one node"
            if is_trained == {False}:
                num_found += 1
                assert len(begins) == 1
    assert num_found


def test_a_killed_run_goes_on_from_its_nodes(folder: Path) -> None:
    place = f"trainer.default_local_dir={folder}/killed"
    run_and_kill_engine(folder, "killed", *OPTIONS, place, "trainer.total_training_steps=50", after_step=3)
    saved = torch.load(folder / "killed" / "global_step_2" / FILE, weights_only=False)
    assert len(saved["nodes"]) >= 2
    run(folder, "killed", *OPTIONS, place, "trainer.total_training_steps=3")
    # Without them all groups would start at their prompts.
    assert read_metrics(folder / "killed.jsonl")[3]["tree/living/groups"] == 0.5
