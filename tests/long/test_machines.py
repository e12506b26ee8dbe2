"""Runs on two machines that share nothing but what is installed; the files of `deploy/` as SLURM and Ray run them.

SLURM is Debian's, with a controller on the first machine and a daemon on both. Kubernetes is not here: of the `RayJob`,
head and workers are started as its parameters say, and its entrypoint is submitted.
"""

import os
import shlex
import shutil
import time
from pathlib import Path

import pytest
import yaml
from machines import (
    ADDRESSES,
    HERE,
    RAY_ADDRESS,
    SHARED,
    Machine,
    may_make_machines,
    start_ray,
    two_machines,
    variables_there,
)
from tiny_run import command, environment, make_inputs, read_metrics

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not may_make_machines(), reason="this user may not make namespaces"),
]

SLURM = f"""ClusterName=two
SlurmctldHost=n1
SlurmUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
MpiDefault=none
StateSaveLocation=/tmp/slurmctld
SlurmdSpoolDir=/tmp/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={HERE}/slurmctld.log
SlurmdLogFile={HERE}/slurmd.log
NodeName=n[1-2] CPUs=2 Gres=gpu:1
PartitionName=all Nodes=n[1-2] Default=YES
"""
MUNGE = """
mkdir -p /run/munge /tmp/slurmctld /tmp/slurmd
chown munge /run/munge
runuser -u munge -- munged --log-file=/run/munge/log --pid-file=/run/munge/pid --seed-file=/run/munge/seed
"""
"""Both machines have the key that was made when munge was installed."""


def make_inputs_on(machines: list[Machine]) -> None:
    """Give the first machine all inputs and the other what its processes open."""
    here, other = (each.folder for each in machines)
    make_inputs(here)
    shutil.copytree(here / "model", other / "model")
    shutil.copy(here / "loops.yaml", other)


def arguments(*options: str) -> list[str]:
    """Return those of a run, less what the files of `deploy/` give."""
    given = ("profile=", "trainer.nnodes=", "trainer.n_gpus_per_node=")
    return [each for each in command(HERE, *options)[3:] if not each.startswith(given)]


def variables_of_a_run() -> dict[str, str]:
    return variables_there(environment(HERE / "metrics.jsonl"))


def test_a_recipe_learns_across_two_machines(tmp_path: Path) -> None:
    variables = {
        **variables_there(os.environ),
        "RAY_ADDRESS": RAY_ADDRESS,
        "RUN": f"{HERE}/run",
        "PYTHONPATH": str(ROOT),
    }
    mode = (
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.parameter_sync_step=1",
        "actor_rollout_ref.hybrid_engine=false",
        "algorithm.rollout_correction.rollout_is=token",
    )
    with two_machines(tmp_path) as machines:
        for each in machines:
            start_ray(each, variables=variables)
        log = tmp_path / "recipe.log"
        arguments = [f"{ROOT}/recipes/arithmetic_tools/run.sh", *mode, "trainer.total_training_steps=12"]
        process = machines[0].start(*arguments, variables=variables, log=log)
        assert process.wait(timeout=1200) == 0, log.read_text()[-6000:]
        metrics = read_metrics(machines[0].folder / "run" / "metrics.jsonl")
        rewards = {
            step: each["val-core/arithmetic_tools/reward/mean@1"] for step, each in metrics.items() if step in (0, 12)
        }
        print(rewards)
        assert rewards[12] > rewards[0] + 0.3
        made = {each.name for each in machines[1].folder.iterdir()}
        assert made == {".up"}, "the other machine has no file of the run"


@pytest.mark.skipif(shutil.which("slurmctld") is None, reason="SLURM is not installed")
def test_the_slurm_script(tmp_path: Path) -> None:
    """SLURM says by two names which GPUs a node has, of which verl refuses one."""
    variables = {
        **variables_of_a_run(),
        "SLURM_CONF": f"{HERE}/slurm.conf",
        "VENV": str(ROOT / ".venv"),
        "PROFILE": "cpu",
    }
    variables["RAY_OPTIONS"] = "--num-cpus=16 --object-store-memory=500000000"
    with two_machines(tmp_path) as machines:
        make_inputs_on(machines)
        for each in machines:
            (each.folder / "slurm.conf").write_text(SLURM)
            (each.folder / "gres.conf").write_text("NodeName=n[1-2] Name=gpu File=/dev/zero\n")
            each.run("bash", "-ec", MUNGE, variables=variables)
        machines[0].run("slurmctld", variables=variables)
        for each in machines:
            each.run("slurmd", "-N", each.name, variables=variables)
        asked = ["--nodes=2", "--gpus-per-node=1", f"--output={HERE}/job.log", "--wait", f"{DEPLOY}/slurm.sh"]
        options = arguments("trainer.total_training_steps=2")
        try:
            machines[0].run("sbatch", *asked, *options, variables=variables, timeout_s=600)
        finally:
            log = (machines[0].folder / "job.log").read_text(errors="replace")
            print(log[-6000:])
        assert sorted(read_metrics(machines[0].folder / "metrics.jsonl")) == [1, 2]
        assert f"ip={ADDRESSES['n2']}" in log, "the other node's rank trains, too"


def test_the_ray_job_of_kubernetes(tmp_path: Path) -> None:
    """Its head has no GPU: the trainer is on one machine, the rank on the other, and their checkpoints are shared."""
    job = yaml.safe_load((DEPLOY / "rayjob.yaml").read_text())["spec"]
    cluster = job["rayClusterSpec"]
    head, worker = cluster["headGroupSpec"]["rayStartParams"], cluster["workerGroupSpecs"][0]["rayStartParams"]
    assert (head["num-gpus"], worker["num-gpus"]) == ("0", "8")
    entrypoint = shlex.split(job["entrypoint"])
    changed = {"profile": "cpu", "trainer.nnodes": "1", "trainer.n_gpus_per_node": "1"}
    given = dict(each.split("=", 1) for each in entrypoint[3:])
    assert changed.keys() <= given.keys()
    assert given["trainer.default_local_dir"].startswith("/shared/")
    options = [f"{name}={value}" for name, value in changed.items()]
    options += arguments(
        "trainer.total_training_steps=2", "trainer.save_freq=2", f"trainer.default_local_dir={SHARED}/run"
    )
    variables = variables_of_a_run()
    with two_machines(tmp_path) as machines:
        make_inputs_on(machines)
        for each, num_gpus in zip(machines, (int(head["num-gpus"]), 1), strict=True):
            start_ray(each, variables=variables, num_gpus=num_gpus)
        submit = ["ray", "job", "submit", "--address=http://127.0.0.1:8265", "--", *entrypoint[:3], *options]
        started = time.monotonic()
        printed = machines[0].run(*submit, variables=variables, timeout_s=600)
        print(f"{time.monotonic() - started:.0f} s", printed[-3000:])
        saved = tmp_path / "shared" / "run" / "global_step_2"
        for name in ("actor/model_world_size_1_rank_0.pt", "data.pt", "complete.json"):
            assert (saved / name).exists(), name
