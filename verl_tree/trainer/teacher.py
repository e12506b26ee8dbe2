"""A teacher on the ranks of training: verl's distillation without servers.

verl 0.9.1 has the teacher on servers of its own (`distillation.nnodes` x `n_gpus_per_node`), which compute one row
after another. With `distillation.nnodes=0`, verl's default that verl refuses, the teacher has no machines here: its
model is that of the reference workers. They compute the rows of a step as a forest, as the policy does, and write the
columns that verl's servers would.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from typing_extensions import override
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import DistillationConfig, HFModelConfig, TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker

from verl_tree.config import teaches_on_ranks
from verl_tree.engine.losses.top_k import LOG_PROBS, READING, TeacherTopK
from verl_tree.engine.rows.columns import jagged
from verl_tree.trainer.worker import TreeTrainingWorker


class TeacherWorker(TreeTrainingWorker):
    """A reference worker whose model is the teacher of `distillation`; `config` is that of a reference worker."""

    def __init__(self, config: TrainingWorkerConfig, *, distillation: DistillationConfig) -> None:
        (teacher,) = distillation.teacher_models.values()
        student, loss = config.model_config, distillation.distillation_loss
        model = HFModelConfig(
            path=str(teacher.model_path),
            load_tokenizer=False,
            trust_remote_code=student.trust_remote_code,
            external_lib=student.external_lib,
            use_shm=student.use_shm,
            use_remove_padding=student.use_remove_padding,
            override_config={
                name: value for name, value in student.override_config.items() if name == "attn_implementation"
            },
        )
        super().__init__(dataclasses.replace(config, model_config=model))
        self._path, self._num_ids = teacher.model_path, _num_ids(model)
        self._top_k: TeacherTopK | None = None
        if loss.loss_settings.use_topk:
            self._top_k = TeacherTopK(loss.topk, min(self._num_ids, _num_ids(student)))

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    @override
    def infer_batch(self, data: TensorDict) -> TensorDict | None:
        """Return what the teacher says about rows: verl's columns of it, jagged (B, j, 1) or (B, j, k).

        Raises:
            ValueError: A row has a token that the teacher does not know.
        """
        largest = int(jagged(data["input_ids"])[0].max())
        if largest >= self._num_ids:
            raise ValueError(
                f"distillation.teacher_models: {self._path} knows {self._num_ids} tokens, and a row has the token "
                f"{largest}: give a teacher with the student's tokenizer"
            )
        # As verl's servers compute: the rollout's temperature is the student's.
        tu.assign_non_tensor(data, temperature=1.0)
        if self._top_k is not None:
            tu.assign_non_tensor(data, **{READING: self._top_k})
        output = super().infer_batch(data)
        if output is None:
            return None
        log_probs, offsets = jagged(output.pop("log_probs"))
        made = {LOG_PROBS: torch.nested.nested_tensor_from_jagged(log_probs.unsqueeze(-1), offsets)}
        output.update(made if self._top_k is None else self._top_k.columns(output))
        return output


class TeachingWorker:
    """What a worker needs to have a teacher for its reference model; put before verl's worker class."""

    config: DictConfig
    distillation_config: DictConfig | None
    ref_worker_cls: Callable[..., TrainingWorker]

    @register(dispatch_mode=Dispatch["ONE_TO_ALL"])
    def init_model(self) -> None:
        """Build the models; see `ActorRolloutRefWorker.init_model`."""
        settings = self.distillation_config
        if settings is not None and teaches_on_ranks(settings):
            self.ref_worker_cls = partial(TeacherWorker, distillation=omega_conf_to_dataclass(settings))
        super().init_model()  # type: ignore[misc]


class TeacherOnRanks(PPOTrainer):
    """verl's trainer, whose reference workers may be teachers."""

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        if self._teaches:
            # Workers compute the reference model's log-probs in a step, and there are no servers to start.
            self.use_reference_policy, self.use_teacher_policy = True, False

    @property
    def _teaches(self) -> bool:
        return teaches_on_ranks(self.config.distillation)

    @override
    def _init_resource_pool_mgr(self) -> None:
        with without_servers(self.config):
            super()._init_resource_pool_mgr()
        if self._teaches:
            # verl has a reference model only for a KL term.
            for roles in (self.role_worker_mapping, self.mapping):
                roles[Role.ActorRolloutRef] = roles.pop(Role.ActorRollout)

    @override
    def _setup(self) -> None:
        super()._setup()
        if self._teaches:
            # verl tells the workers by it how to distil.
            self.distillation_config = omega_conf_to_dataclass(self.config.distillation)


@contextmanager
def without_servers(config: DictConfig) -> Iterator[None]:
    """Let what verl does for a teacher's servers not be done while active, if it has none."""
    enabled = config.distillation.enabled
    if teaches_on_ranks(config.distillation):
        config.distillation.enabled = False
    try:
        yield
    finally:
        config.distillation.enabled = enabled


def _num_ids(model: Any) -> int:
    return model.hf_config.get_text_config(decoder=True).vocab_size
