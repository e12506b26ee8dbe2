"""The command line: its configuration from a wheel, its refusals, a whole run, and a run whose engine is killed."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tiny_run import command, environment, make_inputs, read_metrics, run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]


def entry(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "verl_tree.main_ppo", *arguments]
    return subprocess.run(command, cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True)


def test_configuration_from_a_wheel_outside_the_checkout(tmp_path: Path) -> None:
    """The wheel brings its YAML files along, and nothing of the checkout is used."""
    source, target, elsewhere = tmp_path / "source", tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    _copy_sources(source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "-w", str(tmp_path), str(source)], check=True)
    (wheel,) = tmp_path.glob("verl_tree-*.whl")
    install = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
    subprocess.run([*install, "--target", str(target), str(wheel)], check=True)
    assert sorted(each.name for each in target.iterdir() if each.is_dir() and "dist-info" not in each.name) == [
        "rollout_hooks",
        "verl_tree",
    ]
    where = [sys.executable, "-c", "import verl_tree.configs as c, rollout_hooks as r; print(c.__file__, r.__file__)"]
    variables = {**os.environ, "PYTHONPATH": str(target)}
    found = subprocess.run(where, cwd=elsewhere, env=variables, capture_output=True, text=True, check=True)
    assert all(path.startswith(str(target)) for path in found.stdout.split())

    done = entry("--cfg", "job", "tree.capacity=4321", cwd=elsewhere, PYTHONPATH=str(target))
    assert done.returncode == 0, done.stderr
    assert "capacity: 4321" in done.stdout
    assert "strategy: ${tree_strategy:${tree.enabled}}" in done.stdout
    for profile in ("cpu", "gpu"):
        done = entry("--cfg", "job", f"profile={profile}", cwd=elsewhere, PYTHONPATH=str(target))
        assert done.returncode == 0, done.stderr


def _copy_sources(folder: Path) -> None:
    """What a wheel is built from; a build in the checkout would leave files there."""
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("verl_tree", "rollout_hooks", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)


def test_bad_setting_ends_at_once_and_starts_no_ray(tmp_path: Path) -> None:
    started = time.monotonic()
    done = entry("profile=cpu", "tree.shared_tokens=max", cwd=tmp_path)
    assert time.monotonic() - started < 60
    assert done.returncode != 0
    assert "tree.shared_tokens='max' is unknown; choose one of sum, mean, once" in done.stderr
    assert "ray init kwargs" not in done.stdout


def test_two_ranks_and_their_engines_share_the_weights(tmp_path: Path) -> None:
    """Two training ranks, two vLLM engines: every step's rollouts have the probabilities of the updated policy."""
    make_inputs(tmp_path)
    steps = run(tmp_path, "ranks", "trainer.n_gpus_per_node=2", "trainer.total_training_steps=3")
    assert set(steps) == {1, 2, 3}
    for metrics in steps.values():
        assert metrics["actor/grad_norm"] > 0
        # float32 on both sides: rounding is left. Weights of the step before would differ by 1e-4 and more.
        assert metrics["training/rollout_probs_diff_max"] < 1e-5


def test_killed_engine_ends_the_run_with_the_cause(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    metrics = tmp_path / "killed.jsonl"
    options = ["trainer.total_training_steps=1000", "trainer.total_epochs=10000", "tree.watchdog.poll_s=0.5"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command(tmp_path, *options), env=environment(metrics), cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        _wait_for(lambda: 2 in read_metrics(metrics) or process.poll() is not None)
        engines = [each for each in _descendants(process) if _title(each).startswith("VLLM::Worker")]
        assert engines, (tmp_path / "log").read_text()[-8000:]
        os.kill(engines[0].pid, signal.SIGKILL)
        process.wait(timeout=120)
    finally:
        left = _descendants(process)
        process.kill()
        for each in left:
            each.kill()
    text = (tmp_path / "log").read_text()
    assert process.returncode not in (0, -signal.SIGKILL)
    assert re.search(r"RunFailedError: .*VLLM::", text)
    assert "--- last 40 lines of stderr of actor" in text


def _descendants(process: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def _wait_for(condition: Callable[[], bool], *, timeout_s: float = 400.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.5)
