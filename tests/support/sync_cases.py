"""One update on a pretended device: what a tree engine does with its micro-batches, and when the host waits for it."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from pretend_device import DEVICE, HostEvents, held, to_pretended
from relay_cases import CPU, LossCase, flat_rows, lay_out, verl_rows
from tiny_models import tiny_model
from torch import Tensor
from tree_cases import random_sequences, run_all
from verl.utils import tensordict_utils as tu

from verl_tree.attention import BACKENDS, AttentionBackend, AttentionPlan, fa4
from verl_tree.attention.hf import ATTENTION_NAME
from verl_tree.engine.rows import micro_batch
from verl_tree.engine.rows.micro_batch import MicroBatchRows, RowLosses
from verl_tree.engine.rows.packs import TreeMicroBatch
from verl_tree.engine.rows.results import MiniBatchResult
from verl_tree.functional.relayed import call_scores
from verl_tree.relay.calls import RelayCall
from verl_tree.relay.run import RelayRun
from verl_tree.tree import transfer

HEAD_DIM = 64
CHUNK_SIZE = 8  # so that the head has many chunks


def pretend(monkeypatch: Any) -> None:
    """Let the engine compute on the pretended device, which copies from pinned memory, with fa4 around stand-ins."""
    monkeypatch.setattr(micro_batch, "device_of_rank", lambda: DEVICE)
    monkeypatch.setattr(transfer, "PINNED_DEVICE_TYPES", (DEVICE.type,))
    monkeypatch.setitem(BACKENDS, "fa4", AttentionBackend(fa4.fa4_attention, lambda *_, **__: []))
    monkeypatch.setattr(fa4, "_kernels", lambda: SimpleNamespace(forward=fa4_forward, backward=fa4_backward))


def fa4_forward(q_QHD, k_THD, v_THD, subtree_end_T, *, key_tables, scale, **_):
    """Stand in for the kernel: a softmax under the mask."""
    assert all(table.device == q_QHD.device for table in key_tables)
    scores_HQK = _scores(q_QHD, k_THD, subtree_end_T, scale)
    groups = q_QHD.shape[1] // v_THD.shape[1]
    out_QHD = (scores_HQK.softmax(-1) @ v_THD.repeat_interleave(groups, 1).transpose(0, 1)).transpose(0, 1)
    return out_QHD, scores_HQK.logsumexp(-1).unsqueeze(0)


def fa4_backward(grad_out_QHD, q_QHD, k_THD, v_THD, out_QHD, lse_1HQ, subtree_end_T, *, query_tables, scale, **_):
    """Stand in for the kernel, from the results of its forward pass."""
    assert all(table.device == q_QHD.device for table in query_tables)
    groups = q_QHD.shape[1] // k_THD.shape[1]
    q, k, v, grad_out, out = (
        x.repeat_interleave(q_QHD.shape[1] // x.shape[1], 1).transpose(0, 1)
        for x in (q_QHD, k_THD, v_THD, grad_out_QHD, out_QHD)
    )
    probs_HQK = (_scores(q_QHD, k_THD, subtree_end_T, scale) - lse_1HQ[0].unsqueeze(-1)).exp()
    grad_scores_HQK = probs_HQK * (grad_out @ v.mT - (grad_out * out).sum(-1, keepdim=True)) * scale
    heads_first = (grad_scores_HQK @ k, grad_scores_HQK.mT @ q, probs_HQK.mT @ grad_out)
    grad_q, grad_k, grad_v = (x.transpose(0, 1) for x in heads_first)
    return grad_q, *(x.unflatten(1, (-1, groups)).sum(2) for x in (grad_k, grad_v))


def _scores(q_QHD, k_THD, subtree_end_T, scale):
    key_T = torch.arange(len(k_THD), device=q_QHD.device)
    query_Q = key_T[-len(q_QHD) :, None]
    hidden_QT = (key_T > query_Q) | (query_Q >= subtree_end_T)
    k_THD = k_THD.repeat_interleave(q_QHD.shape[1] // k_THD.shape[1], 1)
    return (q_QHD.transpose(0, 1) @ k_THD.permute(1, 2, 0) * scale).masked_fill(hidden_QT, -torch.inf)


class Update:
    """A model on the pretended device, and a mini-batch of rows on the host."""

    def __init__(
        self,
        *,
        num_layers: int = 2,
        checkpoints: bool = False,
        num_sequences: int = 24,
        seed: int = 0,
        device: torch.device = DEVICE,
        case: LossCase | None = None,
    ) -> None:
        sequences = random_sequences(np.random.default_rng(seed), num_sequences=num_sequences, mean_len=9)
        self.sequences = [row for row in sequences if len(row) > 1]
        model: Any = tiny_model(num_hidden_layers=num_layers, head_dim=HEAD_DIM)
        model.set_attn_implementation("sdpa")
        self.case = case or LossCase()
        with torch.no_grad():
            self.data = verl_rows(self.sequences, flat_rows(model, self.sequences), self.case, seed=seed)
        if checkpoints:
            model.train()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.set_attn_implementation(ATTENTION_NAME)
        self.device, self.model = device, model if device == CPU else to_pretended(model)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the parameters, on the host."""
        return {
            name: each.grad if self.device == CPU else held(each.grad) for name, each in self.model.named_parameters()
        }

    def micro_batch(self, *, capacity: int) -> TreeMicroBatch:
        """Lay out all rows, as one pack or as a tree in sections."""
        return lay_out(self.data, capacity=capacity, mode="rows")

    def run(
        self, micros: Sequence[TreeMicroBatch], *, backend: str, forward_only: bool = False
    ) -> tuple[HostEvents, dict[str, Any]]:
        """Do what `TreeEngine.forward_backward_batch` does with micro-batches; return its result too."""
        events = HostEvents()
        names, function = self.case.kinds, None if forward_only else self.case.function()
        with events.noted():
            result = MiniBatchResult(tu.get(self.data, "input_ids"), output_names=names if forward_only else ())
            losses = RowLosses(function, result, group=None)
            for micro in micros:
                self._run_one(micro, losses, backend=backend, forward_only=forward_only)
            as_verl = result.as_verl()
        return events, as_verl

    def _run_one(self, micro: TreeMicroBatch, losses: RowLosses, *, backend: str, forward_only: bool) -> None:
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
            device=self.device,
            backend=backend,
        )
        scores_CT = run_all(run, loss)
        if forward_only:
            losses.of_forward(rows, scores_CT)
