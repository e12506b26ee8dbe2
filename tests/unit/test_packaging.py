"""What an installed package needs: its dependencies are declared, its folders and files are in the wheel."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from setuptools import find_packages

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PRODUCT = ("verl_tree", "rollout_hooks")
# Not installed on a machine without a GPU, so their distributions cannot be looked up.
GPU_PACKAGES = {"flash_attn": ["flash-attn-4"], "cutlass": ["nvidia-cutlass-dsl"]}


def normalised(requirement: str) -> str:
    """Return the name of a requirement as package indexes compare it."""
    name = re.match(r"[\w.-]+", requirement)
    assert name is not None, requirement
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def imported_packages() -> set[str]:
    """Return the top-level packages that any module of the product imports, anywhere in it."""
    names = set()
    for path in (file for top in PRODUCT for file in (ROOT / top).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - set(PRODUCT)


def test_every_import_is_declared() -> None:
    project = PROJECT["project"]
    extras = [each for name in ("cpu", "gpu", "fa4", "dev") for each in project["optional-dependencies"][name]]
    declared = {normalised(each) for each in [*project["dependencies"], *extras]}
    installed = packages_distributions() | GPU_PACKAGES
    imported = imported_packages()
    assert len(imported) > 20
    undeclared = {name for name in imported if not declared & {normalised(each) for each in installed.get(name, [])}}
    assert undeclared == set()


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
