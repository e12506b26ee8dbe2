"""The recipe calculator: tasks, their solver, the system prompt, and the trees that the model is fine-tuned on."""

import asyncio
import re
from pathlib import Path

import pandas as pd
import pytest
from input_cases import write_model
from verl.experimental.agent_loop.tool_parser import ToolParser

from recipes.calculator.prepare import NUM_SOLVED, SETTINGS, prepare, write_rows, write_solved
from recipes.calculator.system_prompt import SYSTEM_PROMPT
from recipes.calculator.tasks import LEVELS, TRAINED, Task, make_tasks, solve
from recipes.calculator.tool_calls import COUNTED, count, fate, sampled_turns
from recipes.demo.settings import Settings
from recipes.demo.solver import write_call
from recipes.demo.tasks import score_answer, score_conclusion
from recipes.demo.tokenizer import build_tokenizer
from recipes.demo.tools import Calculator
from verl_tree.records import read_trees

CALCULATOR = Calculator({"type": "native"})
ASKED = write_call("calculator", {"expression": "1 + 2"})


@pytest.mark.parametrize("level", LEVELS)
def test_the_solver_is_right_and_asks_for_two_numbers_at_a_time(level: str) -> None:
    for task in make_tasks(50, level=level, seed=1):
        *turns, answer = solve(task, calculator=CALCULATOR)
        assert score_answer(answer.text, answer=task.answer) == 1.0
        assert [len(turn.results) for turn in turns] == ([1] if "*" in task.expression else [2, 1])
        asked = [each for turn in turns for each in re.findall(r'"expression": "(.+)"', turn.text)]
        assert all(len(re.findall(r"\d+", each)) == 2 for each in asked), asked
        for result, conclusion in zip(turns[0].results, turns[0].conclusions, strict=False):
            assert score_conclusion(conclusion, result=result) == 1.0


def test_what_is_asked_of_a_sum() -> None:
    turns = solve(Task("sums_2_digits", "54 - 13 - 87 + 22", "-24"), calculator=CALCULATOR)
    assert turns[0].results == ("54 - 13 = 41", "-87 + 22 = -65")
    assert turns[0].conclusions == ("Partial result: 41", "Partial result: -65")
    assert turns[1].results == ("41 + -65 = -24",)
    assert turns[2].text == "<answer>-24</answer>"


def test_the_examples_of_the_system_prompt_are_right() -> None:
    equations = re.findall(r"(-?\d+ [-+*] \d+) = (-?\d+)", SYSTEM_PROMPT)
    assert len(equations) == 5
    for expression, value in equations:
        assert str(eval(expression)) == value


def test_harder_levels_are_asked_in_validations_only(tmp_path: Path) -> None:
    write_rows(tmp_path, settings=Settings(num_train_tasks=20, num_validation_tasks=4))
    train, validation = (pd.read_parquet(tmp_path / f"{split}.parquet") for split in ("train", "validation"))
    assert train["data_source"].value_counts().to_dict() == dict.fromkeys(TRAINED, 20)
    assert validation["data_source"].value_counts().to_dict() == dict.fromkeys(LEVELS, 4)
    assert set(map(str, train["prompt"])).isdisjoint(map(str, validation["prompt"]))


def test_solved_tasks_are_trees_of_right_sessions(tmp_path: Path) -> None:
    model, tokenizer = write_model(tmp_path / "model"), build_tokenizer()
    tokenizer.save_pretrained(model)
    write_solved(tmp_path, model, settings=SETTINGS)
    trees = read_trees(tmp_path / "solved.parquet")
    assert [len(tree.leaves) for tree in trees] == [3] * NUM_SOLVED + [1] * NUM_SOLVED
    assert all(leaf.reward == 1.0 for tree in trees for leaf in tree.leaves)
    first, second, last = (tokenizer.decode(leaf.token_ids[leaf.is_trained]) for leaf in trees[0].leaves)
    assert first.startswith("Partial result: ")
    assert second.startswith("Partial result: ")
    assert last.count("<tool_call>") == 3
    assert "<answer>" in last
    assert SYSTEM_PROMPT in tokenizer.decode(trees[0].leaves[0].token_ids)
    # The leaves of a sum share their first turn.
    assert [len(list(sampled_turns(tree))) for tree in trees] == [5] * NUM_SOLVED + [2] * NUM_SOLVED
    parser = ToolParser.get_tool_parser("hermes", tokenizer)
    counted = asyncio.run(count(trees[0], parser=parser, calculator=CALCULATOR))
    assert {name: counted[name] for name in COUNTED} == {
        "sessions": 1,
        "right": 1,
        "turns": 5,
        "calling": 2,
        "malformed": 0,
        "refused": 0,
    }


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        ("<answer>3</answer>", "none"),
        (ASKED, "answered"),
        (f"{ASKED}\n{ASKED}", "answered"),
        (ASKED.replace("}}", "}"), "malformed"),
        (ASKED.replace("</tool_call>", ""), "malformed"),
        (f"{ASKED}\n<tool_call>", "malformed"),
        (ASKED.replace("+", "/"), "refused"),
        (ASKED.replace("calculator", "lookup"), "refused"),
        (f"{ASKED}\n{ASKED.replace('expression', 'key')}", "refused"),
        ('<tool_call>{"name": "calculator", "arguments": "1 + 2"}</tool_call>', "refused"),
    ],
)
def test_calls_are_malformed_or_refused_or_answered(turn: str, expected: str) -> None:
    tokenizer = build_tokenizer()
    parser = ToolParser.get_tool_parser("hermes", tokenizer)
    assert asyncio.run(fate(tokenizer.encode(turn), parser=parser, calculator=CALCULATOR)) == expected


def test_without_a_model_the_answer_is_where_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^--model: .* give the folder recipes\.smollm\.prepare prints$"):
        prepare(tmp_path, settings=SETTINGS, model=None)
