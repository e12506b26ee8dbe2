"""What the checks of user code before Ray starts (`verl_tree.launch.validation.code`) rely on in verl 0.9.1."""

import inspect

import pytest
from verl.experimental.reward_loop import migrate_legacy_reward_impl
from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls, registry
from verl.trainer import main_ppo
from verl.trainer.ppo import reward
from verl.trainer.ppo.v1 import trainer_base
from verl.utils import import_utils
from verl.utils.dataset import rl_dataset


def test_reward_managers_are_looked_up_in_the_registry():
    assert get_reward_manager_cls("naive") is registry.REWARD_MANAGER["naive"]
    with pytest.raises(ValueError, match="Unknown reward manager: prime"):
        get_reward_manager_cls("prime")


def test_objects_are_loaded_by_path_and_name(tmp_path):
    """A file, with or without `file://`, or a module behind `pkg://`, with dots or slashes."""
    file = tmp_path / "mine.py"
    file.write_text("graded = 5\n")
    for path in (str(file), f"{import_utils.FILE_PATH_PREFIX}{file}"):
        assert import_utils.load_extern_object(path, "graded") == 5
    for path in ("verl.utils.import_utils", "verl/utils/import_utils"):
        loaded = import_utils.load_extern_object(f"{import_utils.PKG_PATH_PREFIX}{path}", "load_module")
        assert loaded is import_utils.load_module
    read = {
        reward.get_custom_reward_fn: ('config.reward.get("custom_reward_function")', 'get("path")', 'get("name")'),
        reward.resolve_reward_manager_cls: ("module_cfg.path", "object_name=reward_manager_cfg.name"),
        rl_dataset.get_dataset_class: ("data_config.custom_cls.path", "data_config.custom_cls.name"),
    }
    for function, keys in read.items():
        source = inspect.getsource(function)
        assert all(key in source for key in keys)


def test_the_trainer_reads_no_legacy_keys():
    """`migrate_legacy_reward_impl` is there, but nobody on our way calls it: what it moves would be lost."""
    assert "config.reward.custom_reward_function = config.custom_reward_function" in inspect.getsource(
        migrate_legacy_reward_impl
    )
    for module in (main_ppo, trainer_base, reward):
        source = inspect.getsource(module)
        assert "migrate_legacy_reward_impl" not in source and "config.custom_reward_function" not in source
