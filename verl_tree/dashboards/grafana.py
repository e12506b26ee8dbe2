"""A dashboard of Grafana for what Prometheus gets of a training run: metrics of vLLM and of Ray.

verl 0.9.1 tells Prometheus where its rollout servers and Ray's exporters are
(`actor_rollout_ref.rollout.prometheus.enable`, verl/workers/rollout/utils.py). The trainer's own metrics are not among
them; `verl_tree.dashboards.panels` is for those. The panels stand in `grafana_panels.csv` beside this file.
"""

import csv
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

_NUM_COLUMNS, _GRID_WIDTH, _PANEL_HEIGHT = 3, 24, 8
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class PrometheusPanel:
    """A plot over time: the rows of the file that have its title.

    Attributes:
        title: What stands above it.
        unit: One of Grafana's units.
        queries: A PromQL expression for each legend, in which `{{name}}` is a label of the metric.
    """

    title: str
    unit: str
    queries: dict[str, str]


def _read() -> dict[str, tuple[PrometheusPanel, ...]]:
    topics: dict[str, dict[str, PrometheusPanel]] = {}
    text = files("verl_tree.dashboards").joinpath("grafana_panels.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines(), strict=True):
        panel = PrometheusPanel(row["title"], row["unit"], {})
        panel = topics.setdefault(row["topic"], {}).setdefault(panel.title, panel)
        panel.queries[row["legend"]] = row["query"]
    return {topic: tuple(panels.values()) for topic, panels in topics.items()}


TOPICS = _read()
"""All panels by topic, each a row of Grafana, in the order of the file."""


def grafana_dashboard() -> dict[str, Any]:
    """Return the JSON model of the dashboard, as Grafana imports it; it asks for a Prometheus data source."""
    panels: list[dict[str, Any]] = []
    y = 0
    for topic, shown in TOPICS.items():
        place = {"x": 0, "y": y, "w": _GRID_WIDTH, "h": 1}
        panels.append({"type": "row", "title": topic, "collapsed": False, "panels": [], "gridPos": place})
        panels += [_panel(panel, number=number, y=y + 1) for number, panel in enumerate(shown)]
        y += 1 + _PANEL_HEIGHT * -(-len(shown) // _NUM_COLUMNS)
    variable = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return {
        "title": "verl_tree: rollout and machines",
        "uid": "verl-tree",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [variable]},
        "panels": [{"id": number, **panel} for number, panel in enumerate(panels, start=1)],
    }


def _panel(panel: PrometheusPanel, *, number: int, y: int) -> dict[str, Any]:
    row, column = divmod(number, _NUM_COLUMNS)
    width = _GRID_WIDTH // _NUM_COLUMNS
    targets = [
        {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend, "datasource": _DATASOURCE}
        for index, (legend, expression) in enumerate(panel.queries.items())
    ]
    return {
        "type": "timeseries",
        "title": panel.title,
        "datasource": _DATASOURCE,
        "gridPos": {"x": column * width, "y": y + row * _PANEL_HEIGHT, "w": width, "h": _PANEL_HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }
