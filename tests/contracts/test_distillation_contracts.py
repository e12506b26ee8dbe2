"""verl 0.9.1 as distillation on trees relies on it: its loss on logits, its teachers, and where a trainer has them."""

import inspect
from functools import partial
from typing import Any

import pytest
import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, AgentLoopWorker
from verl.experimental.teacher_loop.teacher_manager import _get_teacher_sampling_params
from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk
from verl.trainer.main_ppo import TaskRunnerV1
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import DistillationConfig, DistillationLossConfig
from verl.workers.engine_workers import ActorRolloutRefWorker

from verl_tree.engine.losses.top_k import StudentTopK
from verl_tree.launch.command.composition import compose_config

SETTINGS = DistillationConfig(
    distillation_loss=DistillationLossConfig(loss_mode="forward_kl_topk", topk=3, use_policy_gradient=False)
)


def kinds_of(logits: torch.Tensor, log_probs: torch.Tensor, ids: torch.Tensor) -> dict[str, Any]:
    as_row = partial(torch.nested.nested_tensor_from_jagged, offsets=torch.tensor([0, len(ids)]))
    return compute_forward_kl_topk(logits[None], as_row(log_probs), as_row(ids), config=SETTINGS, data_format="thd")


def test_the_loss_on_logits_treats_every_position_by_itself() -> None:
    """So it can be computed chunk by chunk, and of positions that several rows share once."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 11, generator=generator)
    top = torch.randn(7, 11, generator=generator).log_softmax(-1).topk(3)
    whole = kinds_of(logits, *top)
    assert tuple(whole) == StudentTopK.KINDS
    parts = [kinds_of(logits[part], top.values[part], top.indices[part]) for part in (slice(0, 2), slice(2, 7))]
    for name, values in whole.items():
        assert values.shape == (1, 7)
        assert torch.equal(values, torch.cat([part[name] for part in parts], dim=1)), name
    # By hand, of the first position: the teacher's probability times the difference of log-probs, over its three ids.
    log_q = logits[0].log_softmax(-1)[top.indices[0]]
    want = (top.values[0].exp() * (top.values[0] - log_q)).sum()
    assert whole["distillation_losses"][0, 0].item() == pytest.approx(want.item(), rel=1e-5)


def test_the_teacher_knows_no_temperature() -> None:
    config = compose_config(
        ["profile=cpu", "actor_rollout_ref.model.path=a", "actor_rollout_ref.rollout.temperature=2"]
    )
    settings = omega_conf_to_dataclass(config.distillation)
    (teacher,) = [omega_conf_to_dataclass(each) for each in config.distillation.teacher_models.values()]
    assert teacher.inference.temperature == 2
    assert _get_teacher_sampling_params(teacher, settings.distillation_loss)["temperature"] == 1.0


def test_no_machines_are_verls_default_and_its_trainer_refuses_them() -> None:
    config = compose_config(["profile=cpu", "actor_rollout_ref.model.path=a", "distillation.enabled=true"])
    assert config.distillation.nnodes == 0
    config.distillation.teacher_models.teacher_model.model_path = "a"
    assert list(omega_conf_to_dataclass(config.distillation).teacher_models) == ["default"]
    trainer = object.__new__(PPOTrainerSync)
    trainer.config = config
    with pytest.raises(ValueError, match=r"distillation\.nnodes must be greater than 0"):
        PPOTrainer._init_resource_pool_mgr(trainer)


def test_where_a_trainer_looks_for_reference_workers_and_teachers() -> None:
    made, setup = inspect.getsource(PPOTrainer.__init__), inspect.getsource(PPOTrainer._setup)
    assert "self.use_reference_policy = need_reference_policy(self.config)" in made
    assert "self.use_teacher_policy = need_teacher_policy(self.config)" in made
    assert 'distillation_config=self.config.get("distillation")' in setup
    assert "if self.use_teacher_policy:" in setup
    assert "self.distillation_config = None" in setup
    assert "elif Role.ActorRolloutRef in self.role_worker_mapping:" in setup
    assert "if self.use_reference_policy:" in inspect.getsource(PPOTrainer._step_once)
    assert "self.distillation_config.distillation_loss" in inspect.getsource(PPOTrainer._update_actor)
    assert "config=self.config" in inspect.getsource(
        TaskRunnerV1.__ray_metadata__.modified_class.init_agent_loop_manager
    )


def test_workers_build_the_reference_model_by_an_attribute_and_compute_it_without_routes() -> None:
    source = inspect.getsource(ActorRolloutRefWorker.init_model)
    assert "self.ref = self.ref_worker_cls(config=ref_training_config)" in source
    assert "self.distillation_config = distillation_config" in inspect.getsource(ActorRolloutRefWorker.__init__)
    assert "self.ref.infer_batch(data=data)" in inspect.getsource(ActorRolloutRefWorker.compute_ref_log_prob)


def test_a_teacher_is_asked_about_one_row_and_its_answer_becomes_columns() -> None:
    names = ["self", "output", "prompt_ids", "response_ids", "validate", "sample_kwargs"]
    assert list(inspect.signature(AgentLoopWorker._compute_teacher_logprobs).parameters)[: len(names)] == names
    written = inspect.getsource(AgentLoopWorkerTQ.__ray_metadata__.modified_class._agent_loop_postprocess)
    assert "final_output = outputs[-1]" in written
    assert written.count("_compute_teacher_logprobs(") == 1
    row = AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], metrics=AgentLoopMetrics())
    row.extra_fields |= {"teacher_ids": torch.ones(2, 1), "teacher_logprobs": torch.zeros(2, 1)}
    assert {"teacher_ids", "teacher_logprobs"} < row.as_dict().keys()
