"""Rows that other agent loop managers write train as trees: through a real TransferQueue, our trainer and a worker."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("verl")
os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "verl_tree.cpu.platform")

import ray
import transfer_queue as tq
from engine_cases import save_model
from other_rows import REWARDS, write_uni_agent_rows, write_verl_rows
from scripted_llm import tokenizer
from test_replay import RowsTrainer
from transfer_queue import KVBatchMeta
from verl.workers.config import FSDPActorConfig, FSDPOptimizerConfig
from verl.workers.utils.losses import ppo_loss

from verl_tree.launch.composition import compose_config
from verl_tree.testing.local_worker import local_worker
from verl_tree.trainer.padding import real_rows
from verl_tree.trainer.worker import TreeTrainingWorker

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

WRITERS = {"uni_agent": write_uni_agent_rows, "verl": partial(write_verl_rows, tokenizer=tokenizer())}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Start Ray and TransferQueue, make a process group of this process alone, and save a model."""
    folder = tmp_path_factory.mktemp("other_rows")
    save_model(folder, tied=True)
    env = {"VERL_USE_EXTERNAL_MODULES": "verl_tree.cpu.platform", "TRANSFER_QUEUE_ENABLE": "1"}
    ray.init(address="local", num_cpus=4, include_dashboard=False, runtime_env={"env_vars": env})
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
    variables = pytest.MonkeyPatch()  # what verl's workers read
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        variables.setenv(name, value)
    try:
        tq.init()
        yield folder
        tq.close()
    finally:
        variables.undo()
        dist.destroy_process_group()
        ray.shutdown()


class OneWorker:
    """A worker group of the one worker in this process."""

    def __init__(self, folder: Path, *, strategy: str) -> None:
        self._dispatch_info = {"actor": [0]}
        self.worker: TreeTrainingWorker = local_worker(
            str(folder),
            strategy=strategy,
            max_token_len=64,
            optimizer=FSDPOptimizerConfig(
                lr=0.1, optimizer="SGD", clip_grad=1e9, override_optimizer_config={}, total_training_steps=10
            ),
        )
        actor = FSDPActorConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=1, rollout_n=1)
        self.worker.set_loss_fn(partial(ppo_loss, config=actor))

    def compute_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        return self.worker.infer_batch(batch)

    def update_actor(self, batch: KVBatchMeta) -> Any:
        return self.worker.train_mini_batch(batch)


class WholeTrainer(RowsTrainer):
    """Our trainer with one worker in this process, and without rollout."""

    def __init__(self, *overrides: str, group: OneWorker) -> None:
        sizes = ["data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=1"]
        super().__init__(compose_config(["profile=cpu", *sizes, *overrides]), workers=group)
        self.total_training_steps = 1

    def step_on(self, batch: KVBatchMeta) -> tuple[KVBatchMeta, dict[str, float]]:
        """Train on the rows, as `_step_once` does."""
        metrics: dict[str, float] = {}
        batch = self._balance_batch(batch, metrics)
        batch = self._compute_old_log_prob(batch, metrics)
        batch = self._compute_advantage(batch, metrics)
        return self._update_actor(batch, metrics), metrics


def fields_of(batch: KVBatchMeta, name: str) -> dict[str, torch.Tensor]:
    """Read one column by row key."""
    columns = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=[name])
    return dict(zip(batch.keys, columns[name].unbind(), strict=True))


@pytest.fixture
def clean_queue() -> Iterator[None]:
    """Clear the rows of a test."""
    yield
    left = tq.kv_list(partition_id="train").get("train", {})
    if left:
        tq.kv_clear(keys=list(left), partition_id="train")


@pytest.mark.usefixtures("clean_queue")
@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_rows_train_as_trees_and_as_flat_rows(folder: Path, writer: Callable[[], KVBatchMeta]) -> None:
    results = {}
    for strategy, is_tree in (("fsdp_tree", True), ("fsdp2", False)):
        trainer = WholeTrainer(f"tree.enabled={is_tree}", group=OneWorker(folder, strategy=strategy))
        batch, metrics = trainer.step_on(writer())
        old = fields_of(real_rows(batch), "old_log_probs")
        masks = fields_of(real_rows(batch), "response_mask")
        parameters = dict(trainer.actor_rollout_wg.worker.engine.module.named_parameters())
        results[strategy] = (
            {key: (value * masks[key]) for key, value in old.items()},
            {name: value.full_tensor().detach().clone() for name, value in parameters.items()},
            metrics,
        )
        tq.kv_clear(keys=batch.keys, partition_id="train")
    (tree_log_probs, tree_parameters, metrics), (flat_log_probs, flat_parameters, _) = results.values()
    print(metrics)
    assert tree_log_probs.keys() == flat_log_probs.keys() == REWARDS.keys()
    for key, value in flat_log_probs.items():
        torch.testing.assert_close(tree_log_probs[key], value, rtol=1e-5, atol=1e-6)
    for name, value in flat_parameters.items():
        torch.testing.assert_close(tree_parameters[name], value, rtol=1e-5, atol=1e-6)
