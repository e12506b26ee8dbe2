"""What the files of whole runs share."""

import os
from pathlib import Path

import pytest
from tiny_run import make_inputs

from verl_tree.launch.environment import RAY_METRICS_VARIABLE

# For the clusters that a test starts itself; a run's own has it from the entry point.
os.environ.setdefault(RAY_METRICS_VARIABLE, "0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the inputs of all training runs of a file."""
    folder = tmp_path_factory.mktemp("runs")
    make_inputs(folder)
    return folder
