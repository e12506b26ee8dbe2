"""verl's FSDP2 engine with one change: a mini-batch is computed as the packs of its forest, not as rows.

Everything else is verl's: building and sharding the model, LoRA, offload, optimiser, checkpoints, weight export and
the loss functions. The engine overrides how a mini-batch is cut (`forward_backward_batch`) and how one cut is computed;
the rows of a pack get their log-probs, entropy or values by a gather from the tree (`expand`), whose backward sums
over the rows: that is the gradient of the flat rows. Source of the seams: verl 0.9.1, workers/engine/fsdp.

What differs from the flat engine on purpose:
- positions that no loss reads are not scored: their log-probs and entropy are 0, where the flat engine has numbers
  that nothing reads;
- rows that no loss reads (padding) are not computed;
- a rank reports one value per metric, whatever its number of packs.
"""

import dataclasses
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from verl_tree.attention.hf import ATTENTION_NAME, check_model, register
from verl_tree.attention.plan import AttentionPlan
from verl_tree.config import TreeFSDPEngineConfig
from verl_tree.cost.model import CostModel
from verl_tree.engine.model_build import on_this_device
from verl_tree.engine.pack_times import OnlineCost, PackClock
from verl_tree.engine.packs import (
    TreeBatch,
    TreeMicroBatch,
    first_token_pack,
    split_into_packs,
    trained_tokens,
)
from verl_tree.engine.rows import RankWork, RowOutputs, gather, one_value_per_rank, refuse_unsupported
from verl_tree.functional import expand
from verl_tree.functional.logprobs import tree_forward_log_probs
from verl_tree.packing.counts import ForestCounts, RankTimes
from verl_tree.tree.layout import TreeLayout

LossFunction = Callable[..., tuple[Tensor, dict[str, Any]]]


