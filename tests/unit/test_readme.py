"""The first page of the project: its agent runs as printed, and its commands are accepted as printed."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from followed_page import ROOT, read_blocks
from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

from recipes.demo.settings import WarmStartSettings
from recipes.demo.tokenizer import build_tokenizer
from recipes.demo.warm_start import make_model
from verl_tree.check import report
from verl_tree.commands.__main__ import main

README = ROOT / "README.md"
NUM_ROWS = 256


def command_of(name: str, folder: Path) -> list[str]:
    """Return the arguments of the block of commands that has this name in it."""
    (block,) = [each.text for each in read_blocks(README) if each.language == "bash" and name in each.text]
    words = shlex.split(block.replace("$PWD", str(folder)).replace("\\\n", ""))
    assert words[0] == f"PYTHONPATH={folder}"
    return words[words.index(name) + 1 :]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make the folder of a reader: the files of the page, rows, and a small model under the name of the page's."""
    for block in read_blocks(README):
        if block.file_name is not None:
            (tmp_path / block.file_name).write_text(block.text)
    tokenizer, model = build_tokenizer(), tmp_path / "Qwen" / "Qwen3-8B"
    tokenizer.save_pretrained(model)
    make_model(tokenizer, settings=WarmStartSettings(), seed=1).save_pretrained(model)
    row = {
        "prompt": [{"role": "user", "content": "84 + 23"}],
        "data_source": "sums",
        "reward_model": {"style": "rule", "ground_truth": "107"},
    }
    for name in ("train.parquet", "val.parquet"):
        pd.DataFrame([row] * NUM_ROWS).to_parquet(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = dict(_agent_loop_registry)
    yield tmp_path
    _agent_loop_registry.clear()
    _agent_loop_registry.update(before)


def test_the_agent_runs_as_printed(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Branches ask in the order of forking, so the fourth of the five answers is wrong."""
    (folder / "answers.txt").write_text("sum\n---\n107\n---\n107\n---\n17\n---\n107\n")
    assert main(["try-agent", *command_of("try-agent", folder)]) == 0
    out = capfd.readouterr().out
    assert re.search(r"^5 calls, 4 rows to train, ", out, re.MULTILINE)
    assert sorted(re.findall(r"leaf (\d): reward (\d)", out)) == [("0", "1"), ("1", "1"), ("2", "0"), ("3", "1")]
    assert "Warning" not in out


def test_the_command_is_accepted_as_printed(folder: Path) -> None:
    is_valid, text = report(command_of("verl_tree.main_ppo", folder))
    assert is_valid, text
    assert "Warnings" not in text
    ran = dict(line.strip().split(": ", maxsplit=1) for line in text.split("What runs where\n")[1].splitlines())
    assert "default plan_and_answer" in ran["agents"]
    assert ran["step"].startswith(f"{NUM_ROWS} x 4 sessions")
    assert ran["reward"] == "that of the agents (reward.num_workers=0)"


def test_it_stays_short() -> None:
    """Two screens of text, and a short table of links: docs/ has its own index."""
    text = README.read_text()
    links = text.split("| if you look for |")[1].split("\n\n")[0].splitlines()[2:]
    assert len(links) <= 12
    assert len(text.split()) <= 1100
