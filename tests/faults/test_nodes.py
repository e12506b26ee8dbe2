"""A cluster of two nodes loses one: the run ends and says so."""

import time
from pathlib import Path

import psutil
import pytest
import ray
from faulty_run import FaultyRun
from marked_phases import MARKS_VARIABLE
from ray.cluster_utils import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

END_LIMIT_S = 120.0
"""Ray takes up to 30 s to give up a node that does not answer."""


def test_a_lost_node_ends_the_run_with_its_cause(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agent loops run on both nodes, one worker each."""
    options = (
        "actor_rollout_ref.rollout.agent.num_workers=2",
        "actor_rollout_ref.rollout.agent.default_agent_loop=long_tail",
        "data.max_response_length=160",
        "actor_rollout_ref.rollout.max_model_len=240",
        "tree.watchdog.poll_s=0.5",
    )
    run = FaultyRun(folder, "nodes", options)
    # Ray's nodes give their environment to the processes that they start.
    for name, value in run.variables().items():
        monkeypatch.setenv(name, value)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 16})
    try:
        second = cluster.add_node(num_cpus=4)
        cluster.wait_for_nodes()
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        with run:
            run.wait_for("generation", step=2)
            started = time.monotonic()
            cluster.remove_node(second, allow_graceful=False)
            assert run.process.wait(timeout=END_LIMIT_S) != 0
            assert time.monotonic() - started < END_LIMIT_S
            assert "AgentLoopWorker" in run.log
            assert "node" in "\n".join(run.log.splitlines()[-60:])
            assert 1 in run.metrics
    finally:
        cluster.shutdown()
        ray.shutdown()
        for each in psutil.process_iter():
            if MARKS_VARIABLE in (each.environ() if each.pid != psutil.Process().pid else {}):
                each.kill()
