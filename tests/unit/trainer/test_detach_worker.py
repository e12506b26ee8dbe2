"""The policy that is kept on the CPU while the weights move on: real engines, real optimiser steps."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

import torch
from omegaconf import OmegaConf
from verl.utils.fsdp_utils import fsdp2_sharded_save_to_cpu
from verl.workers.config import FSDPActorConfig
from verl.workers.utils.losses import ppo_loss

from verl_tree.config import FLAT_STRATEGY, TREE_STRATEGY
from verl_tree.testing.local_worker import batch_of_rows, local_worker
from verl_tree.trainer.detach_worker import TreeDetachActorWorker
from verl_tree.trainer.worker import TreeTrainingWorker


def detached(worker_model: Path, strategy: str) -> tuple[Any, TreeTrainingWorker]:
    """Return the detached worker around a training worker; in Ray, verl's `init_model` puts the one into the other."""
    actor = local_worker(str(worker_model), strategy=strategy, max_token_len=64)
    actor.set_loss_fn(partial(ppo_loss, config=FSDPActorConfig(rollout_n=1, ppo_micro_batch_size_per_gpu=1)))
    worker: Any = object.__new__(TreeDetachActorWorker)
    worker.config = OmegaConf.create({"actor": {"strategy": strategy}})
    worker._strategy_handlers, worker.actor = None, SimpleNamespace(engine=actor.engine)
    return worker, actor


def weights(worker: Any) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor().clone() for name, value in worker.actor.engine.module.named_parameters()}


def take_a_step(actor: TreeTrainingWorker) -> None:
    response = torch.tensor([4, 5, 6])
    row = {
        "prompts": torch.tensor([1, 2, 3]),
        "responses": response,
        "response_mask": torch.ones_like(response),
        "old_log_probs": torch.full((3,), -3.0),
        "advantages": torch.tensor([1.0, -2.0, 0.5]),
    }
    actor.train_batch(batch_of_rows([row], max_token_len=64, global_batch_size=1))


@pytest.mark.parametrize("strategy", [TREE_STRATEGY, FLAT_STRATEGY])
def test_a_restored_policy_is_the_saved_one_bit_by_bit(worker_model: Path, strategy: str) -> None:
    """As in `_compute_old_log_prob`: save the old policy, step, save the new one, go back to the old and to the new."""
    worker, actor = detached(worker_model, strategy)
    old = weights(worker)
    worker.save_model_to_cpu(0)
    take_a_step(actor)
    new = weights(worker)
    assert any(not torch.equal(new[name], old[name]) for name in old)

    worker.save_model_to_cpu(1)
    worker.restore_model_from_cpu(0)
    restored = weights(worker)
    assert all(torch.equal(restored[name], old[name]) for name in old)

    worker.restore_model_from_cpu(1)
    worker.clear_cpu_model(1)
    restored = weights(worker)
    assert all(torch.equal(restored[name], new[name]) for name in new)
    take_a_step(actor)
    worker.restore_model_from_cpu(0)
    assert all(torch.equal(value, old[name]) for name, value in weights(worker).items())


def test_what_verl_saves_on_a_cpu_changes_with_the_model(worker_model: Path) -> None:
    """If this fails, verl copies by itself and `copy_to_cpu` can go."""
    worker, actor = detached(worker_model, TREE_STRATEGY)
    old = weights(worker)
    state, _ = fsdp2_sharded_save_to_cpu(worker.actor.engine.module)
    take_a_step(actor)
    assert any(not torch.equal(state[name][0], old[name]) for name in old)
