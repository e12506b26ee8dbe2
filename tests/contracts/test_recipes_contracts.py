"""verl 0.9.1, as the recipes use it: reward functions of a package, and paths of configuration files."""

from pathlib import Path

from omegaconf import OmegaConf
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.utils.import_utils import resolve_config_path


def test_a_reward_function_is_found_by_the_name_of_its_module() -> None:
    """recipes/tree_search_reasoning names its own this way; the loop calls it with these arguments."""
    path = "pkg://recipes.tree_search_reasoning.reward"
    config = OmegaConf.create({"reward": {"custom_reward_function": {"path": path, "name": "compute_score"}}})
    score = get_custom_reward_fn(config)
    row = {"data_source": "arithmetic_tools", "ground_truth": "107 36", "extra_info": None}
    assert score(solution_str="<answer>107 36</answer>", **row) == 1.0
    assert score(solution_str="<answer>36 107</answer>", **row) == 0.0


def test_an_absolute_path_of_a_configuration_file_stays_as_it_is(tmp_path: Path) -> None:
    """Agent loop workers have working directories of their own, so recipes give absolute paths."""
    assert resolve_config_path(str(tmp_path / "loops.yaml")) == str(tmp_path / "loops.yaml")
