"""What the files of whole runs share."""

import os
from typing import Any

import pytest

from verl_tree.launch.command.environment import RAY_METRICS_VARIABLE

# For the clusters that a test starts itself; a run's own has it from the entry point.
os.environ.setdefault(RAY_METRICS_VARIABLE, "0")


@pytest.fixture(scope="module")
def selected(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Return the parameters of each test of this file that runs. What the others need is not computed."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    return [item.callspec.params for item in items if item.module is request.module and hasattr(item, "callspec")]
