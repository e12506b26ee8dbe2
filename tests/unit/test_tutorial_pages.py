"""The tutorials that need no training run, as printed, and how tutorials are followed.

Of the first one, all but the run itself: the runs are in `tests/long`.
"""

import logging
import re
import runpy
import shlex
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from followed_page import TUTORIALS, Block, follow, lines_missing, read_blocks
from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

from verl_tree import check
from verl_tree.commands.__main__ import main


def test_the_first_run_is_accepted_and_its_agent_branches(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    """The command of the run is composed and checked, and a session gives its three answers one thought."""
    blocks = read_blocks(TUTORIALS / "01_first_agent.md")
    for block in blocks:
        if block.file_name is not None:
            (tmp_path / block.file_name).write_text(block.text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("my_loops", "my_reward"):  # other tests have modules of these names
        request.addfinalizer(partial(sys.modules.pop, name, None))
    before = dict(_agent_loop_registry)
    request.addfinalizer(lambda: (_agent_loop_registry.clear(), _agent_loop_registry.update(before)))
    runpy.run_path("make_inputs.py")

    (command,) = [line for block in blocks for line in block.text.splitlines() if "-m verl_tree.main_ppo" in line]
    is_valid, text = check.report(shlex.split(command.replace("$PWD", str(tmp_path)))[3:])
    assert is_valid, text
    assert "default think_and_answer" in text

    (tmp_path / "answers.txt").write_text("think\n---\n12\n---\nab\n---\n1b\n")
    shown = ["loops.yaml", "--row", "train.parquet:0", "--model", "model", "--answers", "answers.txt"]
    assert main(["try-agent", *shown, "--config", "first_agent.yaml"]) == 0
    out = capfd.readouterr().out
    assert "4 calls, 3 rows to train" in out
    # The share of digits: of 12, ab and 1b.
    assert re.findall(r"leaf (\d): reward (\S+)", out) == [("0", "1"), ("1", "0"), ("2", "0.5")]


@pytest.mark.long
def test_long_trees(tmp_path: Path) -> None:
    """The relayed update has the same gradient and takes a part of the memory."""
    (printed,) = follow(TUTORIALS / "03_long_trees.md", tmp_path)
    tree, relayed, whole, difference = printed.splitlines()
    # 8 rows of 256 to 2,048 tokens and 128 more; a trunk of 8 x 256 tokens with 8 x 128 beside it.
    assert tree == "10240 tokens as rows, 3072 as a tree, the longest row has 2176"
    assert number(r"loss (\S+),", relayed) == number(r"loss (\S+),", whole)
    assert number(r"(\d+) MiB", relayed) < number(r"(\d+) MiB", whole)
    assert 0 < number(r"gradient: (\S+)", difference) <= 1e-5


def number(pattern: str, line: str) -> float:
    """Return the number that a pattern's group finds in a line."""
    found = re.search(pattern, line)
    assert found, line
    return float(found[1])


def test_scaling_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each check says what the page shows. All run in this process, since imports take seconds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    inputs, one, teams, refused, nodes = follow(
        TUTORIALS / "06_scaling_out.md", tmp_path, run=run_python_here(monkeypatch, capsys)
    )
    assert inputs == ""
    for accepted in (one, teams, nodes):
        assert "The command can run." in accepted
        assert "Refused" not in accepted
    assert "ulysses_sequence_parallel_size=3" in refused.split("Refused")[1]
    assert "32768 tokens" in one
    assert "65536 tokens on the 4 ranks of a team; the longest trajectory fits" in teams
    assert "4 x 8 ranks (nodes x devices)" in nodes


def run_python_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str, Path], str]:
    """Return a function that runs `python FILE` and `python -m verl_tree.check` in this process."""

    def run(commands: str, folder: Path) -> str:
        python, *words = shlex.split(commands.replace("$PWD", str(folder)).replace("\\\n", ""))
        assert python == "python"
        if words[:2] != ["-m", "verl_tree.check"]:
            (file,) = words
            runpy.run_path(str(folder / file))
            return capsys.readouterr().out
        monkeypatch.setattr("sys.argv", words[1:])
        try:
            with warnings.catch_warnings(), pytest.raises(SystemExit):
                check.main()
        finally:
            logging.disable(logging.NOTSET)  # main has disabled it
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("page", sorted(TUTORIALS.glob("*.md")), ids=lambda page: page.name)
def test_no_block_goes_untested(page: Path) -> None:
    """Every file has a name, every language a meaning, and pictures hold no commands."""
    blocks = read_blocks(page)
    assert all(block.file_name for block in blocks if block.language in ("python", "yaml"))
    assert {block.language for block in blocks} <= {"", "sh", "python", "yaml", "bash", "text"}
    assert any(block.language == "bash" for block in blocks)
    assert all("python" not in block.text for block in blocks if block.language == "")


def test_blocks_by_hand(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Text\n```python\n# a.py\nprint(7, 'x')\n```\n\n```bash\npython a.py\n```\n```text\n8 x\n```\n")
    python, bash, text = read_blocks(page)
    assert python == Block("python", "# a.py\nprint(7, 'x')\n")
    assert (python.file_name, bash.file_name, text.file_name) == ("a.py", None, None)
    assert follow(page, tmp_path) == ["7 x\n"]
    page.write_text(page.read_text().replace("8 x", "8 y"))
    with pytest.raises(AssertionError, match=r"not printed: \['# y'\]"):
        follow(page, tmp_path)


@pytest.mark.parametrize(
    ("shown", "missing"),
    [
        ("a 1\nc", []),
        ("a +2.5e-3\nb   7\nc", []),
        ("...\nc", []),
        ("b ...\n", []),
        ("c\na 1", ["a #"]),  # not in this order
        ("a 1\na 1", ["a #"]),  # printed once
        ("b", ["b"]),
    ],
)
def test_what_is_shown_by_hand(shown: str, missing: list[str]) -> None:
    assert lines_missing(shown, "a 1\nb 12\nc\n") == missing
