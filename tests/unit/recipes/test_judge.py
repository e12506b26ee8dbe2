"""The judge of tree_search_reasoning: its questions, its grades, the loop that asks it, and what it learns."""

import asyncio
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hydra.errors import InstantiationException
from recipe_cases import ANSWER, BOTH_CALLS, LAST_CALL, TASK, TINY, loop_of, play, right, task_tools
from scripted_llm import tokenizer as scripted_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from typing_extensions import override

from recipes.demo.leaves import Renderer
from recipes.demo.settings import Settings
from recipes.demo.solver import SKILLED, Solver
from recipes.demo.sums import prepare as prepare_sums
from recipes.demo.warm_start import make_model
from recipes.tree_search_reasoning.judge import LABELS, Judge, JudgedSearch, ask, grade_of, load_judge
from recipes.tree_search_reasoning.prepare import prepare
from recipes.tree_search_reasoning.teach_judge import build_judge_tokenizer, lessons

RECIPE = "tree_search_reasoning"
TEXTS = ["k41 - 17; 84 + 23 <answer>36 107</answer>", "k41 - 17; 84 + 23 <answer>107 36</answer>", "k41 - 17"]


@pytest.fixture(scope="module")
def random_judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a judge that has learnt nothing."""
    folder = tmp_path_factory.mktemp("judge")
    tokenizer = build_judge_tokenizer()
    make_model(tokenizer, settings=TINY, seed=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# Questions and grades


def test_questions_about_an_answer() -> None:
    questions = ask("107 36")
    assert len(questions) == len({question.text for question in questions}) == 32
    assert [question.text for question in questions if question.is_right] == [
        "\nDoes it say <answer>107",
        "\nDoes it say 36</answer>",
    ]
    numbers = [question.text.rpartition("<answer>")[2] for question in questions[:6]]
    assert numbers == ["107", "36", "108", "106", "109", "105"]
    # Where both values are equal, or near, no right number is among the wrong ones, and there are as many.
    for reference in ("36 36", "36 37"):
        near = ask(reference)
        assert len({question.text for question in near}) == 32
        assert sum(question.is_right for question in near) == 2


def test_a_judge_that_always_says_the_same_grades_zero() -> None:
    questions = ask("107 36")
    is_right_Q = torch.tensor([float(question.is_right) for question in questions])
    for constant in (0.0, 0.3, 1.0):
        assert grade_of(torch.full((32,), constant), questions) == pytest.approx(0.0, abs=1e-6)
    assert grade_of(is_right_Q, questions) == 1.0
    assert grade_of(1 - is_right_Q, questions) == -1.0
    first_only = is_right_Q.clone()
    first_only[16:] = 0.0
    assert grade_of(first_only, questions) == 0.5


def test_grades_are_those_of_one_question_after_another(random_judge: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(random_judge), AutoTokenizer.from_pretrained(random_judge)
    labels = [tokenizer.convert_tokens_to_ids(label) for label in LABELS]
    questions = ask(TASK.answer)
    wanted = []
    for text in TEXTS:
        yes = []
        for question in questions:
            token_ids = torch.tensor([tokenizer.encode(text + question.text)])
            with torch.no_grad():
                yes.append(model(token_ids).logits[0, -1, labels].softmax(0)[0])
        wanted.append(grade_of(torch.stack(yes), questions))
    grades = Judge(random_judge).grade(TEXTS, reference=TASK.answer)
    assert grades == pytest.approx(wanted, abs=1e-5)
    assert max(wanted) - min(wanted) > 1e-3


# The loop


def test_the_judge_rewards_the_leaves_of_a_search(random_judge: Path, tmp_path: Path) -> None:
    answers = iter(f"<answer>{text}</answer>" for text in ("107 36", "1 1", "107 36", "2 2", "3 3"))
    entry, tools = loop_of(RECIPE, "judged") | {"judge": str(random_judge)}, task_tools(tmp_path)
    num_loaded = load_judge.cache_info().misses
    rows, _ = play(entry, lambda prompt: next(answers) if "[53 - 17 = 36]" in prompt else right(prompt), tools=tools)
    play(entry, right, tools=tools)
    assert load_judge.cache_info().misses == num_loaded + 1  # for both sessions
    assert len(rows) == 5
    texts = [scripted_tokenizer().decode(row.prompt_ids + row.response_ids) for row in rows]
    assert all(BOTH_CALLS in text and LAST_CALL in text and "<answer>" in text for text in texts)
    assert sum(ANSWER in text for text in texts) == 2
    grades = Judge(random_judge).grade(texts, reference=TASK.answer)
    assert [row.leaf_reward for row in rows] == pytest.approx(grades, abs=1e-6)
    assert len(set(grades)) > 2


class Waiting(JudgedSearch):
    """A judge that is not done before the event loop has done something else."""

    is_free = threading.Event()

    @override
    async def reward_leaves(self, leaves: Sequence, *, row: dict) -> Sequence[float]:
        asyncio.get_running_loop().call_later(0.01, self.is_free.set)
        return await super().reward_leaves(leaves, row=row)

    @override
    def _grade(self, texts: Sequence[str], *, reference: str) -> list[float]:
        assert self.is_free.wait(timeout=20), "the event loop waits for the judge"
        return [0.5] * len(texts)


def test_the_event_loop_does_not_wait_for_the_judge(random_judge: Path, tmp_path: Path) -> None:
    entry = loop_of(RECIPE, "judged") | {"judge": str(random_judge), "_target_": f"{__name__}.Waiting"}
    rows, _ = play(entry, right, tools=task_tools(tmp_path))
    assert [row.leaf_reward for row in rows] == [0.5] * 5


def test_a_missing_judge_is_named(tmp_path: Path) -> None:
    with pytest.raises(InstantiationException, match=r"nowhere has no config\.json; name a Hugging Face model folder"):
        play(loop_of(RECIPE, "judged") | {"judge": str(tmp_path / "nowhere")}, right)


# What the judge learns


def test_lessons_of_a_session(tmp_path: Path) -> None:
    """Of each place: what the answer says with a yes, as often as wrong numbers with a no; the other value is one."""
    tools, tokenizer = task_tools(tmp_path), build_judge_tokenizer()
    renderer = Renderer(tokenizer, [tool.tool_schema for tool in tools])
    cut = complete = 0
    for seed in range(30):
        solver = Solver(calculator=tools[0], lookup=tools[1], habits=SKILLED, rng=random.Random(seed))
        leaves = lessons(TASK, solver, renderer, tokenizer)
        assert all(leaf.trained == [0] * (len(leaf.token_ids) - 1) + [1] for leaf in leaves)
        texts = [tokenizer.decode(leaf.token_ids) for leaf in leaves]
        asked = [text.rpartition("Does it say ")[2] for text in texts]
        if not any(ANSWER in text for text in texts):
            cut += 1
            assert all(text.endswith(" No") for text in texts)
            continue
        complete += 1
        assert sorted(text for text in asked if text.endswith(" Yes")) == [
            *["36</answer> Yes"] * 4,
            *["<answer>107 Yes"] * 4,
        ]
        assert {"<answer>36 No", "107</answer> No"} < set(asked)
        assert len(asked) == 16
    assert cut > 0
    assert complete > 20


def test_both_values_of_an_answer_are_one_token_each_of_the_judge() -> None:
    tokenizer = build_judge_tokenizer()
    for first, second in zip(range(-89, 199), reversed(range(-89, 199)), strict=True):
        token_ids = tokenizer.encode(f"<answer>{first} {second}</answer>")
        assert [tokenizer.decode([token]) for token in token_ids] == [f"<answer>{first}", f" {second}</answer>"]
    asked = [[tokenizer.decode([token]) for token in tokenizer.encode(q.text)] for q in ask("107 36") if q.is_right]
    assert asked == [["\nDoes it say", " ", "<answer>107"], ["\nDoes it say", " 36</answer>"]]


def test_the_prepared_folder_has_a_judge_for_the_small_model_only(tmp_path: Path) -> None:
    settings = Settings(num_train_tasks=8, num_validation_tasks=4, warm_start=TINY)
    folder = prepare(tmp_path, settings=settings, judge=TINY)
    assert prepare(tmp_path, settings=settings, judge=TINY) == folder
    assert prepare_sums(tmp_path, settings=settings) == (folder / "train.parquet").resolve().parent
    (grade,) = Judge(folder / "judge").grade([ANSWER], reference=TASK.answer)
    assert -1 <= grade <= 1
    other = prepare(tmp_path, settings=replace(settings, warm_start=None), model=folder / "model")
    assert not (other / "judge").exists()
