"""The panels as a workspace of wandb.

wandb-workspaces 0.4 builds it without a connection; to save it needs a login.
"""

import math

import wandb_workspaces.reports.v2 as reports
import wandb_workspaces.workspaces as workspaces

from verl_tree.dashboards.panels import NUM_COLUMNS, TOPICS, Panel

TABLES = ("step/trees", "val/trees")
"""Tables with the pages of trees (docs/stored_trees.md)."""


def wandb_workspace(*, entity: str, project: str, name: str) -> workspaces.Workspace:
    """Return the workspace of a project, not saved: a section for each topic, and one with the pages of trees."""
    sections = [_section(topic, [_line_plot(panel) for panel in panels]) for topic, panels in TOPICS.items()]
    sections.append(_section("Trees", [reports.WeavePanelSummaryTable(table_name=table) for table in TABLES]))
    return workspaces.Workspace(entity=entity, project=project, name=name, sections=sections)


def _section(title: str, panels: list) -> workspaces.Section:
    rows = math.ceil(len(panels) / NUM_COLUMNS)
    layout = workspaces.SectionLayoutSettings(columns=NUM_COLUMNS, rows=rows)
    return workspaces.Section(name=title, panels=panels, is_open=True, layout_settings=layout)


def _line_plot(panel: Panel) -> reports.LinePlot:
    return reports.LinePlot(title=panel.title, x="Step", y=list(panel.keys), metric_regex=panel.pattern)
