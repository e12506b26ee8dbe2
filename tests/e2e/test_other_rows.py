"""Rows of other agent loop managers train as trees: a real TransferQueue, our trainer's whole step, a real worker."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from process_groups import group_of_one
from tiny_models import tiny_model

pytest.importorskip("verl")
os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "verl_tree.cpu.platform")

import transfer_queue as tq
from other_rows import KEYS, write_uni_agent_rows, write_verl_rows
from ranks_here import RanksHere
from scripted_llm import tokenizer
from transfer_queue import KVBatchMeta
from verl.workers.config import FSDPActorConfig, FSDPOptimizerConfig
from verl.workers.utils.losses import ppo_loss

from verl_tree.launch.command.composition import compose_config
from verl_tree.records import read_trees
from verl_tree.testing.local_worker import local_worker
from verl_tree.trainer.modes import TreePPOTrainerSync
from verl_tree.trainer.rows.padding import real_rows
from verl_tree.trainer.rows.step_tokens import fetch_trees

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.usefixtures("queue")]

WRITERS = {"uni_agent": write_uni_agent_rows, "verl": partial(write_verl_rows, tokenizer=tokenizer())}
# Advantages of the leaves a0, a0, a1, a1, b0, b0, b1; a1 is masked. verl's worker gives all leaves of b0 the last
# one's reward of 0.75. verl's estimator compares the last leaves of the sessions and copies the result.
ADVANTAGES = {
    # Sessions of b: 0.5 and 1, mean 0.75.
    ("uni_agent", "tree_grpo"): [0.5, 0.5, 0.0, 0.0, -0.5, 0.0, 0.25],
    # Last leaves of b: 0.75 and 1, mean 0.875.
    ("uni_agent", "grpo"): [0.5, 0.5, 0.0, 0.0, -0.125, -0.125, 0.125],
    ("verl", "tree_grpo"): [0.5, 0.5, -0.5, -0.5, -0.125, -0.125, 0.125],
    ("verl", "grpo"): [0.5, 0.5, -0.5, -0.5, -0.125, -0.125, 0.125],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Save a model, and make this process a group of its own."""
    folder = tmp_path_factory.mktemp("other_rows")
    tiny_model(size="engine", tie_word_embeddings=True).save_pretrained(folder)
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with pytest.MonkeyPatch.context() as patch, group_of_one():
        for name, value in variables.items():  # what verl's workers read
            patch.setenv(name, value)
        yield folder


@pytest.fixture(params=WRITERS)
def writer(request: pytest.FixtureRequest) -> str:
    """Write the rows."""
    WRITERS[request.param]()
    return request.param


