"""The panels as a layout of TensorBoard's tab "Custom Scalars"."""

import re
from pathlib import Path

from torch.utils.tensorboard.writer import SummaryWriter

from verl_tree.dashboards.panels import TOPICS, Panel

FOLDER = "layout"
"""Of TensorBoard's log folder. In the folder of a run, TensorBoard would take the newer file for its continuation."""


def write_tensorboard_layout(log_dir: Path) -> Path:
    """Write the layout for the runs below `log_dir`, and return the folder that it is in."""
    folder = log_dir / FOLDER
    with SummaryWriter(str(folder)) as writer:
        writer.add_custom_scalars(tensorboard_layout())
    return folder


def tensorboard_layout() -> dict[str, dict[str, list]]:
    """Return the charts of each topic: their kind and the regular expressions of their tags."""
    return {topic: {panel.title: ["Multiline", _tags(panel)] for panel in panels} for topic, panels in TOPICS.items()}


def _tags(panel: Panel) -> list[str]:
    # TensorBoard takes each tag that begins with a match.
    patterns = [re.escape(key) for key in panel.keys] if panel.pattern is None else [panel.pattern]
    return [f"{pattern}$" for pattern in patterns]
