"""Whole training runs: one on trees dies, and verl's own engine resumes it and repeats the steps behind its checkpoint.

The first run dies after ten steps. The trees that it stores and shows are those that it trained. The second one finds a
newer checkpoint that was cut short, and ends early by SIGTERM.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replayed_runs import replaying_options, worst_difference
from tiny_run import read_metrics, run_and_kill_engine, run_and_terminate

from verl_tree.dashboards.panels import TOPICS
from verl_tree.records import StoredTree, forests, read_trees
from verl_tree.trainer.starts.checkpoints import TRACKER, mark_complete
from verl_tree.trainer.starts.tree_folder import OWNER
from verl_tree.trainer.told.metric_table import KEYS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

STEPS = range(1, 11)
ADAMW = ("actor_rollout_ref.actor.optim.optimizer=AdamW", "actor_rollout_ref.actor.optim.lr=1e-3")
SAVE_FREQ = 6
"""Four steps of the ten lie behind the only checkpoint."""
LONGER = (f"trainer.total_training_steps={STEPS[-1] + 20}",)
"""Both runs are ended from outside."""


def options(folder: Path) -> tuple[str, ...]:
    """Return options of a run with AdamW that stores the rollouts of each step, or replays stored ones."""
    return (*ADAMW, *replaying_options(f"{folder}/rollouts", num_steps=STEPS[-1]))


@pytest.fixture(scope="module")
def failure(folder: Path) -> str:
    """Run the training that generates the rollouts, stores its trees and shows them.

    Its vLLM worker is killed after the last of the compared steps. Returned is the log.
    """
    shown = (f"tree.dump_dir={folder}/trees", "tree.show_every=1", f"trainer.test_freq={STEPS[-1]}")
    saves, watched = f"trainer.save_freq={SAVE_FREQ}", "tree.watchdog.poll_s=0.5"
    return run_and_kill_engine(
        folder, "tree", *options(folder), *shown, saves, *LONGER, watched, after_step=STEPS[-1], timeout_s=900
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
    # The run has no critic, relays nothing, replays no routes, is synchronous, and its leaves have no roles.
    of_others = "critic|tree/async/|tree/role_|tree/(sections|spine_ratio|context_tokens|store_gib|route_conflicts)$"
    assert {name for name in KEYS - logged if not re.search(of_others, name)} == set()
    for metrics in tree.values():
        assert 0 < metrics["perf/mfu/actor"] < metrics["perf/mfu/actor_flat_equivalent"]
        assert metrics["tree/leaf_reward/min"] <= metrics["tree/leaf_reward/mean"] <= metrics["tree/leaf_reward/max"]
    (pattern,) = [panel.pattern for panel in TOPICS["Learning"] if panel.pattern is not None]
    assert any(re.fullmatch(pattern, name) for name in tree[STEPS[-1]])


def responses(trees: list[StoredTree], name: str) -> np.ndarray:
    """Return a value of every trained token of every leaf."""
    leaves = [leaf for tree in trees for leaf in tree.leaves]
    values = [{"advantages": leaf.token_advantages, "log_probs": leaf.log_probs[leaf.prompt_len :]} for leaf in leaves]
    masks = [leaf.is_trained[leaf.prompt_len :] for leaf in leaves]
    return np.concatenate([value[name][mask] for value, mask in zip(values, masks, strict=True)])


def test_the_trees_are_stored_and_shown(folder: Path, tree: dict[int, dict[str, Any]]) -> None:
    dumped = folder / "trees"
    # The step that the kill interrupts may have been stored.
    files = {path.name for path in dumped.iterdir() if not path.name.startswith(f"step_{STEPS[-1] + 1:06d}")}
    times = [*(f"step_{step:06d}" for step in STEPS), f"val_{STEPS[-1]:06d}"]
    assert files == {OWNER} | {
        f"{time}{end}" for time in times for end in (".parquet", *(f"_{n}.html" for n in range(4)))
    }

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
    for time in times:
        assert read_trees(dumped / f"{time}.parquet")[0].uid in (dumped / f"{time}_0.html").read_text()


@pytest.fixture(scope="module")
def termination(folder: Path, tree: dict[int, dict[str, Any]]) -> tuple[int, str]:
    """Resume the run of the trees with verl's own engine, which repeats their stored rollouts, and send it SIGTERM.

    It comes after the last but one of the compared steps. The run goes on in the metrics of the first one, and finds a
    newer checkpoint, of which one file is cut short. Returned are its exit status and its log.
    """
    assert set(tree) == set(STEPS), "the rollouts are stored"
    lines = (folder / "tree.jsonl").read_text().splitlines(keepends=True)
    (folder / "flat.jsonl").write_text("".join(lines[: SAVE_FREQ + 2]))
    checkpoints = folder / "checkpoints"
    newer = checkpoints / f"global_step_{SAVE_FREQ + 2}"
    shutil.copytree(checkpoints / f"global_step_{SAVE_FREQ}", newer)
    mark_complete(newer, step=SAVE_FREQ + 2)
    os.truncate(newer / "actor" / "optim_world_size_1_rank_0.pt", 1000)
    (checkpoints / TRACKER).write_text(str(SAVE_FREQ + 2))
    resumed = (
        "trainer.resume_mode=auto",
        "tree.enabled=false",
        "tree.save_on_term=true",
        f"trainer.save_freq={SAVE_FREQ}",
        "tree.console=steps",
        "trainer.logger=[console,file,wandb]",
    )
    return run_and_terminate(folder, "flat", *options(folder), *resumed, *LONGER, after_step=STEPS[-1] - 1)


@pytest.fixture(scope="module")
def flat(folder: Path, termination: tuple[int, str]) -> dict[int, dict[str, Any]]:
    """Return the metrics of the steps that verl's engine has repeated."""
    assert termination
    metrics = read_metrics(folder / "flat.jsonl")
    return {step: metrics[step] for step in STEPS if step > SAVE_FREQ}


