"""verl 0.9.1, as the recipes use it: reward functions of a package, and paths of configuration files."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf
from verl.tools.tool_registry import initialize_tools_from_config
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.utils.import_utils import resolve_config_path
from verl.utils.reward_score import default_compute_score


def test_a_reward_function_is_found_by_the_name_of_its_module() -> None:
    """recipes/tree_search_reasoning names its own this way; the loop calls it with these arguments."""
    path = "pkg://recipes.tree_search_reasoning.reward"
    config = OmegaConf.create({"reward": {"custom_reward_function": {"path": path, "name": "compute_score"}}})
    score = get_custom_reward_fn(config)
    row = {"data_source": "arithmetic_tools", "ground_truth": "107 36", "extra_info": None}
    assert score(solution_str="<answer>107 36</answer>", **row) == 1.0
    assert score(solution_str="<answer>36 107</answer>", **row) == 0.0


def test_the_reward_of_gsm8k_reads_the_last_marked_number() -> None:
    """recipes/gsm8k asks for it under this name, also for the rows of its stand-in."""
    assert default_compute_score("openai/gsm8k", "#### 12 or #### 1,300", "1300") == 1.0
    assert default_compute_score("openai/gsm8k", "1300", "1300") == 0.0


def test_a_tool_whose_module_is_missing_fails_when_an_agent_loop_worker_makes_it(tmp_path: Path) -> None:
    """The error names nothing, so the checks look before: this tool is of earlier releases."""
    file = tmp_path / "tools.yaml"
    file.write_text("tools:\n- class_name: verl.tools.gsm8k_tool.Gsm8kTool\n  config: {type: native}\n")
    with pytest.raises(AttributeError, match="NoneType"):
        initialize_tools_from_config(file)


def test_an_absolute_path_of_a_configuration_file_stays_as_it_is(tmp_path: Path) -> None:
    """Agent loop workers have working directories of their own, so recipes give absolute paths."""
    assert resolve_config_path(str(tmp_path / "loops.yaml")) == str(tmp_path / "loops.yaml")
