"""A cluster of two nodes loses one: the run ends and says so."""

import re
import time
from pathlib import Path

import pytest
from faulty_run import FaultyRun
from process_groups import free_port
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
    # Ray's own ports may be taken by another cluster of this machine.
    ports = {"dashboard_port": free_port(), "dashboard_agent_listen_port": free_port()}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 16, "num_gpus": 1, **ports})
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
            assert re.search(r"the process of \w+ .* died: .*its node has died", run.log), run.log[-6000:]
            assert 1 in run.metrics
    finally:
        cluster.shutdown()
