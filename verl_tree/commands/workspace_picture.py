"""The panels of the dashboards, drawn from the metrics of one training run."""

import math
import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from verl_tree.commands.metrics_file import Metrics, series
from verl_tree.dashboards.panels import NUM_COLUMNS, TOPICS, Panel

_PANEL_INCHES = (4.0, 2.4)


def draw_workspace(metrics: Metrics, *, out: Path) -> None:
    """Draw every panel of every topic into the picture `out`; one without data says so."""
    num_rows = [math.ceil(len(panels) / NUM_COLUMNS) for panels in TOPICS.values()]
    width, height = _PANEL_INCHES
    figure = plt.figure(figsize=(NUM_COLUMNS * width, sum(num_rows) * height), layout="constrained")
    parts = figure.subfigures(len(TOPICS), 1, squeeze=False, height_ratios=num_rows).flat
    for part, rows, (topic, panels) in zip(parts, num_rows, TOPICS.items(), strict=True):
        part.suptitle(topic, x=0.01, horizontalalignment="left", fontweight="bold")
        places = part.subplots(rows, NUM_COLUMNS, squeeze=False).flat
        for panel, axes in zip(panels, places, strict=False):
            _draw_panel(panel, metrics, axes=axes)
        for axes in places[len(panels) :]:
            axes.remove()
    figure.savefig(out, dpi=80)
    plt.close(figure)


def logged_keys(panel: Panel, metrics: Metrics) -> list[str]:
    """Return the names that a panel shows of a run, in its order."""
    logged = {key for data in metrics.values() for key in data}
    if panel.pattern is not None:
        return sorted(key for key in logged if re.fullmatch(panel.pattern, key))
    return [key for key in panel.keys if key in logged]


def _draw_panel(panel: Panel, metrics: Metrics, *, axes: Axes) -> None:
    axes.set_title(panel.title, fontsize="medium")
    keys = logged_keys(panel, metrics)
    if not keys:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, horizontalalignment="center", color="gray")
        axes.set(xticks=[], yticks=[])
        return
    for key in keys:
        steps, values = series(metrics, key=key)
        # The first line is wide, so that one on top of it leaves it in sight.
        axes.plot(steps, values, linewidth=3.0 if key == keys[0] else 1.3, label=key)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelsize="small")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="x-small")
