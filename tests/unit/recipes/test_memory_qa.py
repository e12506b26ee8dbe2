"""The recipe memory_qa: tasks, tokenizer, the solver's sessions, and that the agent loop makes the same."""

import asyncio
import functools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import scripted_llm
from loop_cases import advantages, rewards, run
from recipe_cases import check_given_model, check_prepared, loop_of
from transformers import PreTrainedTokenizerFast
from typing_extensions import override
from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
from verl.utils.tokenizer import hf_tokenizer

from recipes.demo.leaves import Renderer
from recipes.demo.tokenizer import build_tokenizer
from recipes.memory_qa.loop import MemoryQALoop
from recipes.memory_qa.prepare import SETTINGS, prepare
from recipes.memory_qa.solver import MAX_NOTES, SKILLED, Habits, Solver, Turn, trace_leaves, write_note
from recipes.memory_qa.tasks import CHATTER, PHRASES, Task, make_tasks, score_answer
from rollout_hooks.capture.outputs import TreeAgentLoopOutput

MIXED = Habits(note=0.5, answer=0.8)
TASK = Task(
    ages={"Emil": 53, "Hugo": 61, "Nora": 28, "Ada": 94},
    inputs=("Emil is 53.", "Hugo is 61.", "Nora is 28.", "Ada is 94.", CHATTER[0], "How old are Emil and Nora?"),
    answer="Emil is 53 and Nora is 28",
)


def solve(task: Task, habits: Habits = SKILLED, *, seed: int = 0) -> list[Turn]:
    return asyncio.run(Solver(habits=habits, rng=random.Random(seed)).solve(task))


# Tasks and verifier


def test_tasks_ask_for_two_of_the_facts_in_the_order_of_arrival() -> None:
    tasks = make_tasks(300, seed=7)
    assert tasks == make_tasks(300, seed=7)
    assert tasks != make_tasks(300, seed=8)
    asked_places: Counter[tuple[int, ...]] = Counter()
    for task in tasks:
        names = list(task.ages)
        *facts, chatter, question = task.inputs
        assert facts == [f"{name} is {age}." for name, age in task.ages.items()]
        assert chatter in CHATTER
        assert len(set(names)) == len(set(task.ages.values())) == 4
        asked = question.removeprefix("How old are ").removesuffix("?").split(" and ")
        assert task.answer == " and ".join(f"{name} is {task.ages[name]}" for name in asked)
        asked_places[tuple(names.index(name) for name in asked)] += 1
    assert set(asked_places) == {(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)}
    assert min(asked_places.values()) > 25  # 50 each if all are equally likely


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<answer>Emil is 53 and Nora is 28</answer>", 1.0),
        ("<answer>Emil is 53</answer> no, <answer> Emil is 53 and Nora is 28 </answer>", 1.0),
        ("<answer>Emil is 53 and Nora is 28</answer> <answer>Emil is 53</answer>", 0.0),
        ("<answer>Nora is 28 and Emil is 53</answer>", 0.0),
        ("<answer>Emil is 53 and Nora is 2</answer>", 0.0),
        ("Emil is 53 and Nora is 28", 0.0),
        ("", 0.0),
    ],
)
def test_verifier(completion: str, reward: float) -> None:
    assert score_answer(completion, answer=TASK.answer) == reward


# Tokenizer


