"""The documentation describes what is here: links lead somewhere, named files exist, every room is on the plan."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("**/*.md")), *sorted((ROOT / "recipes").glob("*/README.md"))]
# The log and the changes tell of files as they were.
CURRENT_PAGES = [page for page in PAGES if page.name not in ("log.md", "CHANGELOG.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    missing = [each for each in targets if "://" not in each and not (page.parent / each).exists()]
    assert missing == []


@pytest.mark.parametrize("page", CURRENT_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    rooms = "verl_tree|rollout_hooks|benchmarks|scripts|recipes|tests|configs"
    named = re.findall(rf"(?<![\w./])(?:{rooms})/[\w/.-]+\.(?:py|sh|yaml)\b", page.read_text())
    named = [each for each in named if "NAME" not in each]  # a placeholder
    missing = [each for each in named if not (ROOT / each).exists() and not (page.parent / each).exists()]
    assert missing == []


@pytest.mark.parametrize("page", CURRENT_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_modules_exist(page: Path) -> None:
    named = re.findall(r"\b((?:verl_tree|rollout_hooks)(?:\.[a-z_0-9]+)+)", page.read_text())
    missing = []
    for name in named:
        parts = name.split(".")
        # The last part may be a function or a file's ending; what comes before must be a module or a package.
        paths = [ROOT.joinpath(*parts[: len(parts) - drop]) for drop in (0, 1)]
        if not any(path.is_dir() or path.with_suffix(".py").exists() for path in paths):
            missing.append(name)
    assert missing == []


def test_every_room_is_on_the_plan() -> None:
    plan = (ROOT / "docs" / "architecture.md").read_text()
    for package in ("verl_tree", "rollout_hooks"):
        rooms = {path.name for path in (ROOT / package).iterdir() if path.is_dir() and path.name != "__pycache__"}
        assert len(rooms) > 2
        drawn = plan.split(f"\n{package}/\n", 1)[1].split("\n\n", 1)[0]
        assert {room for room in rooms if f"\n  {room}/ " not in f"\n{drawn}"} == set()


def test_no_module_is_loose_at_the_roots() -> None:
    """A module at a root has no room; the entry points and what every room reads may stand there."""
    loose = {
        package: sorted(path.name for path in (ROOT / package).glob("*.py") if path.name != "__init__.py")
        for package in ("verl_tree", "rollout_hooks")
    }
    assert loose == {
        "verl_tree": [
            *("check.py", "clashes.py", "config.py", "engine_config.py"),
            *("families.py", "main_ppo.py", "main_sft.py"),
        ],
        "rollout_hooks": ["try_agent.py", "worker.py"],
    }
