"""What the files of whole runs share."""

from pathlib import Path

import pytest
from tiny_run import make_inputs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the inputs of all training runs of a file."""
    folder = tmp_path_factory.mktemp("runs")
    make_inputs(folder)
    return folder
