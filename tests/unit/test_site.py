"""The documentation as a site: every page has a place, links lead somewhere, and nothing comes from a network.

`mkdocs build --strict` finds what is missing. Here the built pages are read.
"""

import os
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = Path(sys.prefix) / "docs"
"""Where scripts/setup.sh puts MkDocs, whose packages no other test is to import (requirements/docs.lock)."""

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

LOADED = {"img": "src", "link": "href", "script": "src"}
"""What a browser loads by itself: the attribute with the address, by tag."""


class Page(HTMLParser):
    """What a page loads, what it links to, and the anchors that it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loaded: set[str] = set()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if address := values.get(LOADED.get(tag, "")):
            self.loaded.add(address)
        if tag == "a" and (target := values.get("href")):
            self.links.add(target)
        if anchor := values.get("id"):
            self.anchors.add(anchor)

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site strictly."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", f"--site-dir={folder}"]
    environment = os.environ | {"PYTHONPATH": str(PACKAGES)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def site(folder: Path) -> dict[str, Page]:
    """Read every page, by its address."""
    # The page of a missing address is shown at any address, so its links begin at the root.
    paths = [path for path in folder.rglob("*.html") if path.name != "404.html"]
    return {path.relative_to(folder).as_posix(): Page(path) for path in paths}


def test_a_page_loads_nothing_from_elsewhere(site: dict[str, Page]) -> None:
    assert len(site) > 40
    for address, page in site.items():
        assert any(each.endswith(".css") for each in page.loaded), address
        assert [each for each in page.loaded if "//" in each] == [], address


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH")
def test_a_page_that_is_opened_as_a_file_can_be_searched(folder: Path, tmp_path: Path) -> None:
    """The glossary alone says of POR what its letters mean."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--virtual-time-budget=20000"]
    command = [CHROMIUM, *options, f"--user-data-dir={tmp_path}/profile", "--dump-dom"]
    address = f"file://{folder}/relay.html?q=potential+overlap+ratio"
    done = subprocess.run([*command, address], capture_output=True, text=True, timeout=120, check=True)
    page = tmp_path / "page.html"
    page.write_text(done.stdout, encoding="utf-8")
    found = {link.partition("?")[0].partition("#")[0] for link in Page(page).links}
    assert f"file://{folder}/glossary.html" in found


def test_a_link_leads_to_a_file_of_the_site(site: dict[str, Page], folder: Path) -> None:
    for address, page in site.items():
        targets = {link.partition("#")[0] for link in page.links if "//" not in link} - {""}
        assert [each for each in targets if not ((folder / address).parent / each).is_file()] == [], address


def test_readmes_are_pages_and_their_links_lead_to_pages(site: dict[str, Page]) -> None:
    first = site["index.html"]
    assert {"install.html", "measurements.html#speed", "recipes/memory_qa/index.html"} <= first.links
    assert "tree_page.png" in first.loaded
    recipe = site["recipes/memory_qa/index.html"]
    assert {"../arithmetic_tools/index.html", "../../benchmarks/data/memory_qa.jsonl"} <= recipe.links
    assert "../../memory_qa.png" in recipe.loaded


def test_a_link_to_a_file_without_a_page_is_text(site: dict[str, Page]) -> None:
    """docs/balance.md says ([`Work`](../verl_tree/cost/model.py)) of the code."""
    page = site["balance.html"]
    assert "(Work):" in page.text
    assert [link for link in page.links if link.endswith(".py")] == []


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("functional", "verl_tree.functional.tree_log_probs"),
        ("functional", "verl_tree.functional.score"),
        ("trees", "verl_tree.tree.TokenForest.from_sequences"),
        ("trees", "verl_tree.packing.pack"),
        ("trees", "verl_tree.tree.layout.TreeLayout"),
        ("attention", "verl_tree.attention.tree_attention"),
        ("attention", "verl_tree.attention.AttentionBackend"),
        ("records", "verl_tree.records.read_trees"),
        ("records", "verl_tree.records.page.tree_page"),
        ("advantages", "verl_tree.trainer.advantages.leaf_advantages"),
        ("agents", "rollout_hooks.loops.base.BranchingAgentLoop.run_branches"),
        ("agents", "rollout_hooks.loops.base.Branch.fork"),
        ("agents", "rollout_hooks.loops.tool_turns.ToolTurnsLoop.converse"),
        ("agents", "rollout_hooks.gateway.Gateway"),
    ],
)
def test_public_names_have_an_entry(site: dict[str, Page], page: str, name: str) -> None:
    assert name in site[f"api/{page}.html"].anchors


def test_every_recipe_is_in_the_gallery(site: dict[str, Page]) -> None:
    recipes = {path.parent.name for path in (ROOT / "recipes").glob("*/run.sh")}
    assert len(recipes) >= 5
    links = site["gallery.html"].links
    assert {each for each in recipes if f"recipes/{each}/index.html" not in links} == set()
