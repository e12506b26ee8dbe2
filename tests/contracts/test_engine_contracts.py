"""What the engines and workers rely on in verl 0.9.1: names, signatures and behaviour."""

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from built_engines import build_engine, saved
from peft import LoraConfig, PeftModelForCausalLM, TaskType
from tensordict import NonTensorData, TensorDict
from tiny_models import tiny_model
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForTokenClassification
from verl.single_controller.base.decorator import MAGIC_ATTR, Dispatch
from verl.trainer.ppo.core_algos import agg_loss
from verl.utils import tensordict_utils as tu
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import (
    FSDPActorConfig,
    FSDPCriticConfig,
    FSDPEngineConfig,
)
from verl.workers.engine.base import BaseEngine, EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithLMHead, FSDPEngineWithValueHead
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.padding import no_padding_2_padding, response_from_nested

import verl_tree.cpu.platform  # noqa: F401  (the CPU platform)
from verl_tree.config import FLAT_STRATEGY, TREE_STRATEGY
from verl_tree.engine import CPUEngineWithLMHead, FSDPTreeEngine
from verl_tree.trainer.worker import TreeTrainingWorker


def jagged(rows: list[list[float]]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def parameters(function: object) -> list[str]:
    """Names; Ray adds one to the methods of classes that became actors in this process."""
    return [name for name in inspect.signature(function).parameters if name != "_ray_trace_ctx"]


@pytest.mark.parametrize(
    ("owner", "name", "expected"),
    [
        (FSDPEngine, "__init__", ["self", "model_config", "engine_config", "optimizer_config", "checkpoint_config"]),
        (FSDPEngine, "_build_module", ["self"]),
        (FSDPEngine, "_build_fsdp_module", ["self", "module"]),
        (FSDPEngine, "_build_lora_module", ["self", "module"]),
        (FSDPEngine, "forward_backward_batch", ["self", "data", "loss_function", "forward_only"]),
        (FSDPEngine, "_gradient_sync_context", ["self", "is_last_micro_batch"]),
        (FSDPEngine, "get_data_parallel_group", ["self"]),
        (FSDPEngine, "get_data_parallel_size", ["self"]),
        (FSDPEngine, "get_data_parallel_rank", ["self"]),
        (FSDPEngine, "is_mp_src_rank_with_outputs", ["self"]),
        (BaseEngine, "train_batch", ["self", "data", "loss_function"]),
        (BaseEngine, "infer_batch", ["self", "data", "loss_function"]),
        (TrainingWorker, "__init__", ["self", "config"]),
        (TrainingWorker, "train_mini_batch", ["self", "data"]),
        (TrainingWorker, "train_batch", ["self", "data"]),
    ],
)
def test_overridden_and_called_methods_keep_their_signatures(owner: type, name: str, expected: list[str]) -> None:
    assert parameters(inspect.getattr_static(owner, name)) == expected


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Save a tiny model, and make a process group of this process alone."""
    with saved(tiny_model(size="engine", tie_word_embeddings=True), tmp_path_factory.mktemp("engine")) as folder:
        yield folder


def build(engine_class: type[FSDPEngine], folder: Path, **options: object) -> FSDPEngine:
    model = {"use_remove_padding": engine_class is FSDPTreeEngine}
    return build_engine(engine_class, folder, model=model, use_dynamic_bsz=True, **options)


def test_a_tree_engine_is_an_fsdp2_engine(folder: Path) -> None:
    """What the overrides read is where verl sets it, and what they set is where verl reads it."""
    engine = build(FSDPTreeEngine, folder)
    assert isinstance(engine.module, FSDPModule)
    assert engine.engine_config.strategy == FLAT_STRATEGY
    assert engine._autocast_dtype == torch.float32
    assert engine.scaler is None
    assert engine.use_remove_padding is False
    # Runs that must repeat bit for bit say so here; measured times then decide nothing.
    assert engine.engine_config.full_determinism is False


def test_what_verl_does_for_ulysses_and_the_tree_engine_goes_round(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why `BuildForTrees` shows verl rows without padding, and a model without teams."""
    with pytest.raises(ValueError, match="use_remove_padding"):
        build(CPUEngineWithLMHead, folder, ulysses_sequence_parallel_size=2)
    engine = build(FSDPTreeEngine, folder)
    assert engine.ulysses_parallel_group is engine.team is None
    # Three ranks do not divide the four heads, and verl's patch says so if it is told of them.
    monkeypatch.setattr(engine, "ulysses_sequence_parallel_size", 3)
    with pytest.raises(AssertionError, match="ulysses_sp_size 3"):
        FSDPEngine._build_module(engine)
    engine._build_module()
    assert engine.ulysses_sequence_parallel_size == 3


def test_the_keys_that_make_teams() -> None:
    """As `verl_tree.launch.checks.capacity` reads them: the actor's old key counts, the critic's does not."""
    common = {"strategy": "fsdp2", "rollout_n": 1, "use_dynamic_bsz": True}
    actor = FSDPActorConfig(fsdp_config=FSDPEngineConfig(), ulysses_sequence_parallel_size=2, **common)
    critic = FSDPCriticConfig(fsdp=FSDPEngineConfig(), ulysses_sequence_parallel_size=2, **common)
    assert actor.engine.ulysses_sequence_parallel_size == 2
    assert critic.engine.ulysses_sequence_parallel_size == 1
    with pytest.raises(ValueError, match="use_remove_padding"):
        actor.validate(2, 1, {"use_remove_padding": False})
    actor.validate(2, 1, {"use_remove_padding": True})


def test_a_reference_model_on_a_cpu_is_not_offloaded_through_pinned_memory(folder: Path) -> None:
    """Why `BuildOnAnyDevice` hides `forward_only`: pinned memory needs CUDA.

    torch's build for the CPU says that there is no accelerator, its build for CUDA that there is no driver.
    """
    for engine_class in (FSDPTreeEngine, CPUEngineWithLMHead):
        engine = build(engine_class, folder, forward_only=True)
        assert engine._uses_fsdp2_cpu_offload_policy is False
        assert engine.engine_config.forward_only is True
    with pytest.raises(RuntimeError, match=r"accelerator|no NVIDIA driver"):
        build(FSDPEngineWithLMHead, folder, forward_only=True)


def test_adapters_of_a_critic_are_those_of_a_causal_lm(folder: Path) -> None:
    """Verl tells PEFT so, and PEFT then takes a method of the model that a token classifier lacks."""
    assert '"task_type": TaskType.CAUSAL_LM' in inspect.getsource(FSDPEngine._build_lora_module)
    model = AutoModelForTokenClassification.from_pretrained(folder, num_labels=1)
    with pytest.raises(AttributeError, match="prepare_inputs_for_generation"):
        PeftModelForCausalLM(model, LoraConfig(task_type=TaskType.CAUSAL_LM, target_modules=["q_proj"]))


def test_the_registry_keeps_engines_by_model_type_strategy_and_device() -> None:
    for device in ("cpu", "cuda"):
        assert EngineRegistry._engines["language_model"][TREE_STRATEGY][device] is FSDPTreeEngine
        assert EngineRegistry._engines["value_model"][TREE_STRATEGY][device] is FSDPTreeEngine
    assert EngineRegistry._engines["language_model"]["fsdp2"]["cpu"] is CPUEngineWithLMHead
    assert EngineRegistry._engines["language_model"]["fsdp2"]["cuda"] is FSDPEngineWithLMHead
    assert EngineRegistry._engines["value_model"]["fsdp2"]["cuda"] is FSDPEngineWithValueHead


def test_actor_strategy_reaches_the_engine_config_unchecked() -> None:
    actor = FSDPActorConfig(
        strategy=TREE_STRATEGY, rollout_n=1, ppo_micro_batch_size_per_gpu=1, fsdp_config=FSDPEngineConfig()
    )
    assert actor.engine.strategy == TREE_STRATEGY


def test_worker_classes_are_class_attributes() -> None:
    assert ActorRolloutRefWorker.actor_worker_cls is TrainingWorker
    assert ActorRolloutRefWorker.ref_worker_cls is TrainingWorker
    attributes = getattr(TrainingWorker.train_mini_batch, MAGIC_ATTR)
    assert attributes["blocking"] is False
    assert attributes["dispatch_mode"]["dispatch_fn"] is not None
    # A worker group has only what is registered, so an override is registered as verl's own method is.
    for worker in (TrainingWorker, TreeTrainingWorker):
        assert getattr(worker.set_loss_fn, MAGIC_ATTR)["dispatch_mode"] is Dispatch["ONE_TO_ALL"]


def test_scores_stand_one_position_before_their_token() -> None:
    data = TensorDict(
        {"prompts": jagged([[1, 1], [1]]), "responses": jagged([[2, 3], [4]]), "response_mask": jagged([[1, 1], [1]])},
        batch_size=[2],
    )
    scores = jagged([[0.0, 20.0, 30.0, 0.0], [40.0, 0.0]])
    assert no_padding_2_padding(scores, data).tolist() == [[20.0, 30.0], [40.0, 0.0]]
    rows = response_from_nested(scores, data["response_mask"])
    assert [row.tolist() for row in rows.unbind()] == [[20.0, 30.0], [40.0]]


def test_a_padding_row_with_an_empty_mask_changes_no_loss_but_through_the_row_count() -> None:
    loss = torch.tensor([[1.0, 2.0], [5.0, 5.0]])
    mask = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    for mode, expected in (("token-mean", 1.5), ("seq-mean-token-sum", 3.0), ("seq-mean-token-mean", 1.5)):
        value = agg_loss(loss, mask, mode, dp_size=1, batch_num_tokens=2, global_batch_size=1)
        assert value.item() == pytest.approx(expected)


def test_non_tensor_values_are_kept_and_lists_are_rows() -> None:
    data = TensorDict({"x": torch.arange(3)}, batch_size=[3])
    tu.assign_non_tensor(data, one=1.5, lens=NonTensorData([1, 2]))
    chosen = tu.index_select_tensor_dict(data, [2, 0])
    assert chosen["x"].tolist() == [2, 0]
    assert tu.get(chosen, "one") == 1.5
    assert tu.get(chosen, "lens") == [1, 2]
    assert tu.get(chosen, "absent", default=7) == 7
    assert tu.pop(chosen, key="absent", default=8) == 8


def test_metrics_of_ranks_need_equal_numbers_of_values() -> None:
    def summed(*values: float) -> Metric:
        metric = Metric(AggregationType.SUM)
        metric.extend(list(values))
        return metric

    with pytest.raises(ValueError, match="same number"):
        Metric.aggregate_dp([summed(1.0), summed(2.0, 3.0)])
    # A sum is averaged over ranks: losses come multiplied by the number of ranks.
    assert Metric.aggregate_dp([summed(1.0), summed(3.0)]) == 2.0
