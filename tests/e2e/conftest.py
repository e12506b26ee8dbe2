"""What the files of whole runs share."""

import os
from collections.abc import Iterator
from pathlib import Path
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


@pytest.fixture(scope="session")
def _queue_of_all() -> Iterator[None]:
    import ray
    import transfer_queue as tq
    from omegaconf import OmegaConf

    import rollout_hooks.capture.wire_storage  # noqa: F401

    tests = Path(__file__).parents[1]  # workers and loops are classes of test files
    env = {
        "VERL_USE_EXTERNAL_MODULES": "verl_tree.cpu.platform",
        "TRANSFER_QUEUE_ENABLE": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (tests / "support", tests / "e2e", tests.parent))),
    }
    ray.init(address="local", num_cpus=8, num_gpus=2, include_dashboard=False, runtime_env={"env_vars": env})
    try:
        tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"trees": True}}}))
        yield
        tq.close()
    finally:
        ray.shutdown()


@pytest.fixture
def queue(_queue_of_all: None) -> Iterator[None]:
    """Start Ray, with two logical GPUs, and TransferQueue, once in a process; clear what each test leaves."""
    import transfer_queue as tq

    yield
    for partition, keys in tq.kv_list().items():
        if keys:
            tq.kv_clear(keys=list(keys), partition_id=partition)
