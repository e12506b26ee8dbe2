"""The recipe coding_agent: bugs and their check; mini-swe-agent behind a real gateway, with a scripted model.

The agent is left to `scripts/test.sh --long`, which installs it (`scripts/setup.sh --extra coding_agent`).
"""

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from loop_cases import rewards, trained
from recipe_cases import TINY, loop_of, play
from scripted_llm import END, tokenizer

from recipes.coding_agent.agent import MAX_TURNS, PROGRAMS, command_variables
from recipes.coding_agent.bugs import CHECK, MODULE, Bug, is_repaired, make_bug
from recipes.coding_agent.prepare import SETTINGS, prepare
from recipes.coding_agent.solver import PHRASES, READS, SUBMITS, as_leaf, repairs, said, session
from recipes.demo.leaves import Renderer
from recipes.demo.tokenizer import build_tokenizer

SHELL = os.environ | command_variables()
AGENT = loop_of("coding_agent", "coding_agent")


def repair(bug: Bug, folder: Path) -> None:
    lines = (folder / MODULE).read_text().splitlines()
    lines[bug.line - 1] = f"    {bug.answer}"
    (folder / MODULE).write_text("\n".join(lines))


def test_a_bug_is_one_line_that_the_check_shows(tmp_path: Path) -> None:
    bug = make_bug(seed=5)
    assert bug == make_bug(seed=5)
    assert bug.module.splitlines()[bug.line - 1].strip() == bug.written != bug.answer
    bug.write(tmp_path)
    assert not is_repaired(tmp_path, bug.check, environment=SHELL)
    repair(bug, tmp_path)
    assert is_repaired(tmp_path, bug.check, environment=SHELL)


def test_every_bug_is_wrong_where_it_is_checked() -> None:
    for seed in range(200):
        bug = make_bug(seed=seed)
        first, *_ = re.findall(r"assert solve\.(.*) == (.*), f", bug.check)
        of_wrong: dict[str, object] = {}
        exec(bug.module, of_wrong)
        assert eval(first[0], of_wrong) != eval(first[1])
        exec(bug.module.replace(bug.module.splitlines()[bug.line - 1].strip(), bug.answer), of_wrong)
        assert eval(first[0], of_wrong) == eval(first[1])


@pytest.mark.parametrize("end", ["", "import os; os._exit(0)", "while True: pass"])
def test_another_check_or_a_module_that_ends_it_is_no_repair(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipes.coding_agent.bugs._CHECK_TIMEOUT_S", 1.0)
    bug = make_bug(seed=5)
    bug.write(tmp_path)
    (tmp_path / CHECK).write_text("print('ok')")
    (tmp_path / MODULE).write_text(f"{bug.module}\n{end}")
    assert not is_repaired(tmp_path, bug.check, environment=SHELL)


def test_a_command_finds_few_programs(tmp_path: Path) -> None:
    def run(command: str) -> int:
        return subprocess.run(command, shell=True, cwd=tmp_path, env=SHELL, capture_output=True).returncode

    assert [run(f"command -v {name}") for name in (*PROGRAMS, "python", "echo")] == [0] * (len(PROGRAMS) + 2)
    assert {run(command) for command in ("sudo rm -rf x", "rm -rf x", "pip list", "git init")} == {127}


def script(bug: Bug, *, repaired: str) -> list[str]:
    return [READS, repairs(bug.line, repaired), SUBMITS]


def play_session(bug_row: dict[str, object], turns: list[str], **sizes: int) -> tuple[list, object]:
    given = iter(turns)
    return play(AGENT, lambda _: next(given), extra_info=bug_row, **sizes)


SIZES = {"prompt_length": 1024, "response_length": 3072}


@pytest.mark.long
@pytest.mark.timeout(120)
def test_the_agent_repairs_a_module_in_one_leaf() -> None:
    bug = make_bug(seed=7)
    turns = script(bug, repaired=bug.answer)
    rows, scripted = play_session({"seed": 7}, turns, **SIZES)
    (row,) = rows
    assert trained(row) == [turn + END for turn in turns]
    assert rewards(rows) == [1.0]
    _, second, third = scripted.prompts
    assert bug.module.splitlines()[1] in second
    assert "<output>\nok\n</output>" in third


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_wrong_repair_earns_nothing_and_is_told() -> None:
    bug = make_bug(seed=7)
    wrong = said("Nothing.", f"python {CHECK}")
    rows, scripted = play_session({"seed": 7}, ["no command", *[wrong] * (MAX_TURNS - 1)], **SIZES)
    # The agent keeps no answer without a command in its history: that is a leaf of its own.
    assert rewards(rows) == [0.0, 0.0]
    assert trained(rows[0]) == ["no command" + END]
    assert len(scripted.prompts) == MAX_TURNS
    assert "found 0 actions" in scripted.prompts[1]
    assert "AssertionError: solve." in scripted.prompts[2]
    # A full context ends the session, and what was written until then stays.
    prompt_len = len(rows[0].prompt_ids)
    rows, _ = play_session(
        {"seed": 7},
        script(bug, repaired=bug.answer),
        prompt_length=prompt_len,
        response_length=200,
    )
    assert rewards(rows) == [0.0]


@pytest.mark.long
@pytest.mark.parametrize("is_right", [True, False])
def test_what_is_learnt_is_what_the_gateway_would_record(is_right: bool) -> None:
    bug = make_bug(seed=7)
    text = bug.answer if is_right else bug.written
    leaf = as_leaf(session(bug, text), Renderer(tokenizer(), []))
    ((row,), _) = play_session({"seed": 7}, script(bug, repaired=text), **SIZES)
    folders = re.compile("coding_agent-[a-z0-9_]+")  # a traceback has another one each time
    told, recorded = (
        folders.sub("", tokenizer().decode(ids)) for ids in (leaf.token_ids, row.prompt_ids + row.response_ids)
    )
    assert told == recorded
    if is_right:
        assert leaf.trained == [0] * len(row.prompt_ids) + row.response_mask


def test_phrases_are_single_tokens_of_what_is_written() -> None:
    """The model decides a line number and an expression, each twice."""
    words = build_tokenizer(PHRASES)
    bug = make_bug(seed=7)
    ids = words.encode(repairs(bug.line, bug.answer), add_special_tokens=False)
    assert words.decode(ids) == repairs(bug.line, bug.answer)
    assert len(ids) <= 16
    assert [len(words.encode(turn, add_special_tokens=False)) for turn in (READS, SUBMITS)] == [1, 1]


@pytest.mark.long
def test_a_run_is_prepared_once(tmp_path: Path) -> None:
    settings = replace(SETTINGS, warm_start=TINY, num_train_tasks=3, num_validation_tasks=2)
    folder = prepare(tmp_path, settings=settings)
    rows = pd.read_parquet(folder / "train.parquet")
    assert [row["seed"] for row in rows.extra_info] == [settings.train_seed + number for number in range(3)]
    assert (folder / "model" / "config.json").is_file()
    assert prepare(tmp_path, settings=settings) == folder
