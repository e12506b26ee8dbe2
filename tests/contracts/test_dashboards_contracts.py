"""Ray 2.60 as the dashboard of Grafana relies on it: the names and labels of its metrics."""

import re

import pytest

pytest.importorskip("ray")

from ray.dashboard.modules.metrics.dashboards.default_dashboard_panels import default_dashboard_config

from verl_tree.dashboards.grafana import TOPICS


def test_the_metrics_are_those_of_rays_own_dashboard() -> None:
    of_ray = " ".join(
        target.expr for row in default_dashboard_config.rows for each in row.panels for target in each.targets
    )
    legends = " ".join(
        target.legend for row in default_dashboard_config.rows for each in row.panels for target in each.targets
    )
    queries = [each for panel in TOPICS["Machines: Ray"] for each in panel.queries.items()]
    used = {name for _, query in queries for name in re.findall(r"ray_\w+", query)}
    assert len(used) == 10
    assert {name for name in used if not re.search(rf"\b{name}\b", of_ray)} == set()
    labels = {label for legend, _ in queries for label in re.findall(r"{{(\w+)}}", legend)}
    assert {label for label in labels if label not in legends} == set()
    assert 'ray_actors{{Source="gcs"' in of_ray
