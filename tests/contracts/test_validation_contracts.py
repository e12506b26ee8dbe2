"""What the checks of user code before Ray starts (`verl_tree.launch.validation.code`) rely on in verl 0.9.1."""

from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf
from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls, registry
from verl.trainer import main_ppo
from verl.trainer.ppo import reward
from verl.trainer.ppo.v1 import trainer_base
from verl.utils import import_utils
from verl.utils.dataset import rl_dataset

SOURCE = """
from torch.utils.data import Dataset

def graded(solution): return 5 * solution
class Manager: ...
class Rows(Dataset): ...
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """Write a module of the user's with a reward function, a reward manager and a data set."""
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    return file


def reward_config(**settings: object) -> DictConfig:
    return OmegaConf.create({"reward": settings})


def test_reward_managers_are_looked_up_in_the_registry() -> None:
    assert get_reward_manager_cls("naive") is registry.REWARD_MANAGER["naive"]
    with pytest.raises(ValueError, match="Unknown reward manager: prime"):
        get_reward_manager_cls("prime")


def test_objects_are_loaded_by_path_and_name(mine: Path) -> None:
    """A file, with or without `file://`, or a module behind `pkg://`, with dots or slashes."""
    for path in (str(mine), f"{import_utils.FILE_PATH_PREFIX}{mine}"):
        assert import_utils.load_extern_object(path, "graded").__name__ == "graded"
    for path in ("verl.utils.import_utils", "verl/utils/import_utils"):
        loaded = import_utils.load_extern_object(f"{import_utils.PKG_PATH_PREFIX}{path}", "load_module")
        assert loaded is import_utils.load_module


def test_verl_reads_the_keys_that_are_checked(mine: Path) -> None:
    function = {"path": str(mine), "name": "graded"}
    assert reward.get_custom_reward_fn(reward_config(custom_reward_function=function))(3) == 15
    manager = {"source": "importlib", "name": "Manager", "module": {"path": str(mine)}}
    assert reward.resolve_reward_manager_cls(reward_config(reward_manager=manager)).__name__ == "Manager"
    rows = OmegaConf.create({"custom_cls": {"path": str(mine), "name": "Rows"}})
    assert rl_dataset.get_dataset_class(rows).__name__ == "Rows"


def test_the_trainer_reads_no_legacy_keys(mine: Path) -> None:
    """Nobody on our way calls `migrate_legacy_reward_impl`, which would move them."""
    legacy = OmegaConf.create({"reward": {}, "custom_reward_function": {"path": str(mine), "name": "graded"}})
    assert reward.get_custom_reward_fn(legacy) is None
    for module in (main_ppo, trainer_base, reward):
        assert "migrate_legacy_reward_impl" not in vars(module)
