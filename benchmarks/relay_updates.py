"""The gradients of one update, computed in the ways that `relay.py` compares.

Relayed trees and packs take the engine's way from rows to gradients, but for FSDP: micro-batches, model calls, jagged
rows, verl's PPO loss. Flat rows run one after another with transformers' causal SDPA and `model(input_ids).logits`, as
verl's own engine computes them.
"""

import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig
from verl.workers.utils.losses import ppo_loss

import verl_tree.cpu.platform  # noqa: F401  (the CPU platform)
from verl_tree.attention.hf import ATTENTION_NAME
from verl_tree.cost.model import CostModel
from verl_tree.engine.rows.micro_batch import MicroBatchRows
from verl_tree.engine.rows.packs import TreeMicroBatch, lay_out_relayed, lay_out_tree
from verl_tree.engine.rows.read_rows import ReadRows
from verl_tree.functional.relayed import call_scores
from verl_tree.packing import pack
from verl_tree.relay.calls import RelayCall
from verl_tree.relay.run import RelayRun
from verl_tree.testing.local_worker import batch_of_rows
from verl_tree.tree.nodes import IntArray
from verl_tree.tree.plan import AttentionPlan

CPU = torch.device("cpu")


class Update:
    """The gradients of a model for the rows of one forest; all add to the parameters' `grad`.

    The first `prompt_len` tokens of every row are the prompt. The loss is on all others.
    """

    def __init__(self, model: PreTrainedModel, sequences: Sequence[np.ndarray], *, prompt_len: int) -> None:
        self._model = model
        self._data = _batch(sequences, prompt_len=prompt_len, vocab_size=model.config.vocab_size)
        lens = np.array([len(sequence) for sequence in sequences])
        self.read = ReadRows.from_batch(
            np.concatenate(sequences),
            offsets=np.concatenate([[0], np.cumsum(lens)]),
            trained=np.concatenate([np.arange(length) >= prompt_len for length in lens]),
        )
        actor = FSDPActorConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=1, rollout_n=1)
        self._loss = partial(ppo_loss, actor)

    def lay_out_packs(self, capacity: int | None = None) -> list[TreeMicroBatch]:
        """Lay out the rows as packs; without a capacity as one."""
        return [lay_out_tree(self.read, part.leaves) for part in pack(self.read.forest, capacity=capacity).packs]

    def lay_out_relayed(self, capacity: int) -> list[TreeMicroBatch]:
        """Lay out the rows as one forest in sections."""
        every = self.read.forest.order
        return [lay_out_relayed(self.read, every, capacity=capacity, cost_model=CostModel.prior())]

    def run(self, micro_batches: Sequence[TreeMicroBatch], *, store_on_host: bool = False) -> list[float]:
        """Add the gradients of micro-batches; return the processor seconds of each."""
        self._model.set_attn_implementation(ATTENTION_NAME)
        seconds = []
        for micro in micro_batches:
            started_s = time.process_time()
            self._run_one(micro, store_on_host=store_on_host)
            seconds.append(time.process_time() - started_s)
        return seconds

    def run_flat(self) -> None:
        """Add the gradients of one row after another."""
        self._model.set_attn_implementation("sdpa")
        for number in range(len(self._data)):
            rows = tu.index_select_tensor_dict(self._data, torch.tensor([number]))
            token_ids = rows["input_ids"].values()
            log_probs = self._model(input_ids=token_ids[None], use_cache=False).logits[0].log_softmax(-1)
            # verl keeps a token's score one position earlier.
            scores = pad(log_probs[:-1].gather(-1, token_ids[1:, None]).squeeze(-1), (0, 1))
            jagged = torch.nested.nested_tensor_from_jagged(scores, rows["input_ids"].offsets())
            self._loss({"log_probs": jagged}, rows)[0].backward()

    def _run_one(self, micro: TreeMicroBatch, *, store_on_host: bool) -> None:
        rows = MicroBatchRows(micro, self._data, names=("log_probs",), shift=-1)

        def loss(scores_CT: Tensor, leaves: IntArray) -> Tensor:
            selected, outputs = rows.select(scores_CT, leaves)
            return self._loss(outputs, selected)[0]

        def compute(call: RelayCall, plan: AttentionPlan) -> Tensor:
            return call_scores(self._model, call, rows.layout, plan=plan)

        calls = micro.calls(scores_own_tokens=False)
        run = RelayRun(calls, compute, mode="rows", device=CPU, store_on_host=store_on_host)
        for number in range(run.num_first):
            run.first(number)
        for number in range(run.num_last):
            run.last(number, loss).backward()
        self.store_bytes = run.store.num_bytes


def _batch(sequences: Sequence[np.ndarray], *, prompt_len: int, vocab_size: int) -> TensorDict:
    """Make the batch that verl's trainer would send, with random advantages."""
    generator = torch.Generator().manual_seed(0)
    uniform = -float(np.log(vocab_size))
    rows = []
    for sequence in sequences:
        tokens = torch.from_numpy(sequence).long()
        num_trained = len(tokens) - prompt_len
        rows.append(
            {
                "prompts": tokens[:prompt_len],
                "responses": tokens[prompt_len:],
                "response_mask": torch.ones(num_trained, dtype=torch.int64),
                "old_log_probs": torch.full((num_trained,), uniform),
                "advantages": torch.randn(num_trained, generator=generator),
            }
        )
    num_tokens = sum(len(row["responses"]) for row in rows)
    batch = batch_of_rows(rows, max_token_len=num_tokens, global_batch_size=len(rows))
    # What verl's engine adds: the denominators of its losses.
    tu.assign_non_tensor(batch, sp_size=1, dp_size=1, batch_num_tokens=num_tokens)
    return batch
