"""The papers of the project say what the package says, and a report of a bug asks for what is needed to find it."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import verl_tree

ROOT = Path(__file__).parents[2]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def fields(form: Path) -> list[dict[str, Any]]:
    """Return the fields of an issue form that a reporter fills in."""
    return [each for each in yaml.safe_load(form.read_text())["body"] if each["type"] != "markdown"]


def test_the_version_is_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == verl_tree.__version__
    versions = re.findall(r"^## \[?(\d[\w.]*)\]?", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert versions[0] == verl_tree.__version__


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_a_form_can_be_shown(form: Path) -> None:
    """GitHub shows no form that lacks a name or a description, or that has an id twice."""
    assert {"name", "description", "body"} <= yaml.safe_load(form.read_text()).keys()
    names = [each["id"] for each in fields(form)]
    assert len(set(names)) == len(names)
    for each in fields(form):
        assert each["type"] in {"checkboxes", "dropdown", "input", "textarea"}
        assert each["attributes"]["label"]
    assert any(each.get("validations", {}).get("required") for each in fields(form))


def test_a_bug_comes_with_what_the_check_says() -> None:
    bug_report, _ = FORMS
    (check,) = [each for each in fields(bug_report) if each["id"] == "check"]
    assert "python -m verl_tree.check" in check["attributes"]["description"]


def test_a_fork_runs_what_the_continuous_integration_runs() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == ["scripts/test.sh"]
    (version,) = [step["with"]["python-version"] for step in job["steps"] if "setup-python" in step.get("uses", "")]
    assert version == "3.11", "the lock has the hash of PyTorch's CPU build for it"
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1].endswith('../scripts/test.sh" "$@"')
