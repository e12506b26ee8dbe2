"""Rows and reward of the recipe `sums`."""

from pathlib import Path

import pandas as pd
import pytest
from input_cases import write_model

from recipes.demo.settings import Settings
from recipes.sums.prepare import prepare
from recipes.sums.reward import compute_score
from recipes.sums.tasks import LEVELS, make_rows


def test_rows_go_from_easy_to_hard_and_name_their_level() -> None:
    rows = list(make_rows(5, seed=3, split="train"))
    assert [row["data_source"] for row in rows] == [
        f"chain_sum_{num_terms}_terms_{num_digits}_digits" for num_terms, num_digits in LEVELS for _ in range(5)
    ]
    for row in rows:
        question = row["prompt"][0]["content"]
        value = eval(question.removeprefix("What is ").removesuffix("?"))
        assert compute_score(solution_str=f"That is {value}.", ground_truth=row["reward_model"]["ground_truth"]) == 1.0
    assert rows == list(make_rows(5, seed=3, split="train"))


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("4 + 3 = 7.", True),
        ("7", True),
        ("The answer is 7.0", True),
        ("7 - 0 = 8", False),
        ("The answer is 17.", False),
        ("-7", False),
        ("seven", False),
        ("", False),
    ],
)
def test_the_last_number_is_the_answer(answer: str, right: bool) -> None:
    assert compute_score(solution_str=answer, ground_truth="7") == float(right)


def test_splits_are_prepared_once_and_share_no_row(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    settings = Settings(warm_start=None, num_train_tasks=20, num_validation_tasks=6)
    folder = prepare(tmp_path / "cache", settings=settings, model=model)
    assert (folder / "model" / "config.json").exists()
    train, validation = (pd.read_parquet(folder / f"{split}.parquet") for split in ("train", "validation"))
    assert (len(train), len(validation)) == (3 * 20, 3 * 6)
    assert {row["split"] for row in train["extra_info"]} == {"train"}
    assert prepare(tmp_path / "cache", settings=settings, model=model) == folder


def test_without_a_model_the_answer_is_where_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^--model: .* give the folder recipes\.smollm\.prepare prints$"):
        prepare(tmp_path, settings=Settings(warm_start=None), model=None)