def test_a_run_whose_engine_is_killed_names_the_cause_at_once(folder: Path, failure: str) -> None:
    assert re.search(r"The training run has ended: the vLLM process VLLM::", failure)
    assert re.search(r"--- last 40 lines of stderr of vLLM\w+ \(pid \d+ on node \S+\)", failure)
    assert failure.splitlines()[-1].startswith("The training run has ended: ")
    hint = "To resume: the same command with trainer.resume_mode=auto goes on from"
    assert f"{hint} {folder}/checkpoints/global_step_{SAVE_FREQ}." in failure.splitlines()


def test_a_checkpoint_that_was_cut_short_is_skipped(folder: Path, termination: tuple[int, str]) -> None:
    _, log = termination
    checkpoints = folder / "checkpoints"
    skipped = f"{checkpoints}/global_step_{SAVE_FREQ + 2} is skipped: actor/optim_world_size_1_rank_0.pt has 1000 bytes"
    goes_on = f"the run goes on from {checkpoints}/global_step_{SAVE_FREQ}"
    assert 0 < log.index(skipped) < log.index(goes_on) < log.index("Ray started")


def test_the_metrics_of_the_first_run_stay(
    folder: Path, tree: dict[int, dict[str, Any]], flat: dict[int, dict[str, Any]]
) -> None:
    lines = [json.loads(line) for line in (folder / "flat.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines]
    assert steps == list(range(1, steps[-1] + 1))
    assert all(line["data"] == tree[line["step"]] for line in lines if line["step"] <= SAVE_FREQ)
    assert all(flat[step] != tree[step] for step in flat), "the times of these steps are their own"


def test_a_run_that_is_told_to_end_saves_the_step_that_it_is_in(folder: Path, termination: tuple[int, str]) -> None:
    status, log = termination
    last = max(read_metrics(folder / "flat.jsonl"))
    assert STEPS[-1] <= last <= STEPS[-1] + 2, "a step may have ended before the signal came"
    saved = folder / "checkpoints" / f"global_step_{last}"
    assert status == 143
    assert (folder / "checkpoints" / TRACKER).read_text() == str(last)
    assert (saved / "complete.json").is_file()
    hint, where = log.splitlines()[-2:]
    assert hint == f"To resume: the same command goes on from {saved}."
    assert where.startswith("log: ")
    assert "SIGTERM: the training run ends after the step it is in" in log
    assert "Traceback" not in log


def test_verls_engine_continues_as_the_trees_did(
    tree: dict[int, dict[str, Any]],
    flat: dict[int, dict[str, Any]],
    record_property: Callable[[str, object], None],
) -> None:
    """Rewards are equal; losses and gradient norms are close, relative to their largest size in the run.

    verl's engine starts from the weights and the moments of AdamW that the tree engine saved. Measured: 4e-7.
    """
    # Looser than with SGD (test_engines.py), as AdamW divides by gradients that are almost zero.
    worst = worst_difference({step: tree[step] for step in flat}, flat)
    assert max(worst.values()) <= 1e-4, worst
    for name in ("critic/score/mean", "tree/session_reward/mean", "tree/por"):
        assert [tree[step][name] for step in flat] == [flat[step][name] for step in flat], name
    record_property("Qwen3 | whole run", max(worst.values()))


def test_the_console_is_for_people_and_the_log_has_everything(folder: Path, termination: tuple[int, str]) -> None:
    _, shown = termination
    lines = shown.splitlines()
    assert len(lines) < 60, shown
    # Nothing failed, and wandb ends with its run.
    assert not re.search("Traceback|Error", shown)
    assert lines[0].endswith(": composing the configuration")
    starts = [line for line in lines if line.startswith("start ") and " still " not in line]
    told = [line.split(" s: ")[1].split(" (")[0] for line in starts]
    assert re.sub(r", dashboard at [^;]+", "", "; ".join(told)) == (
        "configuration composed; configuration checked; Ray started; data read; models loaded; rollout engine started; "
        "agent loops started"
    )
    steps = [int(found[1]) for line in lines if (found := re.match(r"step (\d+)/\d+: reward ", line))]
    assert steps == [step for step in read_metrics(folder / "flat.jsonl") if step > SAVE_FREQ]
    assert "Resuming from" in shown

    log = Path(lines[-1].removeprefix("log: "))
    assert log.parent == folder / "checkpoints" / "logs"
    everything = log.read_text()
    # Seconds differ, and a handler of signals writes past the streams.
    assert [line for line in lines[:-1] if not line.startswith(("start ", "SIGTERM")) and line not in everything] == []
    for hidden in ("{'actor_rollout_ref'", f" step:{STEPS[-1]} - ", "(WorkerDict pid=", "wandb: Run summary"):
        assert hidden in everything
        assert hidden not in shown


def test_samples_are_compared_with_the_weights_twice(tree: dict[int, dict[str, Any]]) -> None:
    """Then nothing is compared any more. `tests/long/test_spoilt_weights.py` has an engine with other weights."""
    difference = "tree/log_prob_difference"
    assert [step for step in STEPS if difference in tree[step]] == [1, 2]
    assert max(tree[step][difference] for step in (1, 2)) < 1e-4
