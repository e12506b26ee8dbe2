"""verl's training workers, with mini-batches of prompt groups instead of rows.

verl cuts a rank's rows into mini-batches of a fixed number of rows. If sessions have several leaves, that splits a
group over optimiser steps and loses what its rows share. Here a mini-batch has the rows that the trainer planned
(`MiniBatchPlan`) and is one optimiser step, however many they are. verl's own flat engines get the same mini-batches,
so tree and flat training runs differ in nothing else.
"""

from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from codetiming import Timer
from tensordict import NonTensorData, TensorDict
from typing_extensions import override
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.utils.metric import Metric
from verl.utils.py_functional import append_to_dict
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker

import rollout_hooks.capture.wire_storage  # noqa: F401 (reads what agent loop workers write)
from verl_tree import clashes
from verl_tree.cpu.platform import ensure_cpu_process_group
from verl_tree.cpu.weight_socket import register_sender
from verl_tree.engine import TreeEngine
from verl_tree.engine.canary import DUE
from verl_tree.engine.losses.row_losses import is_sum_over_rows, needs_trained_tokens
from verl_tree.engine.losses.session_weights import session_weighted_loss, weigh_sessions
from verl_tree.engine.losses.untrained_rows import loss_of_any_rows
from verl_tree.engine.rows.columns import read_row_lens
from verl_tree.engine.rows.micro_batch import LossFunction
from verl_tree.engine.rows.positions import settle_positions, takes_components
from verl_tree.engine_config import TreeEngineConfig
from verl_tree.packing.counts import ForestCounts, RankTimes
from verl_tree.trainer.rows.batching import MiniBatchPlan
from verl_tree.trainer.told.update_flops import UpdateFlops
from verl_tree.trainer.told.update_metrics import as_numbers


