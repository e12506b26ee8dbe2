"""The recipe tree_search_reasoning: searched trees, their rewards and advantages; the model is scripted."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from input_cases import write_model
from loop_cases import ASSISTANT, rewards, trained
from recipe_cases import ANSWER, BOTH_CALLS, LAST_CALL, check_given_model, loop_of, play, right, task_tools
from scripted_llm import END

from recipes.demo.settings import Settings
from recipes.tree_search_reasoning.prepare import prepare
from verl_tree.trainer.advantages import intra_tree_advantages

RECIPE = "tree_search_reasoning"


def giving(answers: list[str]) -> Callable[[str], str]:
    """Make the right model, whose answers, given its results, are scripted."""
    given = iter(answers)
    return lambda prompt: next(given) if "[53 - 17 = 36]" in prompt else right(prompt)


def rest_of_right(prompt: str) -> str:
    """Be the right model, which may be asked in the middle of a turn."""
    before, head, begun = prompt.rpartition(ASSISTANT)
    return right(before + head)[len(begun) :]


def test_one_tree_of_the_search_its_rewards_and_advantages(tmp_path: Path) -> None:
    """Chain, then twice two expansions at turns behind a result; all answer behind the last call."""
    answers = [f"<answer>{text}</answer>" for text in ("107 36", "1 1", "107 36", "2 2", "3 3")]
    rows, _ = play(loop_of(RECIPE, "tree_grpo"), giving(answers), tools=task_tools(tmp_path))
    assert len(rows) == 5
    # Which leaf comes when depends on the places that were drawn.
    assert sorted(trained(each)[-1] for each in rows) == sorted(text + END for text in answers)
    assert rewards(rows) == [float("107 36" in trained(each)[-1]) for each in rows]
    assert all(trained(each)[:2] == [BOTH_CALLS + END, LAST_CALL + END] for each in rows)

    # With a second tree, all wrong. Group: mean 1/5, variance (2 (4/5)² + 8 (1/5)²) / 9. Tree: mean 2/5, variance 3/10.
    values = np.array([*rewards(rows), *[0.0] * 5])
    sessions = [0] * 5 + [1] * 5
    group_std, tree_std = np.sqrt(1.6 / 9), np.sqrt(0.3)
    first = [(r - 0.2) / group_std + (r - 0.4) / tree_std for r in rewards(rows)]
    actual = intra_tree_advantages(values, groups=["u"] * 10, sessions=sessions)
    np.testing.assert_allclose(actual[:5], first, rtol=1e-5)
    np.testing.assert_allclose(actual[5:], -0.2 / group_std, rtol=1e-5)


def test_entropy_search_and_the_plain_agent(tmp_path: Path) -> None:
    tools = task_tools(tmp_path)
    rows, scripted = play(loop_of(RECIPE, "treerl"), rest_of_right, tools=tools)
    assert rewards(rows) == [1.0] * 5
    assert not scripted.prompts[-1].endswith(ASSISTANT)
    (row,), scripted = play(loop_of(RECIPE, "plain"), right, tools=tools)
    assert trained(row) == [BOTH_CALLS + END, LAST_CALL + END, ANSWER + END]
    assert len(scripted.prompts) == 3


def test_prepared_folder_links_the_demos_and_names_the_plain_loop_for_validation(tmp_path: Path) -> None:
    folder = check_given_model(prepare, tmp_path, model=write_model(tmp_path / "given"), settings=Settings())
    given = (folder / "train.parquet").resolve().parent
    assert given.parent == tmp_path / "demo"
    rows, plain = (pd.read_parquet(each / "validation.parquet") for each in (folder, given))
    assert set(rows.agent_name) == {"plain"}
    pd.testing.assert_frame_equal(rows.drop(columns="agent_name"), plain)
    assert "agent_name" not in pd.read_parquet(folder / "train.parquet")
