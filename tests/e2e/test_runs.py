"""Whole training runs: one on trees dies, and verl's own engine resumes it and repeats the steps behind its checkpoint.

The first run dies after ten steps. The trees that it stores and shows are those that it trained.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replayed_runs import replaying_options, worst_difference
from tiny_run import read_metrics, run, run_and_kill_engine, run_to_error

from verl_tree.records import StoredTree, forests, read_trees
from verl_tree.trainer.metric_table import KEYS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

STEPS = range(1, 11)
ADAMW = ("actor_rollout_ref.actor.optim.optimizer=AdamW", "actor_rollout_ref.actor.optim.lr=1e-3")
SAVE_FREQ = 6
"""Four steps of the ten lie behind the only checkpoint."""


def options(folder: Path) -> tuple[str, ...]:
    """Return options of a run with AdamW that stores the rollouts of each step, or replays stored ones."""
    return (*ADAMW, *replaying_options(f"{folder}/rollouts", num_steps=STEPS[-1]))


@pytest.fixture(scope="module")
def failure(folder: Path) -> str:
    """Run the training that generates the rollouts, stores its trees and shows those of its validation.

    Its vLLM worker is killed after the last of the compared steps. Returned is the log.
    """
    shown = (f"tree.dump_dir={folder}/trees", "tree.show_every=1", f"trainer.test_freq={STEPS[-1]}")
    unfinished = (f"trainer.save_freq={SAVE_FREQ}", f"trainer.total_training_steps={STEPS[-1] + 2}")
    watched = "tree.watchdog.poll_s=0.5"
    return run_and_kill_engine(
        folder, "tree", *options(folder), *shown, *unfinished, watched, after_step=STEPS[-1], timeout_s=900
    )


@pytest.fixture(scope="module")
def tree(folder: Path, failure: str) -> dict[int, dict[str, Any]]:
    """Return the metrics of the compared steps."""
    assert failure
    return {step: metrics for step, metrics in read_metrics(folder / "tree.jsonl").items() if step in STEPS}


def test_the_rollouts_branch(tree: dict[int, dict[str, Any]]) -> None:
    for metrics in tree.values():
        assert metrics["tree/leaves_per_session"] == 4.0
        assert metrics["tree/por"] > 0.4
        assert metrics["tree/depth"] >= 3
        assert metrics["tree/failed_sessions"] == 0
        assert metrics["tree/forks"] > 0
        # A leaf's reward is its share of even tokens plus the first turn's 1.
        assert 1 <= metrics["tree/leaf_reward/mean"] <= metrics["critic/score/max"] <= 2
        assert 1.5 < metrics["tree/compression"] <= 1 / (1 - metrics["tree/por"]) + 1e-6


def test_every_metric_is_explained_and_mfu_counts_what_is_computed(tree: dict[int, dict[str, Any]]) -> None:
    logged = {name for metrics in tree.values() for name in metrics}
    ours = {name for name in logged if "tree/" in name or name.startswith(("perf/mfu/", "perf/update_"))}
    assert ours <= KEYS
    # The run has no critic, relays nothing, replays no routes and is synchronous.
    of_others = "critic|tree/async/|tree/(sections|spine_ratio|context_tokens|store_gib|route_conflicts)$"
    assert {name for name in KEYS - logged if not re.search(of_others, name)} == set()
    for metrics in tree.values():
        assert 0 < metrics["perf/mfu/actor"] < metrics["perf/mfu/actor_flat_equivalent"]


def responses(trees: list[StoredTree], name: str) -> np.ndarray:
    """Return a value of every trained token of every leaf."""
    leaves = [leaf for tree in trees for leaf in tree.leaves]
    values = [{"advantages": leaf.token_advantages, "log_probs": leaf.log_probs[leaf.prompt_len :]} for leaf in leaves]
    masks = [leaf.is_trained[leaf.prompt_len :] for leaf in leaves]
    return np.concatenate([value[name][mask] for value, mask in zip(values, masks, strict=True)])


def test_the_trees_are_stored_and_shown(folder: Path, tree: dict[int, dict[str, Any]]) -> None:
    dumped = folder / "trees"
    # The step that the kill interrupts may have been stored.
    files = sorted({path.name for path in dumped.iterdir()} - {f"step_{STEPS[-1] + 1:06d}.parquet"})
    pages = [f"val_{STEPS[-1]:06d}_{number}.html" for number in range(4)]
    steps = [f"step_{step:06d}.parquet" for step in STEPS]
    assert files == sorted([*steps, *pages, f"val_{STEPS[-1]:06d}.parquet"])

    for step, metrics in tree.items():
        trees = read_trees(dumped / f"step_{step:06d}.parquet")
        leaves = [leaf for group in trees for leaf in group.leaves]
        assert [group.step for group in trees] == [step] * 4
        assert len(leaves) == 4 * 2 * 4
        rewards = np.array([leaf.reward for leaf in leaves])
        assert metrics["tree/leaf_reward/mean"] == pytest.approx(rewards.mean(), rel=1e-6)
        advantages = responses(trees, "advantages")
        for name in ("mean", "max", "min"):
            stored = float(getattr(advantages, name)())
            assert metrics[f"critic/advantages/{name}"] == pytest.approx(stored, rel=1e-4, abs=1e-6), name
        assert not np.isnan(responses(trees, "log_probs")).any()
        assert all(leaf.min_global_steps == step - 1 for leaf in leaves)
        for group, forest in zip(trees, forests(dumped / f"step_{step:06d}.parquet"), strict=True):
            assert forest.potential_overlap_ratio > 0.4
            assert forest.num_leaves == len(group.leaves)
        # The first turn is the same call on all leaves of a session; after it come forks.
        kinds = [run.kind for leaf in leaves for run in leaf.calls]
        assert set(kinds) >= {"root", "continuation", "fork"}
        assert all(leaf.calls[0].call == 0 for leaf in leaves)

    validated = read_trees(dumped / f"val_{STEPS[-1]:06d}.parquet")
    assert [(len(group.leaves), group.leaves[0].token_advantages) for group in validated] == [(4, None)] * 4
    page = (dumped / pages[0]).read_text()
    assert validated[0].uid in page
    assert "session" in page


@pytest.fixture(scope="module")
def flat(folder: Path, tree: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Resume from the last checkpoint of the trees with verl's own engine, which repeats their stored rollouts."""
    assert set(tree) == set(STEPS), "the rollouts are stored"
    return run(folder, "flat", *options(folder), "trainer.resume_mode=auto", "tree.enabled=false")


