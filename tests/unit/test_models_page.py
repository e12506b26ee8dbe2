"""The table of docs/models.md is made from its data, and a test that fails adds nothing to it."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_models.py"
SHOWN = """
import pytest
@pytest.mark.parametrize("error", [1e-9, 3e-7, 0.5])
def test_one(error, record_property):
    record_property("Qwen3 | gradients", error)
    record_property("Qwen3 | backends", "dense" if error < 1e-8 else "varlen")
    record_property("other", 1)
    record_property("Llama | LoRA", error)
    assert error < 0.1
"""


def test_the_page_is_up_to_date() -> None:
    assert subprocess.run([sys.executable, SCRIPT, "--check"], check=False, timeout=60).returncode == 0


def test_passed_tests_make_a_table(tmp_path: Path) -> None:
    (tmp_path / "test_shown.py").write_text(SHOWN)
    run = [sys.executable, "-m", "pytest", "-q", "-o", "junit_family=xunit1", "--junitxml=results.xml"]
    assert subprocess.run(run, cwd=tmp_path, check=False, timeout=120, stdout=subprocess.DEVNULL).returncode == 1
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        import make_models
    finally:
        sys.path.remove(str(SCRIPT.parent))
    rows = make_models.shown_by(tmp_path / "results.xml")
    assert [row.value for row in rows] == ["1e-09", "dense", "1e-09", "3e-07", "varlen", "3e-07"]
    assert make_models.table(rows).splitlines()[2:] == [
        "| Qwen3 | 3e-07 |  | dense, varlen |",
        "| Llama |  | 3e-07 |  |",
    ]
