"""Training runs of a recipe as a user starts them, and files of what they logged, for paired_runs.py and parity.py."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import read_records

ROOT = Path(__file__).resolve().parents[1]

Metrics = dict[int, dict[str, Any]]
"""What a run logged at each step."""


def train(recipe: str, *overrides: str, folder: Path, timeout_s: float = 1800.0) -> Metrics:
    """Run `recipes/RECIPE/run.sh` with its logs, metrics and checkpoints in `folder`; return its metrics.

    Raises:
        RuntimeError: The run failed; the message has the end of its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log, metrics = folder / "run.log", folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    print(f"{folder.name}: running, see {log}", file=sys.stderr, flush=True)
    # The recipe calls `python`, which is to be this one.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with log.open("w") as output:
        done = subprocess.run(
            [ROOT / "recipes" / recipe / "run.sh", "trainer.logger=[file]", "tree.dump_dir=null", *overrides],
            env={**os.environ, "RUN": str(folder), "PATH": path},
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
    if done.returncode != 0:
        raise RuntimeError(f"the run in {folder} failed:\n{log.read_text()[-4000:]}")
    return read_metrics(metrics)


def seeds(number: int) -> tuple[str, ...]:
    """Return the overrides that set all seeds of a run: the order of its prompts, its mini-batches and its samples."""
    keys = ("data.seed", "actor_rollout_ref.actor.data_loader_seed", "actor_rollout_ref.rollout.seed")
    return tuple(f"{key}={number}" for key in keys)


def replayed(num_steps: int, rollouts: Path) -> tuple[str, ...]:
    """Return the overrides with which a run stores the rollouts of its steps in a folder, or repeats what is there."""
    return (
        f"trainer.total_training_steps={num_steps}",
        "skip.rollout_tq.enable=true",
        "skip.rollout_tq.action=cache",
        f"skip.rollout_tq.steps=[{','.join(map(str, range(1, num_steps + 1)))}]",
        f"skip.rollout_tq.dump_dir={rollouts}",
    )


def read_metrics(path: Path) -> Metrics:
    """Return what verl's logger `file` wrote, by step; steps logged in several lines are merged."""
    metrics: Metrics = {}
    for record in read_records(path):
        metrics.setdefault(int(record["step"]), {}).update(record["data"])
    return metrics


def write_metrics(metrics: Mapping[int, Mapping[str, Any]], path: Path, *, keys: tuple[str, ...]) -> None:
    """Write the metrics with these keys as verl's logger `file` does, for `verl-tree plot`."""
    records = [
        {"step": step, "data": {key: data[key] for key in keys if key in data}}
        for step, data in sorted(metrics.items())
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