class OneWorker(RanksHere):
    """A worker group of one worker in this process; the trainer may take it for several ranks."""

    def __init__(self, folder: Path, *, is_tree: bool, num_ranks: int = 1) -> None:
        super().__init__(num_ranks)
        self._dispatch_info = {"actor": list(range(num_ranks))}
        sgd = FSDPOptimizerConfig(
            lr=0.1, optimizer="SGD", clip_grad=1e9, override_optimizer_config={}, total_training_steps=10
        )
        strategy = "fsdp_tree" if is_tree else "fsdp2"
        self.worker = local_worker(str(folder), strategy=strategy, max_token_len=64, optimizer=sgd)
        actor = FSDPActorConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=1, rollout_n=1)
        self.worker.set_loss_fn(partial(ppo_loss, config=actor))

    def compute_log_prob(self, batch: KVBatchMeta) -> Any:
        """Write log-probs and entropy to the rows."""
        return self.worker.infer_batch(batch)

    def update_actor(self, batch: KVBatchMeta) -> Any:
        """Take the planned optimiser steps."""
        return self.worker.train_mini_batch(batch)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the whole parameters."""
        named = self.worker.engine.module.named_parameters()
        return {name: parameter.full_tensor().detach().clone() for name, parameter in named}


class OtherRowsTrainer(TreePPOTrainerSync):
    """Our trainer at its first step, without rollout; its manager is not ours."""

    def __init__(self, *overrides: str, workers: OneWorker) -> None:
        sizes = ["data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=1"]
        names = ["profile=cpu", "actor_rollout_ref.model.path=unused", "algorithm.norm_adv_by_std_in_grpo=false"]
        no_guard = "tree.log_prob_tolerance=null"  # the log-probs of the rows are made up
        super().__init__(compose_config([*names, *sizes, no_guard, *overrides]))
        self.global_steps = self.total_training_steps = 1
        self.actor_rollout_wg, self.tokenizer = workers, tokenizer()
        self.agent_loop_manager = None
        self.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
        self.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
        self.logger = SimpleNamespace(logger={})

    def prepare_step(self) -> dict[str, float]:
        """Submit no prompts: the rows are there."""
        return {}

    def on_sample_end(self) -> None:
        """Put no rollout to sleep."""


def columns_of(batch: KVBatchMeta, name: str) -> dict[str, torch.Tensor]:
    """Read one column of all rows but padding, by row key."""
    keys = real_rows(batch).keys
    columns = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=[name])
    return dict(zip(keys, columns[name].unbind(), strict=True))


def is_close(left: Any, right: Any) -> bool:
    """Whether two dictionaries of tensors are equal up to rounding."""
    torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
    return True


def test_a_step_on_trees_is_the_step_on_flat_rows(folder: Path, writer: str) -> None:
    sides = []
    for is_tree in (True, False):
        workers = OneWorker(folder, is_tree=is_tree)
        before = workers.parameters()
        trainer = OtherRowsTrainer(f"tree.enabled={is_tree}", workers=workers)
        metrics: dict[str, float] = {}
        batch = trainer.step(metrics, {"update_actor": 1.0})
        masks, log_probs = columns_of(batch, "response_mask"), columns_of(batch, "old_log_probs")
        assert sorted(masks) == KEYS
        sides.append(({key: log_probs[key] * masks[key] for key in KEYS}, workers.parameters(), metrics))
        assert max((sides[-1][1][name] - before[name]).abs().max().item() for name in before) > 1e-3
        trainer._compute_metrics(batch, metrics, {"step": 1.0, "update_actor": 1.0}, global_steps=1, epoch=0)
        assert metrics["training/num_turns/mean"] == 2
        tq.kv_clear(keys=batch.keys, partition_id="train")
        WRITERS[writer]()
    (log_probs, parameters, metrics), (flat_log_probs, flat_parameters, _) = sides
    assert is_close(log_probs, flat_log_probs)
    assert is_close(parameters, flat_parameters)
    assert (metrics["tree/sessions"], metrics["tree/leaves_per_session"]) == (4, 7 / 4)
    # a: 7 + 5 tokens in two leaves and 8 + 7 in those that uni-agent masked; b: 4, 6 and 4.
    is_masked = writer == "uni_agent"
    # Of uni-agent's rows one of b earned the mean, and the update leaves it out.
    assert metrics["tree/leaves"] == (4 if is_masked else 7)
    assert metrics["tree/flat_tokens"] == (7 + 8 + 8 if is_masked else 7 + 8 + 15 + 14)


@pytest.mark.parametrize("estimator", ["tree_grpo", "grpo"])
def test_advantages_and_stored_trees(folder: Path, writer: str, estimator: str, tmp_path: Path) -> None:
    """Two ranks, so there is padding; nothing but the advantages is computed."""
    trainer = OtherRowsTrainer(
        f"algorithm.adv_estimator={estimator}",
        f"tree.dump_dir={tmp_path}",
        "tree.show_every=1",
        "trainer.test_freq=-1",
        workers=OneWorker(folder, is_tree=True, num_ranks=2),
    )
    sampled, _ = trainer.replay_buffer.sample(global_steps=1, partition_id="train", batch_size=2)
    batch = trainer._balance_batch(sampled, {})
    assert len(batch) > len(KEYS), "padding rows"
    tq.kv_batch_put(
        keys=batch.keys,
        partition_id="train",
        fields=tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["rollout_log_probs"]).rename_key_(
            "rollout_log_probs", "old_log_probs"
        ),
    )
    batch = trainer._compute_advantage(batch, {})
    advantages, masks = columns_of(batch, "advantages"), columns_of(batch, "response_mask")
    for key, expected in zip(KEYS, ADVANTAGES[writer, estimator], strict=True):
        assert advantages[key].tolist() == pytest.approx([expected * bit for bit in masks[key].tolist()]), key

    when = trainer._when(is_validation=False)
    trainer._log_trees(fetch_trees(real_rows(batch), step=1), when)
    trainer._tree_log.files.wait()
    trees = read_trees(tmp_path / "step_000001.parquet")
    assert [len(tree.leaves) for tree in trees] == [4, 3]
    rewards = [leaf.reward for tree in trees for leaf in tree.leaves]
    assert rewards == [1.0, 1.0, 0.0, 0.0, 0.25 if writer == "uni_agent" else 0.75, 0.75, 1.0]
    assert [leaf.reward_extra_info["acc"] for tree in trees for leaf in tree.leaves] == rewards
    assert [leaf.calls for tree in trees for leaf in tree.leaves] == [()] * 7
    pages = sorted(tmp_path.glob("*.html"))
    assert [page.name for page in pages] == ["step_000001_0.html", "step_000001_1.html"]


def test_padding_imitates_the_rows_and_changes_no_log_prob(folder: Path, writer: str) -> None:
    outputs = []
    for is_tree in (True, False):
        trainer = OtherRowsTrainer(workers=OneWorker(folder, is_tree=is_tree, num_ranks=2))
        sampled, _ = trainer.replay_buffer.sample(global_steps=1, partition_id="train", batch_size=2)
        batch = trainer._balance_batch(sampled, {})
        positions = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["position_ids"])
        assert {each.dim() for each in positions["position_ids"].unbind()} == {1 if writer == "uni_agent" else 2}
        trainer._compute_old_log_prob(batch, {})
        masks, log_probs = columns_of(batch, "response_mask"), columns_of(batch, "old_log_probs")
        outputs.append({key: log_probs[key] * masks[key] for key in KEYS})
        tq.kv_clear(keys=batch.keys, partition_id="train")
        WRITERS[writer]()
    assert is_close(*outputs)


@pytest.mark.usefixtures("writer")
@pytest.mark.parametrize("name", ["num_turns", "rollout_log_probs"])
def test_a_row_without_a_field_is_named(folder: Path, name: str) -> None:
    trainer = OtherRowsTrainer(workers=OneWorker(folder, is_tree=True))
    batch, _ = trainer.replay_buffer.sample(global_steps=1, partition_id="train", batch_size=2)
    key = KEYS[2]
    row = tq.kv_batch_get(keys=[key], partition_id="train")
    tq.kv_clear(keys=[key], partition_id="train")
    tag = batch.tags[batch.keys.index(key)]
    tq.kv_batch_put(keys=[key], partition_id="train", fields=row.exclude(name), tags=[tag])
    with pytest.raises(ValueError, match=rf"row {key} has no field {name} \("):
        trainer._balance_batch(batch, {})


@pytest.mark.usefixtures("writer")
@pytest.mark.parametrize("writer", ["uni_agent"], indirect=True)
def test_a_row_without_a_weight_version_is_named(folder: Path) -> None:
    trainer = OtherRowsTrainer(workers=OneWorker(folder, is_tree=True))
    batch, _ = trainer.replay_buffer.sample(global_steps=1, partition_id="train", batch_size=2)
    key = batch.keys[1]
    batch.tags[1]["min_global_steps"] = None
    with pytest.raises(ValueError, match=rf"row {key}: the tag min_global_steps is None and must be an integer"):
        trainer._balance_batch(batch, {})
