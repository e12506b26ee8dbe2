"""A teacher on the ranks of training: its workers, and what the trainer asks verl for in its place."""

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from transformers import AutoModelForCausalLM
from verl.trainer.ppo.utils import Role
from verl.utils import tensordict_utils as tu
from verl.workers.config import DistillationConfig, DistillationLossConfig, DistillationTeacherModelConfig
from verl.workers.config.rollout import RolloutConfig

from verl_tree.engine.losses.top_k import IDS, LOG_PROBS
from verl_tree.engine.rows.columns import jagged
from verl_tree.launch.command.composition import compose_config
from verl_tree.testing.local_worker import batch_of_rows, local_worker
from verl_tree.trainer.modes import TREE_TRAINERS
from verl_tree.trainer.teacher import TeacherWorker, TeachingWorker, without_servers

TEACHER = "distillation.teacher_models.teacher_model.model_path"
RESPONSES = ([3, 4, 5], [3, 4, 6, 7], [3, 8])
K = 4


def settings_of(path: Path, loss_mode: str) -> DistillationConfig:
    loss = DistillationLossConfig(loss_mode=loss_mode, topk=K, use_policy_gradient=False)
    teacher = DistillationTeacherModelConfig(model_path=str(path), inference=RolloutConfig(name="vllm"))
    return DistillationConfig(enabled=True, teacher_models={"teacher_model": teacher}, distillation_loss=loss)


def rows() -> TensorDict:
    made = [
        {
            "prompts": torch.tensor([1, 2]),
            "responses": torch.tensor(each),
            "response_mask": torch.ones(len(each)).long(),
        }
        for each in RESPONSES
    ]
    data = batch_of_rows(made, max_token_len=64, global_batch_size=len(made), temperature=1.7)
    tu.assign_non_tensor(data, compute_loss=False)
    return data


