"""A package registry is asked: what pyproject.toml declares has a solution, and the locks are solutions.

Metadata only: nothing is downloaded but the descriptions of packages. Where no registry answers, the tests are skipped.
"""

import subprocess
from pathlib import Path

import pytest
import uv

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12")
# The oldest C library with wheels for all packages is 2.31; a container of Ubuntu 22.04 has 2.35.
PLATFORM = "x86_64-manylinux_2_35"

pytestmark = pytest.mark.e2e


def resolve(*arguments: str, python: str) -> list[str]:
    """Return the pins of a solution; raise AssertionError with uv's explanation where there is none."""
    command = [uv.find_uv_bin(), "pip", "compile", "--quiet", "--no-annotate", "--no-header"]
    command += ["--python-version", python, "--python-platform", PLATFORM, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module", autouse=True)
def registry(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip the tests where no registry has even verl."""
    wanted = tmp_path_factory.mktemp("registry") / "wanted.txt"
    wanted.write_text("verl==0.9.1")
    try:
        resolve("--no-deps", str(wanted), python="3.12")
    except AssertionError as error:
        pytest.skip(f"no package registry answers: {error}")


@pytest.mark.parametrize("python", PYTHONS)
def test_the_extra_with_verls_pins_has_a_solution(python: str) -> None:
    """That of the extra gpu, with all that may stand beside it, is its lock."""
    pins = resolve("--extra=gpu-vllm024", "--extra=fla", "--extra=recipes", "pyproject.toml", python=python)
    assert {"verl==0.9.1", "ray==2.60.0", "vllm==0.24.0"} <= set(pins)
    assert not any(pin.startswith("flash-attn-4==") for pin in pins)


def test_an_impossible_set_is_found() -> None:
    """flash-attn-4 needs a later apache-tvm-ffi than vLLM 0.24 pins, so install.md advises against the two extras."""
    with pytest.raises(AssertionError, match="unsatisfiable"):
        resolve("--extra=gpu-vllm024", "--extra=fa4", "pyproject.toml", python="3.12")


@pytest.mark.parametrize("python", PYTHONS)
def test_the_gpu_lock_is_a_solution(python: str) -> None:
    """With the lock's versions as constraints, the declaration leads to the lock and to no other package."""
    extras = ("--extra=gpu", "--extra=fa4", "--extra=fla", "--extra=recipes")
    pins = resolve(*extras, "--constraints=requirements/gpu.lock", "pyproject.toml", python=python)
    lock = (ROOT / "requirements" / "gpu.lock").read_text().splitlines()
    assert set(pins) == {line.split()[0] for line in lock if "==" in line and not line.startswith("#")}
    assert {"verl==0.9.1", "ray==2.60.0", "vllm==0.31.0", "flash-attn-4==4.0.0b36"} <= set(pins)