@EngineRegistry.register(model_type="language_model", backend="fsdp_tree", device=["cuda", "cpu"])
class FSDPTreeEngineWithLMHead(FSDPEngineWithLMHead):
    """Policy and reference model: log-probs and entropy of the rows' trained tokens.

    Attributes:
        tree_counts: what the last mini-batch computed and what its rows hold, summed over all ranks.
        num_micro_batches: packs that each rank ran for it (the largest number of any rank).
        rank_times: how evenly the ranks worked on the last update.
        cost_metrics: the cost model of updates as rank 0 has fitted it, as metrics.
    """

    def __init__(
        self, model_config: Any, engine_config: TreeFSDPEngineConfig, optimizer_config: Any, checkpoint_config: Any
    ) -> None:
        """Takes verl's own configs; see `FSDPEngine`. Raises ValueError for an `engine_config` without `tree`."""
        if not isinstance(engine_config, TreeFSDPEngineConfig):
            raise ValueError(
                f"strategy fsdp_tree got an engine config of type {type(engine_config).__name__}: set "
                "fsdp_config._target_=verl_tree.config.TreeFSDPEngineConfig (the config tree_ppo does)"
            )
        # verl's FSDP code knows the strategies fsdp and fsdp2 only.
        super().__init__(
            model_config=model_config,
            engine_config=dataclasses.replace(engine_config, strategy="fsdp2"),
            optimizer_config=optimizer_config,
            checkpoint_config=checkpoint_config,
        )
        # Rows never reach the model as rows, so verl's patches for padded and packed rows stay out.
        self.use_remove_padding = False
        self.tree = engine_config.tree
        self.tree_counts = ForestCounts()
        self.num_micro_batches = 0
        self.rank_times = RankTimes()
        self.cost_metrics: dict[str, float] = {}
        self._costs = {"update": OnlineCost(), "infer": OnlineCost()}

    def _build_module(self) -> torch.nn.Module:
        register()
        self.model_config.hf_config._attn_implementation = ATTENTION_NAME
        self._model = super()._build_module()
        check_model(self._model, max_path_len=1)
        return self._model

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        with on_this_device(self):
            return super()._build_fsdp_module(module)

    # ------------------------------------------------------------------ mini-batch

    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Computes one mini-batch as packs; see `BaseEngine.forward_backward_batch`.

        Every rank runs the same number of model calls, because FSDP's collectives need it: a rank with fewer packs
        ends with calls on a pack of two tokens whose gradient is zero.

        Args:
            data: rows as jagged tensors (`input_ids`, `position_ids`, `response_mask` or `loss_mask`, ...).
            loss_function: verl's loss; None to only infer.
            forward_only: no backward.

        Returns:
            `model_output` (only where forward_only): jagged tensors per row of `data`; `loss`: one number per model
            call with a loss; `metrics`.

        Raises:
            ValueError: rows that a tree cannot hold (multimodal inputs, position ids other than 0, 1, 2, ...), or an
                output that the tree path does not compute.
        """
        refuse_unsupported(data)
        group = self.get_data_parallel_group()
        num_tokens = data["loss_mask"].sum().to(get_device_id())
        dist.all_reduce(num_tokens, group=group)
        tu.assign_non_tensor(data, sp_size=1, batch_num_tokens=num_tokens.item(), dp_size=self.get_data_parallel_size())
        cost = self._costs["infer" if forward_only else "update"]
        batch = self._split(data, model=cost.model)
        ranks: list[RankWork] = gather(RankWork.of_batch(batch), group=group)
        self.num_micro_batches = max(len(rank.works) for rank in ranks)
        self.tree_counts = sum((rank.counts for rank in ranks), ForestCounts())

        clock, busy_s = PackClock(get_device_name()), time.process_time()
        outputs = RowOutputs(data["input_ids"], names=self._output_names(data))
        losses, metrics = [], []
        num_steps = max(self.num_micro_batches, 1)
        for step in range(num_steps):
            micro = batch.micro_batches[step] if step < len(batch.micro_batches) else None
            is_last = step == num_steps - 1
            sync = nullcontext() if forward_only else self._gradient_sync_context(is_last_micro_batch=is_last)
            grad = torch.no_grad() if forward_only else nullcontext()
            with grad, sync, clock.measure(), torch.profiler.record_function(f"micro_batch{step}"):
                rows, model_output = self._compute_nothing(data) if micro is None else self._compute_pack(micro, data)
                if micro is not None and forward_only:
                    outputs.add(micro, model_output)
                # A rank without any trained row still owes the loss's metrics, all zero, to the other ranks.
                if loss_function is not None and (micro is not None or step == 0):
                    loss, step_metrics = loss_function(model_output=model_output, data=rows, dp_group=group)
                    losses.append(loss.detach().item())
                    metrics.append(step_metrics)
                else:
                    loss = sum(value.values().sum() for value in model_output.values()) * 0.0
                if not forward_only:
                    (loss if self.scaler is None else self.scaler.scale(loss)).backward()

        predicted_s = [sum(map(cost.current.predict, rank.works)) for rank in ranks]
        if not self.engine_config.full_determinism:
            cost.learn([rank.works for rank in ranks], seconds=clock.seconds())
        if not forward_only:
            self._note_times(ranks, predicted_s=predicted_s, busy_s=time.process_time() - busy_s)
        return {
            "model_output": outputs.jagged() if forward_only else {},
            "loss": losses or [0.0],
            "metrics": one_value_per_rank(metrics),
        }

    def _note_times(self, ranks: list[RankWork], *, predicted_s: list[float], busy_s: float) -> None:
        """Gathers how evenly the ranks worked on an update, and the cost model of rank 0."""
        # On a GPU the processor waits for the device and its seconds say nothing.
        measured_s = busy_s if get_device_name() == "cpu" else 0.0
        mine = (measured_s, self._costs["update"].metrics(prefix="tree/cost_model"))
        gathered = gather(mine, group=self.get_data_parallel_group())
        self.rank_times = RankTimes.of_ranks(
            predicted_s=predicted_s,
            measured_s=[seconds for seconds, _ in gathered],
            packing_s=[rank.packing_s for rank in ranks],
        )
        self.cost_metrics = gathered[0][1]

    def _split(self, data: TensorDict, *, model: CostModel | None) -> TreeBatch:
        """The packs of this rank's rows."""
        input_ids = data["input_ids"]
        offsets = input_ids.offsets().cpu().numpy()
        # Length-dependent RoPE is harmless up to some length.
        check_model(self._model, max_path_len=int(np.diff(offsets).max()))
        mask = data["response_mask"] if "response_mask" in data else data["loss_mask"]
        temperature = tu.get(data, "temperature", default=1.0)
        capacity = self.tree.capacity
        return split_into_packs(
            input_ids.values().cpu().numpy(),
            offsets=offsets,
            trained=trained_tokens(mask, sequence_lens=np.diff(offsets)),
            capacity=int(data["max_token_len_per_gpu"]) if capacity is None else capacity,
            tree=self.tree,
            model=model,
            # One temperature per pack position: rows that are scored at different temperatures do not merge.
            merge_keys=temperature.tolist() if isinstance(temperature, Tensor) and temperature.dim() else None,
        )

    # ------------------------------------------------------------------ one pack

    def _compute_pack(self, micro: TreeMicroBatch, data: TensorDict) -> tuple[TensorDict, dict[str, Tensor]]:
        """Runs the model on a pack: its rows, and their outputs as jagged tensors, aligned as verl aligns them."""
        rows = tu.index_select_tensor_dict(data, torch.from_numpy(micro.rows)).to(get_device_id())
        layout = micro.layout.to(get_device_id())
        plan = self._plan(micro.layout)
        per_token = self._forward(
            layout,
            plan=plan,
            wanted_T=micro.wanted_T.to(get_device_id()),
            temperature=_temperature_of_tokens(tu.get(rows, "temperature", default=1.0), layout),
            calculate_entropy=bool(tu.get_non_tensor_data(rows, key="calculate_entropy", default=False)),
        )
        weight_F = micro.gradient_weight_F
        weight_F = None if weight_F is None else weight_F.to(get_device_id())
        offsets = rows["input_ids"].offsets()
        return rows, {
            name: torch.nested.nested_tensor_from_jagged(
                self._align(expand(values_T, layout, gradient_weight_F=weight_F)), offsets
            )
            for name, values_T in per_token.items()
        }

    def _forward(
        self,
        layout: TreeLayout,
        *,
        plan: AttentionPlan,
        wanted_T: Tensor,
        temperature: float | Tensor,
        calculate_entropy: bool,
    ) -> dict[str, Tensor]:
        """Per-token outputs (T,) of the model on a pack."""
        with self._autocast():
            scores = tree_forward_log_probs(
                self.module,
                layout,
                plan=plan,
                wanted_T=wanted_T,
                temperature=temperature,
                calculate_entropy=calculate_entropy,
                chunk_size=self.tree.logits_chunk_size,
            )
        if not calculate_entropy:
            return {"log_probs": scores.log_probs_T}
        return {"log_probs": scores.log_probs_T, "entropy": scores.entropy_T}

    def _plan(self, layout: TreeLayout) -> AttentionPlan:
        """What the layers share; made from the host's copy of the layout, so that no device waits for it."""
        return AttentionPlan.from_subtree_end(layout.subtree_end_T, backend=self.tree.backend, device=get_device_id())

    def _align(self, values_F: Tensor) -> Tensor:
        """verl keeps the score of a token at the position before it; first tokens have none, so a roll does it."""
        return torch.roll(values_F, shifts=-1)

    def _output_names(self, data: TensorDict) -> tuple[str, ...]:
        """What `model_output` holds."""
        calculate_entropy = tu.get_non_tensor_data(data, key="calculate_entropy", default=False)
        return ("log_probs", "entropy") if calculate_entropy else ("log_probs",)

    def _compute_nothing(self, data: TensorDict) -> tuple[TensorDict, dict[str, Tensor]]:
        """The first row with outputs that are zero, tied to a model call whose backward runs every collective."""
        rows = tu.index_select_tensor_dict(data, [0]).to(get_device_id())
        input_ids = rows["input_ids"]
        layout = first_token_pack(int(input_ids.values()[0]))
        wanted_T = torch.ones(layout.num_tokens, dtype=torch.bool, device=get_device_id())
        per_token = self._forward(
            layout.to(get_device_id()),
            plan=self._plan(layout),
            wanted_T=wanted_T,
            temperature=1.0,
            calculate_entropy=False,
        )
        zero = sum(values_T.sum() for values_T in per_token.values()) * 0.0
        values = torch.zeros_like(input_ids.values(), dtype=torch.float32) + zero
        return rows, {
            name: torch.nested.nested_tensor_from_jagged(values, input_ids.offsets())
            for name in self._output_names(data)
        }

    def _autocast(self) -> Any:
        """As verl's `forward_step`: autocast unless the parameters are float32."""
        if self._autocast_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(device_type=get_device_name(), dtype=self._autocast_dtype)


def _temperature_of_tokens(temperature: float | Tensor, layout: TreeLayout) -> float | Tensor:
    """One temperature per row becomes one per tree token (T,): rows of different temperatures share no token."""
    if not isinstance(temperature, Tensor) or temperature.dim() == 0:
        return temperature
    row_lens = torch.from_numpy(np.diff(layout.leaf_offsets)).to(temperature.device)
    flat = torch.repeat_interleave(temperature.float(), row_lens)
    return flat.new_ones(layout.num_tokens).index_copy(0, layout.tree_index_F, flat)
