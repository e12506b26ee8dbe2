"""The recipe coding_agent: bugs and their check; mini-swe-agent behind a real gateway, with a scripted model.

The agent is left to `scripts/test.sh --long`, which installs it (`scripts/setup.sh --extra coding_agent`).
"""

import os
import re
import subprocess
from pathlib import Path

import pytest
from loop_cases import rewards, trained
from recipe_cases import loop_of, play
from scripted_llm import END, tokenizer

from recipes.coding_agent.agent import MAX_TURNS, PROGRAMS, command_variables
from recipes.coding_agent.bugs import CHECK, LEVELS, MODULE, Bug, is_repaired, make_bug
from recipes.coding_agent.prepare import SETTINGS, prepare, solved_leaf
from recipes.demo.leaves import Renderer

SHELL = os.environ | command_variables()
AGENT = loop_of("coding_agent", "coding_agent")


def repair(bug: Bug, folder: Path) -> None:
    lines = (folder / MODULE).read_text().splitlines()
    lines[bug.line - 1] = f"    {bug.repaired}"
    (folder / MODULE).write_text("\n".join(lines))


@pytest.mark.parametrize("level", LEVELS)
def test_a_bug_is_one_line_that_the_check_shows(level: str, tmp_path: Path) -> None:
    bug = make_bug(seed=5, level=level)
    assert bug == make_bug(seed=5, level=level)
    assert bug.module.count("def ") == LEVELS[level]
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
        exec(bug.module.replace(bug.module.splitlines()[bug.line - 1].strip(), bug.repaired), of_wrong)
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


def said(thought: str, command: str) -> str:
    return f"THOUGHT: {thought}\n\n```mswea_bash_command\n{command}\n```"


def script(bug: Bug, *, repaired: str) -> list[str]:
    change = f"sed -i '{bug.line}s|return.*|{repaired}|' {MODULE} && python {CHECK}"
    return [
        said("I read the module.", f"cat -n {MODULE}"),
        said(f"Line {bug.line} should be: {repaired}", change),
        said("It prints ok.", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ]


def session(bug_row: dict[str, object], turns: list[str], **sizes: int) -> tuple[list, object]:
    given = iter(turns)
    return play(AGENT, lambda _: next(given), extra_info=bug_row, **sizes)


SIZES = {"prompt_length": 1024, "response_length": 3072}


@pytest.mark.long
@pytest.mark.timeout(120)
def test_the_agent_repairs_a_module_in_one_leaf() -> None:
    bug = make_bug(seed=7)
    turns = script(bug, repaired=bug.repaired)
    rows, scripted = session({"seed": 7, "level": "one_function"}, turns, **SIZES)
    (row,) = rows
    assert trained(row) == [turn + END for turn in turns]
    assert rewards(rows) == [1.0]
    _, second, third = scripted.prompts
    assert "return min(first, second)" in second
    assert "<output>\nok\n</output>" in third


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_wrong_repair_earns_nothing_and_is_told() -> None:
    bug = make_bug(seed=7)
    wrong = said("Nothing.", f"python {CHECK}")
    rows, scripted = session({"seed": 7, "level": "one_function"}, ["no command", *[wrong] * (MAX_TURNS - 1)], **SIZES)
    # The agent keeps no answer without a command in its history: that is a leaf of its own.
    assert rewards(rows) == [0.0, 0.0]
    assert trained(rows[0]) == ["no command" + END]
    assert len(scripted.prompts) == MAX_TURNS
    assert "found 0 actions" in scripted.prompts[1]
    assert "AssertionError: solve." in scripted.prompts[2]
    # A full context ends the session, and what was written until then stays.
    prompt_len = len(rows[0].prompt_ids)
    rows, _ = session(
        {"seed": 7, "level": "one_function"},
        script(bug, repaired=bug.repaired),
        prompt_length=prompt_len,
        response_length=200,
    )
    assert rewards(rows) == [0.0]


@pytest.mark.long
def test_a_solved_task_is_what_the_gateway_would_record() -> None:
    bug = make_bug(seed=7)
    leaf = solved_leaf(bug, renderer=Renderer(tokenizer(), []))
    ((row,), _) = session({"seed": 7, "level": "one_function"}, script(bug, repaired=bug.repaired), **SIZES)
    assert leaf.token_ids == row.prompt_ids + row.response_ids
    assert leaf.trained == [0] * len(row.prompt_ids) + row.response_mask


def test_a_model_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"recipes\.smollm\.prepare"):
        prepare(tmp_path, settings=SETTINGS, model=None)
