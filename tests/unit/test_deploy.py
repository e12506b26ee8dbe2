"""The files of `deploy/` and docs/install.md name the versions of the locks, and the SLURM script starts Ray."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
# Compiled by the user beside the locked packages, with what compiles it.
NOT_LOCKED = {"flash-attn", "wheel"}
STAND_IN = """#!/usr/bin/env bash
# Of SLURM: says the names of two nodes; runs nothing, but writes down what would run where.
if [[ $0 == */scontrol ]]; then printf 'n1\\nn2\\n'; exit; fi
for each; do [[ $each == --nodelist=* ]] && node=${each#*=}; done
while [[ $1 == --* ]]; do shift; done
[[ "$1 $2 $3" == 'env -u ROCR_VISIBLE_DEVICES' ]] && shift 3
printf '%s %s %s\\n' "$node" "${#RAY_AUTH_TOKEN}" "$*" >>"$CALLS"
case "$*" in
  hostname*) echo 10.0.0.1 10.1.0.1 ;;
  'python -c'*) echo 16 ;;
esac
"""


def locked_versions() -> dict[str, str]:
    text = (ROOT / "requirements" / "gpu.lock").read_text()
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, flags=re.MULTILINE))


@pytest.mark.parametrize("name", ["deploy/Dockerfile", "docs/install.md"])
def test_versions_are_those_of_the_lock(name: str) -> None:
    named = re.findall(r"\b([a-z0-9-]+)==([\w.]*\w)", (ROOT / name).read_text())
    versions = locked_versions()
    assert "flash-attn-4" in dict(named)
    assert [each for each in named if each[0] not in NOT_LOCKED and versions[each[0]] != each[1]] == []


def test_the_image_has_the_cuda_of_torch() -> None:
    (image,) = re.findall(r"^FROM nvidia/cuda:(\d+\.\d+)\S*-devel", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert locked_versions()["cuda-toolkit"].startswith(f"{image}.")


def test_the_image_gets_what_the_wheel_is_made_of() -> None:
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    assert kept == {"LICENSE", "README.md", "configs", "pyproject.toml", "requirements", "rollout_hooks", "verl_tree"}
    assert all((ROOT / each).exists() for each in kept)


def test_the_job_of_kuberay() -> None:
    job = yaml.safe_load((DEPLOY / "rayjob.yaml").read_text())["spec"]
    cluster = job["rayClusterSpec"]
    assert cluster["rayVersion"] == locked_versions()["ray"]
    assert cluster["authOptions"] == {"mode": "token", "secretName": "verl-tree-ray"}
    (workers,) = cluster["workerGroupSpecs"]
    (worker,) = workers["template"]["spec"]["containers"]
    num_gpus = workers["rayStartParams"]["num-gpus"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == num_gpus
    assert f"trainer.nnodes={workers['replicas']} trainer.n_gpus_per_node={num_gpus}" in job["entrypoint"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-gpus"] == "0"
    assert cluster["headGroupSpec"]["template"]["spec"]["volumes"] == workers["template"]["spec"]["volumes"]


def test_the_slurm_script_starts_ray_on_every_node_and_the_driver_on_the_first(tmp_path: Path) -> None:
    for name in ("srun", "scontrol"):
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "CALLS": str(calls),
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_SUBMIT_DIR": str(tmp_path),
    }
    script = [str(DEPLOY / "slurm.sh"), "data.train_files=/a b.parquet"]
    subprocess.run(script, env=environment, check=True, capture_output=True, timeout=60)
    lines = [line.split(" ", 2) for line in calls.read_text().splitlines()]
    assert {(node, token) for node, token, _ in lines[1:]} == {("n1", "64"), ("n2", "64")}, "all have the token"
    started = {(node, command) for node, _, command in lines if command.startswith("ray start")}
    head = "ray start --block --head --node-ip-address=10.0.0.1 --port=6379 --num-gpus=8"
    assert started == {("n1", head), ("n2", "ray start --block --address=10.0.0.1:6379 --num-gpus=8")}
    (driver,) = [(node, command) for node, _, command in lines if "verl_tree.main_ppo" in command]
    sizes = "trainer.nnodes=2 trainer.n_gpus_per_node=8"
    assert driver == ("n1", f"python -m verl_tree.main_ppo profile=gpu {sizes} data.train_files=/a b.parquet")
