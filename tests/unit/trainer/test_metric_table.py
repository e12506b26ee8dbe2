"""Every metric that is logged is in the table, every metric of the table is logged, and the page is made of it."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("verl")

from rollout_hooks.capture.report import CaptureReport
from verl_tree.cost.fit import MIN_MEASUREMENTS, CostFitter
from verl_tree.cost.model import Work
from verl_tree.engine import canary
from verl_tree.packing.counts import ForestCounts, RankTimes
from verl_tree.records import CallRun
from verl_tree.trainer.rows.replay_buffer import dropped_metrics
from verl_tree.trainer.rows.staleness import staleness_metrics
from verl_tree.trainer.told.log_prob_guard import METRIC
from verl_tree.trainer.told.metric_table import KEYS, MADE, METRICS
from verl_tree.trainer.told.metrics import capture_metrics, session_metrics, tokens_per_s

ROOT = Path(__file__).parents[3]

WRITTEN_IN_PLACE = {
    METRIC,
    canary.METRIC,
    f"critic/{canary.METRIC}",
    "tree/micro_batches",
    "critic/tree/micro_batches",
    "tree/cut_groups",
    "tree/cut_tokens",
    "timing_s/tree_log",
    "tree/sampled_tokens_per_live_leaf",
    *(f"perf/mfu/{role}{end}" for role in ("actor", "critic") for end in ("", "_flat_equivalent")),
}
"""Metrics that the trainer and the worker write without a function that could be asked."""


def of_functions() -> set[str]:
    """Return the names that functions give if all that they count is there."""
    fitter = CostFitter()
    for number in range(MIN_MEASUREMENTS):
        fitter.add(Work(num_tokens=number + 1, num_visible_pairs=number + 1, num_packs=1), seconds=number + 1.0)
    fitter.fit()
    call = CallRun(call=0, start=0, end=1, kind="root", min_global_steps=1, max_global_steps=1)
    names = set(session_metrics(["a_0_0"], rewards=np.ones(1), roles={"a_0_0": "ROLE"}))
    names |= set(staleness_metrics({"a_0_0": [call]}, version=1)) | set(dropped_metrics(set(), {}))
    names |= set(tokens_per_s({"tree/tokens": 1.0, "tree/flat_tokens": 1.0}, update_s=1.0))
    for prefix in ("tree", "val-aux/tree"):
        names |= set(capture_metrics(CaptureReport(num_prompt_tokens=1), prefix=prefix))
    for prefix in ("tree", "critic/tree"):
        names |= set(ForestCounts(*[1] * len(fields(ForestCounts))).metrics(prefix=prefix))
        names |= set(RankTimes(*[1.0] * len(fields(RankTimes))).metrics(prefix=prefix))
        names |= set(fitter.metrics(prefix=f"{prefix}/cost_model"))
    return names


def test_the_table_has_what_is_logged_and_nothing_else() -> None:
    assert of_functions() | WRITTEN_IN_PLACE == KEYS


def test_a_metric_is_explained_once() -> None:
    metrics = [metric for section in METRICS.values() for metric in section]
    assert max(Counter(key for metric in metrics for key in metric.keys).values()) == 1
    assert {metric.made for metric in metrics} == set(MADE)


@pytest.mark.parametrize(
    "data", sorted((ROOT / "docs" / "benchmarks" / "data").glob("*.jsonl")), ids=lambda data: data.name
)
def test_the_metrics_of_stored_runs_are_explained(data: Path) -> None:
    records = [json.loads(line) for line in data.read_text().splitlines()]
    names = {name for record in records for name in record.get("data", ())}
    assert {name for name in names if "tree/" in name or name.startswith(("perf/mfu/", "perf/update_"))} <= KEYS


def test_the_page_is_made_from_the_table() -> None:
    subprocess.run([sys.executable, "scripts/make_metrics.py", "--check"], cwd=ROOT, check=True)
