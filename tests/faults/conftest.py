"""What the files of faults share."""

from pathlib import Path

import pytest
from tiny_run import make_inputs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the inputs of all runs of a file."""
    folder = tmp_path_factory.mktemp("faults")
    make_inputs(folder)
    return folder
