"""Two machines, one of which loses power in mid-step: the run ends and says so, and goes on when it is back."""

import re
import shutil
import time
from pathlib import Path

import pytest
from async_run import SEPARATE
from faulty_run import FaultyRun
from machines import (
    HERE,
    RAY_ADDRESS,
    SHARED,
    Machine,
    connect,
    may_make_machines,
    start_ray,
    two_machines,
    variables_there,
    wait_until,
)
from tiny_run import make_inputs, read_metrics

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not may_make_machines(), reason="this user may not make namespaces"),
]

END_LIMIT_S = 120.0
"""Ray takes up to 30 s to give up a node that does not answer."""
NUM_STEPS = 6
RUNS = {
    # The trainer and its rank on the first machine, the engine on the second.
    "separate": (*SEPARATE, f"trainer.default_local_dir={SHARED}/checkpoints"),
    # A rank with its engine on each machine, which keeps its part of the checkpoints.
    "sync": ("trainer.nnodes=2", f"trainer.default_local_dir={HERE}/checkpoints"),
}


def copy_inputs(machines: list[Machine], *names: str) -> None:
    """Give the first machine all inputs and the other what its processes open."""
    make_inputs(machines[0].folder)
    for name in names:
        source = machines[0].folder / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, machines[1].folder / name)


def arguments_of(*options: str) -> tuple[list[str], dict[str, str]]:
    """Return a command for the first machine, and its variables."""
    run = FaultyRun(HERE, "run", (*options, "trainer.save_freq=2", "trainer.resume_mode=auto"))
    return run.command, {**variables_there(run.variables()), "RAY_ADDRESS": RAY_ADDRESS}


@pytest.mark.parametrize("name", RUNS)
def test_a_machine_is_lost_and_returns(tmp_path: Path, name: str) -> None:
    options = (*RUNS[name], f"trainer.total_training_steps={NUM_STEPS}", "tree.watchdog.poll_s=0.5")
    command, variables = arguments_of(*options)
    with two_machines(tmp_path) as machines:
        copy_inputs(machines, "model", "loops.yaml")
        for each in machines:
            start_ray(each, variables=variables)
        here, log = machines[0].folder, tmp_path / "lost.log"
        process = machines[0].start(*command, variables=variables, log=log)
        marks = here / "run.marks"
        wait_until(lambda: marks.exists() and "update 3\n" in marks.read_text(), process=process, log=log, limit_s=600)
        started = time.monotonic()
        machines[1].lose_power()
        assert process.wait(timeout=END_LIMIT_S) != 0
        assert time.monotonic() - started < END_LIMIT_S
        assert re.search(r"the process of .* died: .*its node has died", log.read_text()), log.read_text()[-6000:]

        machines[1] = Machine("n2", tmp_path)
        connect(*machines)
        start_ray(machines[1], variables=variables)
        log = tmp_path / "resumed.log"
        assert machines[0].start(*command, variables=variables, log=log).wait(timeout=600) == 0, log.read_text()[-6000:]
        assert sorted(read_metrics(here / "run.jsonl")) == list(range(1, NUM_STEPS + 1))
        assert "step 3/6" in log.read_text(), "it goes on from the checkpoint of step 2"
        ranks = ["n1", "n2"] if name == "sync" else ["shared"]
        kept = [tmp_path / each / "checkpoints" / f"global_step_{NUM_STEPS}" / "actor" for each in ranks]
        assert [sorted(each.name for each in folder.glob("model_*")) for folder in kept] == [
            [f"model_world_size_{len(ranks)}_rank_{rank}.pt"] for rank in range(len(ranks))
        ]


def test_what_a_machine_lacks_is_told_before_a_process_starts(tmp_path: Path) -> None:
    command, variables = arguments_of(*RUNS["separate"][:-1])
    with two_machines(tmp_path) as machines:
        copy_inputs(machines, "model")
        for each in machines:
            start_ray(each, variables=variables)
        log = tmp_path / "refused.log"
        assert machines[0].start(*command, variables=variables, log=log).wait(timeout=120) == 1
        said = log.read_text()
        loops = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
        assert f"{loops}={HERE}/loops.yaml: not on node 10.77.0.2; put a copy there" in said
        assert re.search(rf"trainer\.default_local_dir={HERE}/checkpoints: .* another one on node 10\.77\.0\.2", said)
