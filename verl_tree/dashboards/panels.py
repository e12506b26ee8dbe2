"""What an operator looks at: panels, by topic.

`panels.csv` beside this file has their order and what they show of verl's own metrics. Which panel shows a metric of
this project stands in the metric's row of verl_tree/trainer/told/metric_table.csv.
"""

import csv
from dataclasses import dataclass
from importlib.resources import files

from verl_tree.trainer.told.metric_table import METRICS

NUM_COLUMNS = 4
"""Panels beside each other."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A plot over the steps: of the metrics `keys`, or of those whose names match the regular expression `pattern`."""

    title: str
    keys: tuple[str, ...] = ()
    pattern: str | None = None


def _read() -> dict[str, tuple[Panel, ...]]:
    topics: dict[str, tuple[Panel, ...]] = {}
    text = files("verl_tree.dashboards").joinpath("panels.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines(), strict=True):
        ours = [metric for metrics in METRICS.values() for metric in metrics if metric.panel == row["title"]]
        keys = (*row["metrics"].split(), *(name for metric in ours for name in metric.names))
        panel = Panel(row["title"], keys, row["pattern"] or None)
        topics[row["topic"]] = (*topics.get(row["topic"], ()), panel)
    return topics


TOPICS = _read()
"""All panels by topic, in the order in which they are shown."""