def test_phrases_are_one_token_and_text_survives(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(PHRASES)
    tokenizer.save_pretrained(tmp_path)
    texts = [write_note("Emil is 53"), TASK.inputs[-1], *CHATTER, "Emily is 531 and 'Adam'"]
    for loaded in (tokenizer, hf_tokenizer(str(tmp_path))):
        for text in texts:
            token_ids = loaded.encode(text)
            assert loaded.decode(token_ids) == text
            assert loaded.unk_token_id not in token_ids
    parts = [tokenizer.decode([token]) for token in tokenizer.encode(write_note("Emil is 53"))]
    assert parts[1:-1] == ["Emil", " is ", "53"]


# Solver


def test_a_right_session_keeps_every_fact_and_reads_two_of_them() -> None:
    turns = solve(TASK)
    assert [turn.text for turn in turns] == [
        write_note("Emil is 53"),
        write_note("Hugo is 61"),
        write_note("Nora is 28"),
        write_note("Ada is 94"),
        "ok",
        "<answer>Emil is 53 and Nora is 28</answer>",
    ]
    assert turns[-1].context[2:] == [
        {"role": "user", "content": "Notes:\n1. Emil is 53\n3. Nora is 28"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "How old are Emil and Nora?"},
    ]
    assert turns[1].context[2:] == [
        {"role": "user", "content": "Notes:\n1. Emil is 53"},
        {"role": "assistant", "content": write_note("Emil is 53")},
        {"role": "tool", "content": "Kept as note 1."},
        {"role": "user", "content": "Hugo is 61."},
    ]


def test_right_habits_always_earn_the_reward_and_mixed_ones_sometimes() -> None:
    tasks = make_tasks(200, seed=3)
    right, mixed = (
        [score_answer(solve(task, habits, seed=i)[-1].text, answer=task.answer) for i, task in enumerate(tasks)]
        for habits in (SKILLED, MIXED)
    )
    assert sum(right) == 200
    # Both facts kept, and read: .5 * .5 * .8 = .2; a lucky guess is rare.
    assert 20 <= sum(mixed) <= 62  # 40, plus or minus four standard deviations


def test_without_its_notes_the_solver_does_not_know() -> None:
    sessions = [solve(TASK, Habits(note=0.0, answer=1.0), seed=seed) for seed in range(40)]
    assert {turn.text for turns in sessions for turn in turns[:4]} == {
        "ok",
        *(write_note(name) for name in TASK.ages),
    }
    assert sum(score_answer(turns[-1].text, answer=TASK.answer) for turns in sessions) <= 1


# The agent loop


@pytest.fixture
def recipe_tokenizer(monkeypatch: pytest.MonkeyPatch) -> PreTrainedTokenizerFast:
    """Make the recipe's tokenizer, also that of the scripted LLM."""
    tokenizer = build_tokenizer(PHRASES)
    monkeypatch.setattr(scripted_llm, "tokenizer", lambda: tokenizer)
    return tokenizer


def row(task: Task) -> dict[str, Any]:
    return {
        "raw_prompt": task.messages,
        "extra_info": {"inputs": list(task.inputs)},
        "reward_model": {"ground_truth": task.answer},
        "uid": "u",
        "session_id": 0,
    }


def play(task: Task, texts: list[str]) -> list[TreeAgentLoopOutput]:
    """Return the loop's leaves when the LLM says `texts`, one a call."""
    said = iter(texts)
    # scripted_llm brings two tools of its own; the recipe has none.
    loop = functools.partial(Toolless, max_notes=MAX_NOTES)
    outputs, _ = run(loop, lambda _: next(said), row=row(task), multi_turn__max_assistant_turns=7)
    assert next(said, None) is None
    return outputs


class Toolless(MemoryQALoop):
    """The recipe's loop without configured tools."""

    @override
    def row_tools(self, row: Any) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("habits", [SKILLED, MIXED])
def test_the_loop_gives_the_leaves_of_the_solvers_traces(
    recipe_tokenizer: PreTrainedTokenizerFast, habits: Habits
) -> None:
    renderer = Renderer(recipe_tokenizer, MemoryQALoop.own_schemas)
    for seed, task in enumerate([TASK, *make_tasks(12, seed=5)]):
        turns = solve(task, habits, seed=seed)
        outputs = play(task, [turn.text for turn in turns])
        leaves = trace_leaves(turns, renderer)
        assert [[*output.prompt_ids, *output.response_ids] for output in outputs] == [leaf.token_ids for leaf in leaves]
        assert [[0] * len(o.prompt_ids) + o.response_mask for o in outputs] == [leaf.trained for leaf in leaves]
        assert rewards(outputs) == [None] * 5 + [score_answer(turns[-1].text, answer=task.answer)]
        assert max(len(leaf.token_ids) for leaf in leaves) <= 54


def test_the_class_leaves_the_options_of_its_name_alone() -> None:
    """When the class is imported, verl's `register` would replace the entry of loops.yaml by one without options."""
    assert "memory_qa" not in _agent_loop_registry
    assert loop_of("memory_qa", "memory_qa")["max_notes"] == MAX_NOTES


@pytest.mark.usefixtures("recipe_tokenizer")
def test_a_session_without_notes_fails_and_one_that_searches_may_still_answer() -> None:
    forgetful = play(TASK, ["ok"] * 5 + ["<answer>Emil is 50 and Nora is 20</answer>"])
    assert rewards(forgetful)[-1] == 0.0
    search = '<tool_call>\n{"name": "memory_search", "arguments": {"query": "Emil"}}\n</tool_call>'
    texts = [turn.text for turn in solve(TASK)]
    searching = play(TASK, [*texts[:-1], search, texts[-1]])
    assert len(searching) == 7
    assert rewards(searching)[-1] == 1.0


def test_a_note_of_small_talk_takes_the_place_of_a_fact(recipe_tokenizer: PreTrainedTokenizerFast) -> None:
    """The words of the last turn are part of the query, so a note that it wrote ranks first when the question comes."""
    texts = [turn.text for turn in solve(TASK)]
    outputs = play(TASK, [*texts[:4], write_note(CHATTER[0]), "<answer>?</answer>"])
    shown = recipe_tokenizer.decode(outputs[-1].prompt_ids)
    assert f"5. {CHATTER[0]}" in shown
    assert ("1. Emil" in shown) != ("3. Nora" in shown)


@pytest.mark.usefixtures("recipe_tokenizer")
def test_every_turn_of_a_session_shares_its_advantage() -> None:
    texts = [turn.text for turn in solve(TASK)]
    sessions = [play(TASK, texts), play(TASK, ["ok", *texts[1:5], "<answer>Nora is 28</answer>"])]
    for outputs in sessions:
        for output in outputs[:-1]:
            output.leaf_reward = outputs[-1].leaf_reward  # what verl's worker copies
    values = advantages(*sessions)
    assert len(set(values[:6])) == len(set(values[6:])) == 1
    assert values[0] > 0 > values[6]


# Preparation


def test_prepared_folder_is_complete_and_reused(tmp_path: Path) -> None:
    first, *_ = make_tasks(8, seed=SETTINGS.train_seed)
    folder, rows = check_prepared(prepare, tmp_path, settings=SETTINGS, first=first)
    assert list(rows.prompt[0]) == first.messages
    assert tuple(rows.extra_info[0]["inputs"]) == first.inputs
    config = json.loads((folder / "model" / "config.json").read_text())
    assert config["vocab_size"] == len(build_tokenizer(PHRASES))
    assert check_given_model(prepare, tmp_path, model=folder / "model", settings=SETTINGS) != folder
