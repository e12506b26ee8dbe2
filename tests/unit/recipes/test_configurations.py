"""How recipes are put together: they import the demo only, and their configurations are accepted before training."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from input_cases import write_model, write_rows
from omegaconf import DictConfig, OmegaConf
from recipe_cases import RECIPES, ROOT

from recipes.blackbox_openai_agent.session import MEMORY_VARIABLE
from verl_tree.launch.checks import validate
from verl_tree.launch.command.composition import prepare_hydra


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a prepared folder."""
    write_rows(tmp_path / "train.parquet")
    write_rows(tmp_path / "validation.parquet")
    write_model(tmp_path / "model")
    (tmp_path / "tools.yaml").write_text("tools: []\n")
    return tmp_path


def composed(recipe: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> DictConfig:
    """Compose and check a recipe's configuration."""
    monkeypatch.chdir(ROOT)  # where launch.sh starts: the search path of the configuration is relative
    prepare_hydra()
    given = [f"recipe.root={ROOT}", f"recipe.folder={folder}", *overrides]
    with initialize_config_dir(config_dir=str(ROOT / "recipes" / recipe / "configs"), version_base=None):
        config = compose(recipe, overrides=given)
    OmegaConf.resolve(config)
    validate(config)
    return config


@pytest.mark.parametrize("folder_name", [*RECIPES, "demo"])
def test_a_recipe_imports_the_demo_and_no_other_recipe(folder_name: str) -> None:
    files = (ROOT / "recipes" / folder_name).glob("*.py")
    imported = {name for file in files for name in re.findall(r"(?:from|import) recipes\.(\w+)", file.read_text())}
    assert imported - {folder_name} == {"demo"} - {folder_name}


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe != "sums"])  # which has no loop of its own
def test_no_loop_is_registered_under_the_name_of_its_entry(recipe: str) -> None:
    """Else verl's decorator replaces the entry, and its options are lost (docs/agent_loops.md)."""
    folder = ROOT / "recipes" / recipe
    named = {entry["name"] for entry in OmegaConf.load(folder / "loops.yaml")}
    registered = {name for file in folder.glob("*.py") for name in re.findall(r'@register\("(\w+)"', file.read_text())}
    assert named
    assert not named & registered


@pytest.mark.parametrize(
    ("recipe", "agent", "estimator", "num_sessions", "response_len"),
    [
        ("arithmetic_tools", "arithmetic_tools", "tree_grpo", 8, 192),
        ("blackbox_openai_agent", "openai_agent", "tree_grpo", 8, 192),
        ("calculator", "calculator", "tree_grpo", 8, 256),
        ("coding_agent", "coding_agent", "tree_grpo", 8, 384),
        ("gsm8k", "lines", "treepo", 2, 48),
        ("memory_qa", "memory_qa", "tree_grpo", 8, 48),
        ("multi_turn_thinking", "rendered_tools", "tree_grpo", 8, 224),
        ("textworld", "textworld", "tree_grpo", 8, 512),
        ("tree_search_reasoning", "tree_grpo", "tree_grpo_intra", 4, 192),
    ],
)
def test_a_recipe_is_the_demo_with_a_loop_of_its_own(
    recipe: str,
    agent: str,
    estimator: str,
    num_sessions: int,
    response_len: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = composed(recipe, folder, monkeypatch, "profile=cpu")
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.agent.default_agent_loop, config.algorithm.adv_estimator) == (agent, estimator)
    assert (rollout.n, config.data.max_response_length) == (num_sessions, response_len)
    assert config.trainer.experiment_name == recipe
    assert config.trainer.logger == ["file", "tensorboard", "wandb"]
    assert agent in [entry.name for entry in OmegaConf.load(rollout.agent.agent_loop_config_path)]


def test_the_agent_behind_the_gateway_is_told_where_the_memory_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = composed("blackbox_openai_agent", folder, monkeypatch, "profile=cpu")
    assert config.ray_kwargs.ray_init.runtime_env.env_vars[MEMORY_VARIABLE] == f"{folder}/memory.sqlite"


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_sizes_for_eight_gpus_are_accepted(recipe: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the profile of a CPU, since the one of a GPU is refused where there is none."""
    config = composed(recipe, folder, monkeypatch, "profile=cpu", "+scale=qwen3_8b")
    assert config.trainer.n_gpus_per_node == 8
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6


# Stands for `python` in the path: it notes what a training run would find in its environment.
PYTHON = """#!/usr/bin/env bash
case "$2" in
    recipes.*.prepare) echo prepared ;;
    verl_tree.main_ppo) echo "$WANDB_MODE $WANDB_DIR $VERL_FILE_LOGGER_PATH $TENSORBOARD_DIR" > "$NOTED" ;;
esac
"""


@pytest.mark.parametrize(("given", "mode"), [({}, "offline"), ({"WANDB_MODE": "online"}, "online")])
def test_a_recipe_leaves_its_loggers_files_in_the_folder_of_the_run(
    tmp_path: Path, given: dict[str, str], mode: str
) -> None:
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_MODE"} | given
    environment |= {"PATH": f"{tmp_path}:{environment['PATH']}", "RUN": f"{tmp_path}/run", "NOTED": f"{tmp_path}/noted"}
    subprocess.run([ROOT / "recipes" / "arithmetic_tools" / "run.sh"], env=environment, check=True)
    run = tmp_path / "run"
    assert (tmp_path / "noted").read_text().split() == [
        mode,
        *map(str, (run, run / "metrics.jsonl", run / "tensorboard")),
    ]