class TreeTrainingWorker(TrainingWorker):
    """verl's `TrainingWorker` with mini-batches of whole groups."""

    def __init__(self, config: TrainingWorkerConfig) -> None:
        if get_device_name() == "cpu":
            # verl would ask for the backend "cpu:gloo,cpu:gloo", which torch refuses.
            ensure_cpu_process_group()
            # verl's worker makes its models first, then the sender of their weights.
            register_sender()
        super().__init__(config)
        assert self.flops_counter is not None, "verl makes one for every Hugging Face model"
        self._num_updates = 0
        self._flops = UpdateFlops(self.flops_counter, is_critic=config.model_type == "value_model")

    @property
    def _weighs(self) -> list[str]:
        """What weighs rows in the loss: settings of `verl_tree.clashes`."""
        config = self.engine_config
        if not isinstance(config, TreeEngineConfig):
            return []
        used = {clashes.SESSION: config.tree.session_weight == "session", clashes.ROLES: bool(config.tree.role_weight)}
        return [setting for setting, is_used in used.items() if is_used]

    @register(dispatch_mode=Dispatch["ONE_TO_ALL"])
    def set_loss_fn(self, loss_fn: LossFunction) -> None:
        """Take verl's loss function, make it defined on all rows, and weigh rows where configured.

        Raises:
            ValueError: Rows are to be weighed in a loss that is not known to be a sum over rows.
        """
        if needs_trained_tokens(loss_fn):
            loss_fn = partial(loss_of_any_rows, loss_fn)
        if self._weighs:
            if not is_sum_over_rows(loss_fn):
                clashes.refuse({name: name for name in self._weighs} | {clashes.OTHER_LOSS: f"loss={loss_fn}"})
            loss_fn = partial(session_weighted_loss, loss_fn)
        super().set_loss_fn(loss_fn)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_mini_batch(self, data: TensorDict) -> TensorDict | None:
        """Take one optimiser step per mini-batch of the plan, in every epoch; see `TrainingWorker.train_mini_batch`.

        `data` has this rank's rows, mini-batch after mini-batch, the keys of `MiniBatchPlan`, and verl's `epochs`,
        `seed`, `dataloader_kwargs` and `disable_auto_offload`. The result has verl's `metrics`, and a tree engine's
        (`update_metrics`). It is None on ranks that collect nothing.

        Raises:
            ValueError: The plan's rows are not the rows that arrived.
        """
        self._settle(data)
        plan = MiniBatchPlan.from_batch(data)
        disable_auto_offload = tu.pop(data, key="disable_auto_offload", default=False)
        epochs = tu.pop(data, key="epochs", default=1)
        seed = tu.pop(data, key="seed", default=42)
        shuffle = tu.pop(data, key="dataloader_kwargs", default={}).get("shuffle", False)
        rows = plan.rows[self.engine.get_data_parallel_rank()]
        assert (plan.sessions is not None) == bool(self._weighs), "trainer and workers have the same tree options"
        if sum(rows) != len(data):
            raise ValueError(
                f"rank {self.engine.get_data_parallel_rank()} got {len(data)} rows and the plan gives it {sum(rows)}: "
                "mini_batch_rows must match the dispatched batch"
            )
        order = list(_mini_batch_order(len(rows), epochs=epochs, seed=seed, shuffle=shuffle))
        starts = np.cumsum([0, *rows])
        group = self.engine.get_data_parallel_group()

        outputs, counts, times, num_micro_batches = [], ForestCounts(), RankTimes(), 0
        # One mini-batch of an update, and of the next one its neighbour.
        canary, looked_at = {}, self._num_updates % len(order)
        self._num_updates += 1
        with (
            self.engine.train_mode(disable_auto_offload=disable_auto_offload),
            Timer(name="train_batch", logger=None),
        ):
            for step, index in enumerate(order):
                mini_batch = tu.index_select_tensor_dict(data, torch.arange(starts[index], starts[index + 1]))
                tu.assign_non_tensor(
                    mini_batch,
                    global_batch_size=plan.num_rows[index],
                    global_token_num=NonTensorData(read_row_lens(mini_batch, mask="response_mask", group=group)),
                    update_lr_scheduler=step == len(order) - 1,
                    disable_auto_offload=True,
                    **{DUE: step == looked_at},
                )
                if plan.sessions is not None:
                    rank, span = self.engine.get_data_parallel_rank(), slice(starts[index], starts[index + 1])
                    role_weights = None if plan.role_weights is None else plan.role_weights[rank][span]
                    weigh_sessions(mini_batch, plan.sessions[rank][span], group=group, role_weights=role_weights)
                with torch.profiler.record_function(f"mini_batch{step}"):
                    outputs.append(self.train_batch(mini_batch))
                self.profiler.step()
                if isinstance(self.engine, TreeEngine):
                    counts = counts + self.engine.tree_counts
                    times = times + self.engine.rank_times
                    num_micro_batches += self.engine.num_micro_batches
                    canary |= self.engine.canary.metrics

        if not self.engine.is_mp_src_rank_with_outputs():
            return None
        metrics = _merge_metrics([tu.get(output, "metrics") for output in outputs])
        if isinstance(self.engine, TreeEngine):
            metrics.update(as_numbers(counts, times) | self.engine.cost_metrics | canary)
            metrics["tree/micro_batches"] = num_micro_batches
        return tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": metrics}).cpu()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    @override
    def train_batch(self, data: TensorDict) -> TensorDict | None:
        """Take one optimiser step; see `TrainingWorker.train_batch`.

        The metric `mfu` counts what was computed. verl's own, which counts flat rows, is `mfu_flat_equivalent`.
        """
        row_lens = tu.get(data, "global_token_num")
        output = super().train_batch(data)
        if output is None or row_lens is None:
            return output
        metrics = tu.get(output, "metrics")
        metrics |= self._flops.both_mfus(metrics["mfu"], engine=self.engine, row_lens=row_lens)
        return output

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    @override
    def infer_batch(self, data: TensorDict) -> TensorDict | None:
        """Compute log-probs or values without an update; see `TrainingWorker.infer_batch`."""
        self._settle(data)
        if tu.get(data, "no_lora_adapter", default=False):
            # The reference model routes its tokens itself.
            tu.assign_non_tensor(data, enable_routing_replay=False)
        return super().infer_batch(data)

    def _settle(self, data: TensorDict) -> None:
        settle_positions(data, keep_components=takes_components(self.model_config.hf_config))


def _mini_batch_order(num_mini_batches: int, *, epochs: int, seed: int, shuffle: bool) -> Iterator[int]:
    """Yield the mini-batches of all epochs in the order of their optimiser steps, the same on every rank."""
    generator = np.random.default_rng(seed)
    for _ in range(epochs):
        yield from generator.permutation(num_mini_batches).tolist() if shuffle else range(num_mini_batches)


def _merge_metrics(per_step: list[dict[str, Any]]) -> dict[str, Any]:
    """Flatten ranks and packs to one entry per optimiser step and metric, as verl's trainer expects."""
    merged: dict[str, Any] = {}
    for metrics in per_step:
        for name, value in metrics.items():
            if isinstance(value, list):
                is_metric = isinstance(value[0], Metric)
                metrics[name] = Metric.aggregate_dp(value) if is_metric else list(chain.from_iterable(value))
        append_to_dict(merged, metrics)
    return merged
