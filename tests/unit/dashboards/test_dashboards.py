"""The dashboards show what the table of metrics says, in the formats of wandb, TensorBoard and Grafana."""

import json
import os
import re
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest

from verl_tree.dashboards import grafana
from verl_tree.dashboards.panels import TOPICS
from verl_tree.trainer.told.metric_table import KEYS, METRICS

PANELS = [panel for panels in TOPICS.values() for panel in panels]


def test_every_panel_shows_something_and_has_a_title_of_its_own() -> None:
    assert len({panel.title for panel in PANELS}) == len(PANELS)
    assert [panel.title for panel in PANELS if bool(panel.keys) == bool(panel.pattern)] == []


def test_every_metric_of_the_table_that_names_a_panel_is_there() -> None:
    shown = [key for panel in PANELS for key in panel.keys]
    wanted = [name for metrics in METRICS.values() for metric in metrics if metric.panel for name in metric.names]
    assert len(set(shown)) == len(shown)
    assert set(wanted) <= set(shown)
    # The others are verl's.
    assert {key for key in set(shown) - set(wanted) if "tree" in key} == set()
    assert set(wanted) <= KEYS


def test_panels_by_hand() -> None:
    titles = ["Learning", "Trees and sharing", "Speed and MFU", "Capture and failures", "Staleness"]
    assert list(TOPICS) == [*titles, "Trust: rollout against training", "Memory"]
    keys = {panel.title: panel.keys for panel in PANELS}
    assert keys["Share of tokens saved"] == ("tree/por", "tree/err", "tree/live_tokens")
    assert keys["Seconds"][0] == "timing_s/step"
    assert keys["Seconds"][-1] == "timing_s/tree_log"
    calls, sessions = ("tree/failed_calls", "tree/aborted_calls"), ("tree/failed_sessions", "tree/failed_prompts")
    assert keys["Failures"] == (*calls, *sessions, "tree/retried_prompts")


class Account(BaseHTTPRequestHandler):
    """An account of wandb that takes every view, and keeps what it was asked for."""

    views: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "upsertView" in asked["query"]:
            self.views.append(asked["variables"])
            answer = {"upsertView": {"view": {"id": "1", "name": asked["variables"]["name"]}, "inserted": True}}
        else:
            answer = {"viewer": {"id": "1", "entity": "team", "username": "me", "flags": "{}", "teams": {"edges": []}}}
        body = json.dumps({"data": answer}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_wandb_gets_a_view_with_the_panels(tmp_path: Path) -> None:
    """The command saves it to an account here: it needs a login, but no place says that it must be at wandb's."""
    pytest.importorskip("wandb_workspaces")
    with ThreadingHTTPServer(("127.0.0.1", 0), Account) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        login = {"WANDB_BASE_URL": url, "WANDB_API_KEY": "a" * 40, "WANDB_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-m", "verl_tree.commands", "workspace", "wandb", "team/agents", "--name", "night"]
        done = subprocess.run(command, env=os.environ | login, capture_output=True, text=True, timeout=120)
        server.shutdown()
    assert done.returncode == 0, done.stderr
    (view,) = Account.views
    assert (view["entityName"], view["projectName"], view["displayName"]) == ("team", "agents", "night")
    assert done.stdout.startswith(f"{url}/team/agents?nw=")

    *sections, trees = json.loads(view["spec"])["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections] == list(TOPICS)
    for section, panels in zip(sections, TOPICS.values(), strict=True):
        configs = [panel["config"] for panel in section["panels"]]
        assert [config["chartTitle"] for config in configs] == [panel.title for panel in panels]
        assert [config["metrics"] for config in configs] == [list(panel.keys) for panel in panels]
        assert [config.get("metricRegex") for config in configs] == [panel.pattern for panel in panels]
        assert {config["xAxis"] for config in configs} == {"_step"}
        assert section["isOpen"]
    assert all(table in json.dumps(trees["panels"]) for table in ("step/trees", "val/trees"))


def test_tensorboard_reads_the_layout(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

    from verl_tree.dashboards.tensorboard_layout import write_tensorboard_layout

    (file,) = write_tensorboard_layout(tmp_path).iterdir()
    assert file.parent == tmp_path / "layout"
    events = [Event.FromString(record) for record in RawEventFileLoader(str(file)).Load()]
    (value,) = [value for event in events for value in event.summary.value]
    assert value.metadata.plugin_data.plugin_name == "custom_scalars"
    layout = Layout.FromString(value.tensor.string_val[0])
    assert [category.title for category in layout.category] == list(TOPICS)
    tags = {key for panel in PANELS for key in panel.keys} | KEYS | {"val-core/memory_qa/reward/mean@1"}
    for category, panels in zip(layout.category, TOPICS.values(), strict=True):
        for chart, panel in zip(category.chart, panels, strict=True):
            # As TensorBoard matches.
            drawn = {tag for tag in tags if any(re.match(pattern, tag) for pattern in chart.multiline.tag)}
            assert chart.title == panel.title
            assert drawn == (set(panel.keys) if panel.pattern is None else {"val-core/memory_qa/reward/mean@1"})


def test_panels_of_grafana_lie_beside_each_other() -> None:
    panels = json.loads(json.dumps(grafana.grafana_dashboard()))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) == 23
    titles = [panel["title"] for panel in panels]
    assert titles == [
        title for topic, shown in grafana.TOPICS.items() for title in (topic, *(panel.title for panel in shown))
    ]


def test_queries_of_grafana_by_hand() -> None:
    panels = {panel["title"]: panel for panel in grafana.grafana_dashboard()["panels"]}
    (quantile, _) = panels["Duration of a call"]["targets"]
    assert quantile["legendFormat"] == "50%"
    assert quantile["expr"] == (
        "histogram_quantile(0.5, sum by (le) (rate(vllm:e2e_request_latency_seconds_bucket[$__rate_interval])))"
    )
    (share,) = panels["Prompt tokens found in the prefix cache"]["targets"]
    assert share["expr"] == (
        "sum(rate(vllm:prefix_cache_hits_total[$__rate_interval])) / "
        "sum(rate(vllm:prefix_cache_queries_total[$__rate_interval]))"
    )
    assert share["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
