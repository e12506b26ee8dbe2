"""Through a real TransferQueue, the trainer gives estimators the keys, tokens and response lengths of their rows."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("verl")
os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "verl_tree.cpu.platform")

import ray
import transfer_queue as tq
from ranks_here import RanksHere
from test_replay import RowsTrainer
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_tree.launch.command.composition import compose_config
from verl_tree.trainer.rows.padding import append_padding_rows, real_rows
from verl_tree.trainer.rows.step_rows import StepRows

pytestmark = pytest.mark.e2e

# session 0:  5 6 ─┬─ 1 1        r = 1      prompt 5 6; 8 is a tool's token
#                  └─ 1 8 2 3    r = 0      1: 2 leaves, mean 1/2; group: 3 leaves, mean 2/3
# session 1:  5 6 4              r = 1
ROWS = {
    "u_0_0": ([1, 1], 1.0),
    "u_0_1": ([1, 8, 2, 3], 0.0),
    "u_1_0": ([4], 1.0),
}
EXPECTED = {
    "treerl": {
        "u_0_0": [-1 / 6 / 2**0.5, 5 / 12],
        "u_0_1": [-1 / 6 / 2**0.5, 0.0, -7 / 12, -7 / 12],
        "u_1_0": [1 / 3],
    },
    "treepo": {"u_0_0": [-1 / 6, 2 / 5], "u_0_1": [-1 / 6, 0.0, -3 / 5, -3 / 5], "u_1_0": [1 / 3]},
    # the rows say nothing of calls: from the prompt 1 1, 1 and 4 with 1, 0 and 1; 2 3 is alone in its state
    "gigpo": {"u_0_0": [7 / 12, 7 / 12], "u_0_1": [-17 / 12, 0.0, -3 / 4, -3 / 4], "u_1_0": [7 / 12]},
    "tree_grpo_intra": {"u_0_0": [3 / 4, 3 / 4], "u_0_1": [-5 / 4, 0.0, -5 / 4, -5 / 4], "u_1_0": [1 / 4]},
}


@pytest.fixture(scope="module")
def queue() -> Iterator[None]:
    """Start Ray and TransferQueue."""
    env = {"VERL_USE_EXTERNAL_MODULES": "verl_tree.cpu.platform", "TRANSFER_QUEUE_ENABLE": "1"}
    ray.init(address="local", num_cpus=4, include_dashboard=False, runtime_env={"env_vars": env})
    try:
        tq.init()
        yield
        tq.close()
    finally:
        ray.shutdown()


def store_rows() -> KVBatchMeta:
    """Store the rows, with those of session 0 apart from each other, and two padding rows."""
    keys = ["u_0_1", "u_1_0", "u_0_0"]
    rows: list[dict[str, Any]] = []
    tags = []
    for key in keys:
        response, reward = ROWS[key]
        scores = torch.zeros(len(response))
        scores[-1] = reward
        mask = torch.tensor([int(token != 8) for token in response])
        rows.append(
            {
                "prompts": torch.tensor([5, 6]),
                "responses": torch.tensor(response),
                "input_ids": torch.tensor([5, 6, *response]),
                "position_ids": torch.arange(2 + len(response)),
                "response_mask": mask,
                "loss_mask": mask,
                "rm_scores": scores,
                "rollout_log_probs": scores,
                "old_log_probs": scores,
                "ref_log_prob": scores,
                "uid": "u",
            }
        )
        tags.append({"prompt_len": 2, "response_len": len(response), "seq_len": 2 + len(response)})
    tq.kv_batch_put(keys=keys, partition_id="train", fields=list_of_dict_to_tensordict(rows), tags=tags)
    batch = KVBatchMeta(keys=keys, tags=tags, partition_id="train", fields=None, extra_info={})
    batch = append_padding_rows(batch, num_rows=2, eos_token_id=7)
    batch.reorder([3, 0, 1, 4, 2])
    return batch


@pytest.mark.usefixtures("queue")
@pytest.mark.parametrize("name", EXPECTED)
def test_advantages_of_nodes_reach_the_rows(name: str) -> None:
    overrides = ["profile=cpu", f"algorithm.adv_estimator={name}", "algorithm.norm_adv_by_std_in_grpo=false"]
    trainer = RowsTrainer(compose_config(overrides), workers=RanksHere(2))
    batch = store_rows()
    trainer._step_rows = StepRows.fetch(real_rows(batch))
    written = trainer._compute_advantage(batch, {})
    assert written.keys == batch.keys
    data = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["advantages"])
    for key, values in zip(batch.keys, data["advantages"].unbind(), strict=True):
        assert values.tolist() == pytest.approx(EXPECTED[name].get(key, [0.0]), rel=1e-6), key
    tq.kv_clear(keys=batch.keys, partition_id="train")
