"""One update on a pretended device: what a tree engine does with a mini-batch, and when the host waits for the device.

Legend: C kinds of scores.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pretend_device import DEVICE, HostEvents, to_pretended
from relay_cases import LossCase, flat_rows, lay_out, verl_rows
from torch import Tensor
from tree_cases import random_sequences, tiny_model
from verl.utils import tensordict_utils as tu

from verl_tree.attention import BACKENDS, AttentionBackend, AttentionPlan, fa4
from verl_tree.attention.hf import ATTENTION_NAME
from verl_tree.engine import micro_batch
from verl_tree.engine.micro_batch import MicroBatchRows, RowLosses
from verl_tree.engine.packs import TreeMicroBatch
from verl_tree.engine.rows import MiniBatchResult
from verl_tree.functional.relayed import call_scores
from verl_tree.relay.calls import RelayCall
from verl_tree.relay.run import RelayRun

HEAD_DIM = 64
CHUNK_SIZE = 8  # so that the head has many chunks


class Update:
    """A model on the pretended device, and a mini-batch of rows on the host."""

    def __init__(self, *, num_layers: int, checkpoints: bool = False, num_sequences: int = 24, seed: int = 0) -> None:
        sequences = random_sequences(np.random.default_rng(seed), num_sequences=num_sequences, mean_len=9)
        self.sequences = [row for row in sequences if len(row) > 1]
        model = tiny_model(num_hidden_layers=num_layers, head_dim=HEAD_DIM)
        model.set_attn_implementation("sdpa")
        self.case = LossCase()
        with torch.no_grad():
            self.data = verl_rows(self.sequences, flat_rows(model, self.sequences), self.case, seed=seed)
        if checkpoints:
            model.train()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.set_attn_implementation(ATTENTION_NAME)
        self.model = to_pretended(model)

    def micro_batch(self, *, capacity: int) -> TreeMicroBatch:
        """Lay out all rows, as one pack or as a tree in sections."""
        return lay_out(self.data, capacity=capacity, mode="rows")

    def run(
        self,
        micros: list[TreeMicroBatch],
        *,
        backend: str,
        forward_only: bool = False,
        store_on_host: bool = False,
    ) -> tuple[HostEvents, dict[str, Any]]:
        """Do what `FSDPTreeEngineWithLMHead.forward_backward_batch` does with micro-batches; return its result too."""
        events = HostEvents()
        names, function = self.case.kinds, None if forward_only else self.case.function()
        with events.noted():
            result = MiniBatchResult(tu.get(self.data, "input_ids"), output_names=names if forward_only else ())
            losses = RowLosses(function, result, group=None, scaler=None)
            for micro in micros:
                self._run_one(micro, losses, backend=backend, store_on_host=store_on_host)
            as_verl = result.as_verl()
        return events, as_verl

    def _run_one(self, micro: TreeMicroBatch, losses: RowLosses, *, backend: str, store_on_host: bool) -> None:
        forward_only = losses._loss_function is None
        rows = MicroBatchRows(micro, self.data, names=self.case.kinds, shift=self.case.shift)

        def compute(call: RelayCall, plan: AttentionPlan) -> Tensor:
            return call_scores(
                self.model,
                call,
                rows.layout,
                plan=plan,
                temperature=rows.temperature(),
                calculate_entropy=True,
                chunk_size=CHUNK_SIZE,
            )

        def loss(scores_CT: Tensor, leaves: np.ndarray) -> Tensor:
            return losses.of_rows(*rows.select(scores_CT, leaves))

        run = RelayRun(
            micro.calls(scores_own_tokens=False),
            compute,
            mode="forward" if forward_only else "rows",
            device=DEVICE,
            backend=backend,
            store_on_host=store_on_host,
        )
        for number in range(run.num_first):
            run.first(number)
        for number in range(run.num_last):
            run.last(number, loss)
        if forward_only:
            losses.of_forward(rows, run.scores_CT)
