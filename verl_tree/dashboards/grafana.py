"""A dashboard of Grafana for what Prometheus gets of a training run: metrics of vLLM and of Ray.

verl 0.9.1 tells Prometheus where its rollout servers and Ray's exporters are
(`actor_rollout_ref.rollout.prometheus.enable`, verl/workers/rollout/utils.py). The trainer's own metrics are not among
them; `verl_tree.dashboards.panels` is for those.
"""

from dataclasses import dataclass
from typing import Any

_NUM_COLUMNS, _GRID_WIDTH, _PANEL_HEIGHT = 3, 24, 8
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class PrometheusPanel:
    """A plot over time.

    Attributes:
        title: What stands above it.
        unit: One of Grafana's units.
        queries: A PromQL expression for each legend, in which `{{name}}` is a label of the metric.
    """

    title: str
    unit: str
    queries: dict[str, str]


def _rate(metric: str) -> str:
    return f"sum(rate({metric}[$__rate_interval]))"


def _quantiles(metric: str) -> dict[str, str]:
    buckets = f"sum by (le) (rate({metric}_bucket[$__rate_interval]))"
    return {f"{share:.0%}": f"histogram_quantile({share}, {buckets})" for share in (0.5, 0.99)}


TOPICS: dict[str, tuple[PrometheusPanel, ...]] = {
    "Rollout: vLLM": (
        PrometheusPanel(
            "Calls",
            "short",
            {"running": "sum(vllm:num_requests_running)", "waiting": "sum(vllm:num_requests_waiting)"},
        ),
        PrometheusPanel(
            "Tokens per second",
            "short",
            {"sampled": _rate("vllm:generation_tokens_total"), "prompts": _rate("vllm:prompt_tokens_total")},
        ),
        PrometheusPanel("KV cache in use", "percentunit", {"{{instance}}": "vllm:kv_cache_usage_perc"}),
        PrometheusPanel(
            "Prompt tokens found in the prefix cache",
            "percentunit",
            {"share": f"{_rate('vllm:prefix_cache_hits_total')} / {_rate('vllm:prefix_cache_queries_total')}"},
        ),
        PrometheusPanel("Preemptions per second", "short", {"all servers": _rate("vllm:num_preemptions_total")}),
        PrometheusPanel("Duration of a call", "s", _quantiles("vllm:e2e_request_latency_seconds")),
        PrometheusPanel("Time to the first token", "s", _quantiles("vllm:time_to_first_token_seconds")),
        PrometheusPanel("Wait in the queue", "s", _quantiles("vllm:request_queue_time_seconds")),
    ),
    "Machines: Ray": (
        PrometheusPanel("GPU in use", "percent", {"{{instance}} {{GpuIndex}}": "ray_node_gpus_utilization"}),
        PrometheusPanel("GPU memory", "bytes", {"{{instance}} {{GpuIndex}}": "ray_node_gram_used * 1024 * 1024"}),
        PrometheusPanel("CPU in use", "percent", {"{{instance}}": "ray_node_cpu_utilization"}),
        PrometheusPanel(
            "Memory in use", "percentunit", {"{{instance}}": "ray_node_mem_used_host / ray_node_mem_total_host"}
        ),
        PrometheusPanel("Object store", "bytes", {"{{Location}}": "sum by (Location) (ray_object_store_memory)"}),
        PrometheusPanel("Disk in use", "bytes", {"{{instance}}": "ray_node_disk_usage"}),
        PrometheusPanel("Actors", "short", {"{{State}}": 'sum by (State) (ray_actors{Source="gcs"})'}),
        PrometheusPanel(
            "Processes killed for memory",
            "short",
            {"{{Name}}": "sum by (Name) (ray_memory_manager_worker_eviction_total)"},
        ),
        PrometheusPanel(
            "Processes that failed",
            "short",
            {"{{Type}}": "sum by (Type) (ray_node_manager_unexpected_worker_failure_total)"},
        ),
    ),
}
"""All panels by topic, each a row of Grafana."""


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
