"""The command lines refuse what cannot work before anything starts."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("module", "arguments", "refusal"),
    [
        (
            "main_ppo",
            ["profile=cpu", "tree.shared_tokens=max", "trainer.use_v1=false"],
            "tree.shared_tokens=max: choose one of sum, mean, once",
        ),
        (
            "main_ppo",
            ["profile=cpu", "tree.backened=triton"],
            "tree.backened: no such option; did you mean tree.backend?",
        ),
        (
            "main_sft",
            ["trainer.device=cpu", "data.pad_mode=right"],
            "data.pad_mode=right: a step has rows of any length",
        ),
    ],
)
def test_a_bad_setting_ends_with_its_reasons_and_starts_nothing(
    tmp_path: Path, module: str, arguments: list[str], refusal: str
) -> None:
    command = [sys.executable, "-m", f"verl_tree.{module}", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert refusal in done.stderr
    lines = done.stderr.splitlines()
    reasons = lines[lines.index("Refused; nothing was started.") + 1 :]
    assert all(line.startswith("  ") for line in reasons), "all reasons, and nothing behind them"
    assert len(reasons) >= len(arguments) - 1
    assert "Traceback" not in done.stderr
    assert "ray init kwargs" not in done.stdout
    assert "Total steps" not in done.stdout