def test_a_run_whose_engine_is_killed_names_the_cause_at_once(failure: str) -> None:
    assert re.search(r"RunFailedError: .*VLLM::", failure)
    assert "--- last 40 lines of stderr of actor" in failure


def test_verls_engine_continues_as_the_trees_did(
    tree: dict[int, dict[str, Any]],
    flat: dict[int, dict[str, Any]],
    record_property: Callable[[str, object], None],
) -> None:
    """Rewards are equal; losses and gradient norms are close, relative to their largest size in the run.

    verl's engine starts from the weights and the moments of AdamW that the tree engine saved. Measured: 4e-7.
    """
    assert sorted(flat) == list(range(SAVE_FREQ + 1, STEPS[-1] + 1))
    # Looser than with SGD (test_engines.py), as AdamW divides by gradients that are almost zero.
    worst = worst_difference({step: tree[step] for step in flat}, flat)
    assert max(worst.values()) <= 1e-4, worst
    for name in ("critic/score/mean", "tree/session_reward/mean", "tree/por"):
        assert [tree[step][name] for step in flat] == [flat[step][name] for step in flat], name
    record_property("Qwen3 | whole run", max(worst.values()))


def test_a_run_whose_engine_computes_with_other_weights_says_so(folder: Path, tree: dict[int, dict[str, Any]]) -> None:
    """The engine gets what the trainer sends once; from then on one weight is another."""
    spoilt = "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=spoilt_reload.SpoiltReloadExtension"
    metrics, log = run_to_error(folder, "spoilt", *ADAMW, spoilt)
    difference = "tree/log_prob_difference"
    assert metrics[1][difference] < 1e-4
    assert list(metrics) == [1]
    assert re.search(
        r"ValueError: vllm with .*/model \(dtype=float32, .* does not compute with the trainer's weights", log
    )
    assert "sampled under version 1 have a mean log-prob" in log
    # The same steps without the fault; then nothing is compared any more.
    assert [step for step in STEPS if difference in tree[step]] == [1, 2]
    assert max(tree[step][difference] for step in (1, 2)) < 1e-4
