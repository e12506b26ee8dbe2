"""A checkpoint of the tree engine: AdamW goes on as if nothing had happened, bit by bit."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import torch
from test_detach_worker import take_a_step
from verl.workers.config import FSDPActorConfig
from verl.workers.utils.losses import ppo_loss

from verl_tree.config import TREE_STRATEGY
from verl_tree.testing.local_worker import local_worker


def make_worker(model: Path) -> Any:
    """Make a worker with AdamW."""
    worker = local_worker(str(model), strategy=TREE_STRATEGY, max_token_len=64)
    worker.set_loss_fn(partial(ppo_loss, config=FSDPActorConfig(rollout_n=1, ppo_micro_batch_size_per_gpu=1)))
    return worker


def weights(worker: Any) -> dict[str, torch.Tensor]:
    """Copy the whole parameters."""
    return {name: value.full_tensor().clone() for name, value in worker.engine.module.named_parameters()}


def test_a_loaded_checkpoint_takes_the_same_step(worker_model: Path, tmp_path: Path) -> None:
    first = make_worker(worker_model)
    for _ in range(2):
        take_a_step(first)
    first.save_checkpoint(str(tmp_path), global_step=2)
    saved = weights(first)
    take_a_step(first)

    second = make_worker(worker_model)
    second.load_checkpoint(str(tmp_path))
    loaded = weights(second)
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())
    take_a_step(second)
    stepped = weights(second)
    assert all(torch.equal(stepped[name], value) for name, value in weights(first).items())
    # Guards the comparison: the same weights without the moments of AdamW take another step.
    second.load_checkpoint(str(tmp_path))
    second.engine.optimizer.state.clear()
    take_a_step(second)
    assert any(not torch.equal(stepped[name], value) for name, value in weights(second).items())
