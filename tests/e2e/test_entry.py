"""The command line refuses what cannot work, before anything starts."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_bad_setting_ends_at_once_and_starts_no_ray(tmp_path: Path) -> None:
    started = time.monotonic()
    command = [sys.executable, "-m", "verl_tree.main_ppo", "profile=cpu", "tree.shared_tokens=max"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert time.monotonic() - started < 60
    assert done.returncode != 0
    assert "tree.shared_tokens=max: choose one of sum, mean, once" in done.stderr
    assert "ray init kwargs" not in done.stdout
