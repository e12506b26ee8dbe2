"""What translations and checks before Ray starts (`verl_tree.launch`) rely on in verl 0.9.1."""

import inspect
from pathlib import Path
from typing import get_args

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from transfer_queue.controller import TransferQueueController
from transfer_queue.storage.simple_storage import SimpleStorageUnit
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, Qwen3Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopManager
from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls, registry
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.single_controller.ray import ResourcePoolManager
from verl.trainer import main_ppo
from verl.trainer.ppo import reward
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, agg_loss, get_kl_controller, get_policy_loss_fn
from verl.trainer.ppo.rollout_corr_helper import _parse_rollout_is_threshold, apply_bypass_mode
from verl.trainer.ppo.v1 import trainer_base, trainer_separate_async
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.utils import import_utils
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.dataset import rl_dataset
from verl.utils.tracking import Tracking
from verl.workers.config import CriticConfig, FSDPOptimizerConfig
from verl.workers.config.optimizer import build_optimizer
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from verl_tree.launch.checks.choices import CONTENTS, DTYPES, LOAD_FORMATS
from verl_tree.launch.command.composition import has_flash_attn, verl_trainer_folder

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


def test_the_class_of_a_manager_is_loaded_by_its_name() -> None:
    assert (
        import_utils.load_class_from_fqn("verl.trainer.ppo.v1.agent_loop_tq.AgentLoopManagerTQ") is AgentLoopManagerTQ
    )
    assert issubclass(AgentLoopManagerTQ, AgentLoopManager), "what has workers that look up loops"


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


def test_verl_looks_up_losses_loggers_and_controllers_late() -> None:
    """What our check looks up in the same places before Ray starts."""
    with pytest.raises(ValueError, match="Unsupported loss mode: nonsense"):
        get_policy_loss_fn("nonsense")
    assert all(get_policy_loss_fn(name) is loss for name, loss in POLICY_LOSS_REGISTRY.items())
    with pytest.raises(AssertionError, match="nonsense is not supported"):
        Tracking("project", "name", default_backend=["nonsense"])
    assert {"console", "file", "wandb", "tensorboard"} <= set(Tracking.supported_backend)
    with pytest.raises(NotImplementedError):
        get_kl_controller(OmegaConf.create({"type": "nonsense"}))


def test_verl_keeps_all_its_defaults_in_one_file() -> None:
    """The kinds of values are read from it: a value per key, as the composed configuration has it."""
    kept = OmegaConf.load(verl_trainer_folder() / "config" / "_generated_ppo_trainer.yaml")
    composed = OmegaConf.load(verl_trainer_folder() / "config" / "ppo_trainer.yaml")
    assert kept.trainer.total_epochs == composed.trainer.total_epochs
    assert kept.actor_rollout_ref.rollout.n == 1
    assert kept.actor_rollout_ref.actor.use_kl_loss is False


def test_the_width_of_padded_rows_is_the_longest_possible_response() -> None:
    """Rows that are padded when they come keep their width; rows without padding get that of their longest response."""
    attention_mask = torch.tensor([[0, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0]])  # responses of 2 and 1 of 6
    padded = TensorDict(
        {
            "input_ids": torch.arange(16).reshape(2, 8),
            "prompts": torch.arange(16).reshape(2, 8)[:, :2],
            "responses": torch.arange(16).reshape(2, 8)[:, 2:],
            "attention_mask": attention_mask,
            "response_mask": attention_mask[:, 2:],
            "position_ids": torch.zeros(2, 8, dtype=torch.long),
        },
        batch_size=2,
    )
    rows = left_right_2_no_padding(padded.clone())
    assert no_padding_2_padding(torch.ones(6), rows).shape == (2, 6)

    prompts, responses = [torch.ones(1), torch.ones(2)], [torch.ones(2), torch.ones(1)]
    jagged = {
        name: torch.nested.as_nested_tensor(parts, layout=torch.jagged)
        for name, parts in (("prompts", prompts), ("responses", responses))
    }
    assert no_padding_2_padding(torch.ones(6), TensorDict(jagged, batch_size=2)).shape == (2, 2)


def test_a_norm_divides_by_the_width_or_by_the_factor() -> None:
    losses, mask = torch.tensor([[1.0, 2, 4, 0, 0, 0], [8, 0, 0, 0, 0, 0]]), torch.zeros(2, 6)
    mask[0, :3] = mask[1, 0] = 1
    whole = {"loss_agg_mode": "seq-mean-token-sum-norm", "global_batch_size": 5}
    assert agg_loss(losses, mask, **whole).item() == pytest.approx(15 / 5 / 6)
    assert agg_loss(losses, mask, **whole, loss_scale_factor=6).item() == pytest.approx(15 / 5 / 6)
    assert agg_loss(losses[:, :3], mask[:, :3], **whole).item() == pytest.approx(15 / 5 / 3)
    assert agg_loss(losses[:, :3], mask[:, :3], **whole, loss_scale_factor=6).item() == pytest.approx(15 / 5 / 6)


