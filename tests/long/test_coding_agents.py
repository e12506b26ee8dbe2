"""Coding agents from their registries, unchanged, repair a file; see `coding_agents`. Docs: docs/gateway.md.

Without npm, or where no registry answers, they are skipped. What an agent sent is left in `runs/agents`, in the form of
the files that the fast tests replay: when a version is raised, copy them to tests/unit/gateway/agents.
"""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from coding_agents import (
    AGENTS,
    ANSWER,
    KEPT,
    REPAIRED,
    as_lines,
    bodies_of,
    check_tree,
    install,
    run_agent,
    shortened,
)

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a package, which is installed where it is asked for first."""
    folders: dict[str, Path] = {}

    def folder_of(package: str) -> Path:
        if package.startswith("npm:") and shutil.which("npm") is None:
            pytest.skip("npm is not here")
        if package not in folders:
            folder = tmp_path_factory.mktemp("package")
            try:
                install(package, folder)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no registry gives {package}: {error.stderr[-1000:]}")
            folders[package] = folder
        return folders[package]

    return folder_of


@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_repairs_a_file(name: str, tmp_path: Path, installed: Callable[[str], Path]) -> None:
    agent = AGENTS[name]
    run = await run_agent(agent, program=installed(agent.package) / agent.program, folder=tmp_path)
    assert (tmp_path / "work" / "calc.py").read_text() == f"def add(a, b):\n    {REPAIRED}\n"
    assert ANSWER in run.printed
    assert {request["path"] for request in run.sent} == {agent.path}
    assert any("calc is right" in json.dumps(request["body"]) for request in run.sent)
    check_tree(agent, run.tree, sent=run.sent)

    short = shortened(run.sent)
    left = ROOT / "runs" / "agents" / f"{name}.json"
    left.parent.mkdir(parents=True, exist_ok=True)
    left.write_text(as_lines(short))
    kept = json.loads((KEPT / left.name).read_text())
    assert fields(bodies_of(short)) == fields(bodies_of(kept)), (
        f"{name} sends something else than {KEPT / left.name}: replace it by {left}"
    )


def fields(value: Any, name: str = "") -> set[str]:
    """Return the dotted names of all fields, with the values of those that say of what kind something is."""
    if isinstance(value, list):
        return {found for each in value for found in fields(each, name)}
    if not isinstance(value, dict):
        return {f"{name}={value}" if name.endswith((".type", ".role")) else name}
    return {found for key, each in value.items() for found in fields(each, f"{name}.{key}")}
