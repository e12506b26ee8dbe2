"""The metrics of a training run, as verl's logger `file` writes them."""

import json
from pathlib import Path

Metrics = dict[int, dict[str, float]]
"""What was logged at each step."""

Series = tuple[list[int], list[float]]
"""Steps, and a value at each."""


def read_metrics(path: Path) -> Metrics:
    """Return what was logged at each step; steps logged in several lines are merged.

    Raises:
        ValueError: The file has no steps.
    """
    metrics: Metrics = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        metrics.setdefault(int(record["step"]), {}).update(record["data"])
    if not metrics:
        raise ValueError(f"{path}: no steps; did the run log to trainer.logger=[file]?")
    return metrics


def series(metrics: Metrics, *, key: str) -> Series:
    """Return the steps that logged `key` and its values, in the order of the steps."""
    steps = [step for step in sorted(metrics) if key in metrics[step]]
    return steps, [metrics[step][key] for step in steps]
