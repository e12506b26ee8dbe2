"""Every metric that this project logs: its unit, how a step's value is made, what it means, and what to do about it.

The rows stand in `metric_table.csv` beside this file. `scripts/make_metrics.py` makes docs/metrics.md of it,
`verl_tree.dashboards` the dashboards, and tests compare it with what is logged.
"""

import csv
from dataclasses import dataclass
from importlib.resources import files

CRITIC, VALIDATION = "critic/", "val-aux/"

MADE = {
    "sum": "added up over ranks, mini-batches, epochs and, in `separate_async`, the updates of a step",
    "ratio of sums": "a quotient of such sums, not a mean of quotients",
    "maximum": "the largest of these values",
    "last update": "that of the last update of a step",
    "mean": "the mean over mini-batches; over updates weighted by their rows, as verl does",
    "once a step": "made once, of all that the step trained or saw",
}
"""What the page says of each way to make a value."""


@dataclass(frozen=True, slots=True)
class Metric:
    """Metrics that are explained together: a row of the file, whose columns are `section` and these fields.

    Attributes:
        names: Separated by spaces in the file.
        also: A prefix under which they are logged, too: `CRITIC`, `VALIDATION` or none.
        unit: Of their values.
        made: How ranks, mini-batches, epochs and updates make the value of a step: a key of `MADE`.
        meaning: What the values say.
        advice: What to do about them; may be empty.
        panel: Title of the panel of the dashboards that shows `names` (verl_tree/dashboards/panels.csv); may be empty.
    """

    names: tuple[str, ...]
    also: str
    unit: str
    made: str
    meaning: str
    advice: str
    panel: str

    @property
    def keys(self) -> tuple[str, ...]:
        """All names under which they are logged."""
        return self.names + tuple(f"{self.also}{name}" for name in self.names if self.also)


def _read() -> dict[str, tuple[Metric, ...]]:
    """Return the metrics of each section, in the order of the file."""
    sections: dict[str, tuple[Metric, ...]] = {}
    text = files("verl_tree.trainer.told").joinpath("metric_table.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines(), strict=True):
        section, names = row.pop("section"), tuple(row.pop("names").split())
        sections[section] = (*sections.get(section, ()), Metric(names, **row))
    return sections


METRICS = _read()
"""The metrics by section of the page."""
KEYS = frozenset(key for metrics in METRICS.values() for metric in metrics for key in metric.keys)
"""All names under which something is logged."""
