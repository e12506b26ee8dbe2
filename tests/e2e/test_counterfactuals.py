"""`tree_counterfactual` with the real queue: turns are owed what transformers says of rows without them."""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("verl")

import transfer_queue as tq
from ranks_here import RanksHere
from test_portions import columns_of, draw_row, put, trainer_of
from tiny_models import tiny_model
from transfer_queue import KVBatchMeta
from transformers import PreTrainedModel
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_tree.trainer.portions.counterfactuals import PARTITION
from verl_tree.trainer.rows.padding import real_rows
from verl_tree.trainer.rows.step_rows import StepRows

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.usefixtures("queue")]

NOTE, OTHER_NOTE = [20, 21, 22, 23, 24], [20, 21, 22, 25, 26]
ROWS = {
    "u_0_0": ([5, 6], NOTE, 1.0),
    "u_0_1": ([5, 6, 40, *NOTE[:4], 41], [30, 8, 31, 32], 1.0),
    "u_1_0": ([5, 6], OTHER_NOTE, 0.0),
    "u_1_1": ([5, 6, 40, *OTHER_NOTE[:4], 41], [33, 8, 8, 35], 0.0),
    "u_2_0": ([5, 6], [36], 0.0),
    "v_0_0": ([7, 6], [30, 8, 31], 0.0),
    "v_1_0": ([7, 6], [30, 8, 32], 0.0),
    "w_0_0": ([7, 6], [8], 0.0),
    "w_1_0": ([7, 6], [8], 1.0),
}
"""Prompt, response (8 is a tool's token) and reward. Session 0 of u has the right answer, v and w teach nothing."""

ASKED = {
    "u_0_0": {(0, 5): ([5, 6, 40, *NOTE[:4], 41, 30, 8], [5, 6, 40, 41, 30, 8])},
    "u_0_1": {(0, 1): ([5, 6, 40, *NOTE[:4], 41, 30, 8], [5, 6, 40, *NOTE[:4], 41])},
    "u_1_0": {(0, 5): ([5, 6, 40, *OTHER_NOTE[:4], 41, 33, 8, 8], [5, 6, 40, 41, 33, 8, 8])},
    "u_1_1": {(0, 1): ([5, 6, 40, *OTHER_NOTE[:4], 41, 33, 8, 8], [5, 6, 40, *OTHER_NOTE[:4], 41])},
}
"""By row, which tokens of the response are credited, and the contexts with and without what these brought."""


def log_probs_of(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Return the log-prob of each next token, (L,), 0 behind the last one; as verl's engines give it."""
    ids = torch.tensor(tokens)[None]
    with torch.no_grad():
        found = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return torch.cat([found, found.new_zeros(1)])


class Policy(RanksHere):
    """Ranks whose policy is a small model in float64."""

    def __init__(self, num_ranks: int, model: PreTrainedModel) -> None:
        super().__init__(num_ranks)
        self.model, self.asked = model, 0

    def compute_log_prob(self, batch: KVBatchMeta) -> None:
        assert batch.extra_info["temperature"] == 1.0
        assert len(batch) % self.world_size == 0
        self.asked = len(batch)
        columns = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["input_ids"])
        rows = [log_probs_of(self.model, row.tolist()) for row in columns["input_ids"].unbind(dim=0)]
        fields = list_of_dict_to_tensordict([{"log_probs": row} for row in rows])
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)


def test_turns_are_owed_what_the_right_answer_loses_without_them() -> None:
    options = ("algorithm.adv_estimator=tree_counterfactual", "algorithm.norm_adv_by_std_in_grpo=false")
    trainer = trainer_of(*options, num_ranks=4)
    model = tiny_model("qwen3").double()
    trainer.actor_rollout_wg = policy = Policy(4, model)
    trainer.global_steps, trainer.total_training_steps = 2, 4
    rows: dict[str, dict[str, Any]] = {}
    tags = []
    for key, (prompt, response, reward) in ROWS.items():
        tokens, scores = torch.tensor(response), torch.zeros(len(response))
        scores[-1] = reward
        mask = (tokens != 8).long()
        row = draw_row(key, np.random.default_rng(0))
        row |= dict.fromkeys(("rollout_log_probs", "old_log_probs", "ref_log_prob", "rm_scores"), scores)
        row |= {"prompts": torch.tensor(prompt), "responses": tokens, "response_mask": mask, "loss_mask": mask}
        rows[key] = row | {"input_ids": torch.tensor([*prompt, *response])}
        tags.append({"prompt_len": len(prompt), "response_len": len(response), "seq_len": len(prompt) + len(response)})
    batch = put(rows, tags)
    trainer._step_rows = StepRows.fetch(real_rows(batch))
    metrics: dict[str, float] = {}
    trainer._compute_advantage(batch, metrics)
    assert metrics["tree/counterfactuals"] == 6
    assert policy.asked == 8, "with padding"
    assert not (tq.kv_list(PARTITION) or {}).get(PARTITION)
    right = [31, 32]
    advantage = {"u_0": 2 / 3, "u_1": -1 / 3, "u_2": -1 / 3, "v_0": 0.0, "v_1": 0.0, "w_0": -0.5, "w_1": 0.5}
    for key, values in zip(batch.keys, columns_of(batch, "advantages")["advantages"], strict=True):
        if key not in ROWS:
            continue
        response = ROWS[key][1]
        expected = np.full(len(response), advantage[key[:3]])
        for (start, end), contexts in ASKED.get(key, {}).items():
            whole, without = (float(log_probs_of(model, [*each, *right])[-3:-1].sum()) for each in contexts)
            assert abs(whole - without) > 1e-3, "the turn matters"
            expected[start:end] += 3 / 4 * abs(advantage[key[:3]]) * np.tanh(whole - without)
        assert values == pytest.approx((expected * (np.array(response) != 8)).tolist(), rel=1e-6), key