def test_the_earlier_trainer_gives_the_correction_to_the_loss_and_the_present_one_does_not() -> None:
    """What the translation does for `bypass_mode`, and that the worker's config takes it."""
    correction = OmegaConf.create({"bypass_mode": True, "rollout_is": "token", "loss_type": "reinforce"})
    loss = OmegaConf.create({"_target_": "verl.workers.config.PolicyLossConfig", "loss_mode": "vanilla"})
    rows = DataProto.from_single_dict({"rollout_log_probs": torch.zeros(1, 1)})
    apply_bypass_mode(rows, correction, loss)
    assert loss.loss_mode == "bypass_mode"
    assert loss.rollout_correction == correction
    assert omega_conf_to_dataclass(loss).rollout_correction.get("rollout_is") == "token"
    for module in (trainer_base, trainer_separate_async):
        assert "apply_bypass_mode" not in vars(module)


def test_the_trainer_reads_the_critics_most_tokens_under_another_name() -> None:
    config = CriticConfig(strategy="fsdp2", use_dynamic_bsz=True, ppo_max_token_len_per_gpu=5)
    assert config.ppo_infer_max_token_len_per_gpu != 5
    assert CriticConfig(strategy="fsdp2", use_dynamic_bsz=True, ppo_infer_max_token_len_per_gpu=7)


def small_qwen3() -> Qwen3Config:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8, "vocab_size": 32}
    return Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=2)


@pytest.mark.skipif(has_flash_attn(), reason="shows what happens without flash-attn")
def test_verls_critic_asks_for_flash_attention_by_name(tmp_path: Path) -> None:
    """Whatever the model's config says; so `tree.enabled=false` with a critic is refused without flash-attn."""
    from verl.utils.model import load_valuehead_model

    config = small_qwen3()
    config._attn_implementation = "sdpa"
    AutoModelForTokenClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="not a value head model") as error:
        load_valuehead_model(str(tmp_path), torch.float32, config, trust_remote_code=False)
    assert isinstance(error.value.__cause__, ImportError)
    assert "FlashAttention2" in str(error.value.__cause__)


def test_ulysses_of_verl_exchanges_heads_in_flash_attention_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """With sdpa a rank would attend within its own tokens; so the check asks for flash_attention_2."""
    from transformers import modeling_flash_attention_utils
    from transformers.integrations import flash_attention
    from verl.models.transformers.monkey_patch import apply_monkey_patch

    # Another test of this process may have patched it already.
    before = modeling_flash_attention_utils._flash_attention_forward
    monkeypatch.setattr(flash_attention, "_flash_attention_forward", before)
    functions = dict(ALL_ATTENTION_FUNCTIONS)
    model = AutoModelForCausalLM.from_config(small_qwen3())
    forward = type(model).forward
    apply_monkey_patch(model, use_remove_padding=True, ulysses_sp_size=2)
    assert flash_attention._flash_attention_forward is not before
    assert dict(ALL_ATTENTION_FUNCTIONS) == functions
    assert type(model).forward is forward


def test_vllm_takes_the_names_that_are_known() -> None:
    """The checks have copies, since the import of vLLM takes seconds."""
    from vllm.config.model import ModelDType
    from vllm.model_executor.model_loader import LoadFormats

    assert set(DTYPES) == set(get_args(ModelDType))
    assert set(LOAD_FORMATS) == set(get_args(LoadFormats))


def test_contents_of_checkpoints_that_verl_knows() -> None:
    """What it does not know it leaves out, without a word."""
    known = {
        name.removeprefix("should_save_") for name in dir(BaseCheckpointManager) if name.startswith("should_save_")
    }
    assert known - {"lora_only"} == set(CONTENTS)


def test_an_optimizer_is_a_class_of_a_module_and_an_adam_gets_the_betas() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    built = build_optimizer(parameters, FSDPOptimizerConfig(lr=0.1, optimizer="Adam", betas=(0.0, 0.95)))
    assert (type(built), built.defaults["betas"]) == (torch.optim.Adam, (0.0, 0.95))
    assert type(build_optimizer(parameters, FSDPOptimizerConfig(lr=0.1, optimizer="SGD"))) is torch.optim.SGD
    with pytest.raises(AttributeError, match="Optimizer 'Nope' not found"):
        build_optimizer(parameters, FSDPOptimizerConfig(lr=0.1, optimizer="Nope"))


def test_a_threshold_is_a_positive_number_or_two_as_a_text() -> None:
    assert _parse_rollout_is_threshold(2) == (2.0, None)
    assert _parse_rollout_is_threshold("0.5_2.0") == (2.0, 0.5)
    with pytest.raises(ValueError, match="must be positive"):
        _parse_rollout_is_threshold(-1)


def test_platforms_have_the_names_of_devices() -> None:
    devices = {get().device_name for name in PlatformRegistry.registered_names() if (get := PlatformRegistry.get(name))}
    assert {"cuda", "npu"} <= devices


def test_an_epoch_has_the_whole_batches_of_the_data_and_the_trainer_divides_by_them() -> None:
    source = inspect.getsource(trainer_base.PPOTrainer)
    assert "self.steps_per_epoch = len(self.train_dataset) // self.config.data.train_batch_size" in source
    assert "current_epoch = self.global_steps // self.steps_per_epoch" in source


def test_ray_holds_three_cpus_for_a_rank_and_one_each_for_the_queue() -> None:
    """Fewer in all are never placed."""
    assert ResourcePoolManager({}, {}).max_colocate_count == 3
    for actor in (TransferQueueController, SimpleStorageUnit):
        assert actor._default_options["num_cpus"] == 1
