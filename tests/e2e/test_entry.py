"""The command line: its configuration from a wheel, and its refusals."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]


def entry(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "verl_tree.main_ppo", *arguments]
    return subprocess.run(command, cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True)


def test_configuration_from_a_wheel_outside_the_checkout(tmp_path: Path) -> None:
    """The wheel contains its YAML files, and nothing of the checkout is used."""
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
    """Copy the sources of the wheel, because a build in the checkout would leave files there."""
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
    assert "tree.shared_tokens=max: choose one of sum, mean, once" in done.stderr
    assert "ray init kwargs" not in done.stdout