@pytest.fixture(scope="module")
def teacher(worker_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a teacher that is another model, and knows more tokens."""
    folder = tmp_path_factory.mktemp("teacher")
    config: Any = AutoModelForCausalLM.from_pretrained(worker_model).config
    torch.manual_seed(7)
    config.num_hidden_layers, config.vocab_size, config.layer_types = 3, 40, ["full_attention"] * 3
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    model.save_pretrained(folder)
    return folder


def teacher_worker(worker_model: Path, teacher: Path, *, strategy: str, loss_mode: str) -> TeacherWorker:
    student = local_worker(str(worker_model), strategy=strategy, max_token_len=64)
    worker = TeacherWorker(student.config, distillation=settings_of(teacher, loss_mode))
    worker.reset()
    return worker


def flat_log_probs(teacher: Path) -> torch.Tensor:
    """Return the log-probs of all ids after each token of the rows, by transformers, one row after another."""
    model = AutoModelForCausalLM.from_pretrained(teacher)
    with torch.no_grad():
        parts = [model(input_ids=torch.tensor([[1, 2, *each]])).logits[0].log_softmax(-1) for each in RESPONSES]
    return torch.cat(parts)


def trained(offsets: torch.Tensor) -> torch.Tensor:
    """Mark the places whose next token is in a response."""
    marked = torch.ones(int(offsets[-1]), dtype=torch.bool)
    marked[offsets[:-1]] = marked[offsets[1:] - 1] = False
    return marked


@pytest.mark.parametrize("strategy", ["fsdp_tree", "fsdp2"])
def test_an_estimator_gets_the_teachers_log_probs_at_temperature_one(
    worker_model: Path, teacher: Path, strategy: str
) -> None:
    """On trees and on verl's own engine. verl's servers know no temperature either."""
    worker = teacher_worker(worker_model, teacher, strategy=strategy, loss_mode="k3")
    output = worker.infer_batch(rows())
    assert output is not None
    assert "log_probs" not in output
    values, offsets = jagged(output[LOG_PROBS])
    ids = torch.cat([torch.tensor([1, 2, *each]) for each in RESPONSES]).roll(-1)
    want = flat_log_probs(teacher).gather(1, ids[:, None])
    read = trained(offsets)
    assert values.shape == (len(ids), 1)
    torch.testing.assert_close(values[read], want[read], rtol=1e-5, atol=1e-5)


def test_top_k_gets_the_ids_that_the_student_knows(worker_model: Path, teacher: Path) -> None:
    worker = teacher_worker(worker_model, teacher, strategy="fsdp_tree", loss_mode="forward_kl_topk")
    output = worker.infer_batch(rows())
    assert output is not None
    (values, offsets), (ids, _) = jagged(output[LOG_PROBS]), jagged(output[IDS])
    of_all, read = flat_log_probs(teacher), trained(offsets)
    assert (of_all[read].topk(K).indices >= 31).any(), "guards the test: the teacher likes others"
    want = of_all[:, :31].topk(K)
    assert ids.dtype == torch.int32
    assert torch.equal(ids[read].long(), want.indices[read])
    torch.testing.assert_close(values[read], want.values[read], rtol=1e-5, atol=1e-5)
    assert {name for name in output if "_0" in name} == set()


def test_a_token_that_the_teacher_does_not_know_is_refused(worker_model: Path, teacher: Path) -> None:
    worker = teacher_worker(teacher, worker_model, strategy="fsdp_tree", loss_mode="k3")
    data = rows()
    values, offsets = jagged(data["input_ids"])
    data["input_ids"] = torch.nested.nested_tensor_from_jagged(values.where(values != 8, 35), offsets)
    with pytest.raises(ValueError, match=rf"{worker_model} knows 31 tokens, and a row has the token 35.*tokenizer"):
        worker.infer_batch(data)


def config_of(*overrides: str) -> DictConfig:
    return compose_config(["profile=cpu", "actor_rollout_ref.model.path=unused", *overrides])


HERE = ("distillation.enabled=true", f"{TEACHER}=teacher")


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
@pytest.mark.parametrize("lora", [(), ("actor_rollout_ref.model.lora_rank=8",)], ids=["whole", "lora"])
def test_the_reference_workers_are_asked_for_and_no_servers(mode: str, lora: tuple[str, ...]) -> None:
    config = config_of(*HERE, *lora, f"trainer.v1.trainer_mode={mode}")
    trainer = TREE_TRAINERS[mode](config)
    trainer._init_resource_pool_mgr()
    assert set(trainer.role_worker_mapping) == set(trainer.mapping) - {Role.RewardModel} == {Role.ActorRolloutRef}
    assert issubclass(trainer.role_worker_mapping[Role.ActorRolloutRef].__ray_metadata__.modified_class, TeachingWorker)
    assert "teacher_pool" not in trainer.resource_pool_manager.resource_pool_spec
    assert (trainer.use_reference_policy, trainer.use_teacher_policy) == (True, False)
    assert trainer.get_teacher_client() is None
    assert config.distillation.enabled, "the workers are told"


def test_servers_stay_verls_own() -> None:
    config = config_of(*HERE, "distillation.nnodes=1", "distillation.n_gpus_per_node=2")
    trainer = TREE_TRAINERS["sync"](config)
    trainer._init_resource_pool_mgr()
    assert trainer.mapping[Role.TeacherModel] == "teacher_pool"
    assert (trainer.use_reference_policy, trainer.use_teacher_policy) == (False, True)


def test_servers_are_hidden_for_a_while_only() -> None:
    config = config_of(*HERE)

    def fail() -> None:
        with without_servers(config):
            assert not config.distillation.enabled
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert config.distillation.enabled
    config = config_of(*HERE, "distillation.nnodes=1")
    with without_servers(config):
        assert config.distillation.enabled


class Built:
    """verl's worker, which builds nothing."""

    ref_worker_cls: Any = "reference"

    def __init__(self, settings: DictConfig | None) -> None:
        self.distillation_config = settings

    def init_model(self) -> None:
        self.built = self.ref_worker_cls


class Worker(TeachingWorker, Built):
    """A worker with a teacher, maybe."""


def test_a_worker_builds_a_teacher_in_place_of_the_reference_model() -> None:
    settings = config_of(*HERE).distillation
    OmegaConf.resolve(settings)
    worker = Worker(settings)
    worker.init_model()
    assert worker.built.func is TeacherWorker
    (teacher,) = worker.built.keywords["distillation"].teacher_models.values()
    assert teacher.model_path == "teacher"
    for other in (None, OmegaConf.merge(settings, {"nnodes": 1}), OmegaConf.merge(settings, {"enabled": False})):
        worker = Worker(other)
        worker.init_model()
        assert worker.built == "reference"
