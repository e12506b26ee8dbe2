"""verl's FSDP2 engine with one change: it computes a mini-batch as the packs of its forest, not row by row.

The engine overrides `forward_backward_batch`. Everything else is verl's: building and sharding the model, LoRA,
offload, optimiser, checkpoints, weight export and the loss functions. The rows of a pack gather their log-probs,
entropy or values from the tree (`expand`). The backward of that gather sums over the rows, which gives the gradient of
the flat rows. Source: verl 0.9.1, workers/engine/fsdp.

Three differences from the flat engine are intended:
- positions that no loss reads are not scored: their log-probs and entropy are 0;
- rows that no loss reads (padding) are not computed;
- a rank reports one value per metric, whatever its number of packs.
"""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name

from verl_tree.attention.hf import ATTENTION_NAME, check_model, register
from verl_tree.attention.plan import AttentionPlan
from verl_tree.config import FLAT_STRATEGY, TREE_STRATEGY, TreeFSDPEngineConfig
from verl_tree.cost.fit import CostFitter
from verl_tree.cost.model import CostModel
from verl_tree.engine.fsdp_flat import BuildOnAnyDevice, BuildTokenClassifier
from verl_tree.engine.pack_times import PackClock, learn_costs
from verl_tree.engine.packs import TreeBatch, TreeMicroBatch, first_token_pack, split_into_packs
from verl_tree.engine.rows import MiniBatchResult, RankWork, StepResult, check_rows, gather, jagged
from verl_tree.functional import expand
from verl_tree.functional.logprobs import tree_forward_log_probs
from verl_tree.packing.counts import ForestCounts, RankTimes
from verl_tree.tree.layout import TreeLayout
from verl_tree.tree.rows import trained_tokens

LossFunction = Callable[..., tuple[Tensor, dict[str, Any]]]


class FSDPTreeEngineWithLMHead(BuildOnAnyDevice):
    """The engine of policy and reference model: log-probs and entropy of the rows' trained tokens.

    Attributes:
        tree_counts: Tokens, nodes and packs of the last mini-batch, summed over all ranks.
        num_micro_batches: Packs that each rank ran for it (the largest number of any rank).
        rank_times: How evenly the ranks worked on the last update.
        cost_metrics: The cost model of updates as rank 0 has fitted it, as metrics.

    Raises:
        ValueError: `engine_config` has no tree options.
    """

    _output_shift: ClassVar[int] = -1
    """verl keeps a token's score one position earlier. First tokens have no score, so one roll shifts all rows."""

    def __init__(
        self, model_config: Any, engine_config: TreeFSDPEngineConfig, optimizer_config: Any, checkpoint_config: Any
    ) -> None:
        if not isinstance(engine_config, TreeFSDPEngineConfig):
            raise ValueError(
                f"strategy {TREE_STRATEGY} got an engine config of type {type(engine_config).__name__}: set "
                "fsdp_config._target_=verl_tree.config.TreeFSDPEngineConfig (the config tree_ppo does)"
            )
        super().__init__(
            model_config=model_config,
            # verl's FSDP code knows only its own strategies.
            engine_config=dataclasses.replace(engine_config, strategy=FLAT_STRATEGY),
            optimizer_config=optimizer_config,
            checkpoint_config=checkpoint_config,
        )
        # The model never sees rows, so verl's patches for padded and packed rows are not needed.
        self.use_remove_padding = False
        self.tree_config = engine_config.tree
        self.tree_counts = ForestCounts()
        self.num_micro_batches = 0
        self.rank_times = RankTimes()
        self.cost_metrics: dict[str, float] = {}
        self._costs = {"update": CostFitter(), "infer": CostFitter()}

    @override
    def _build_module(self) -> torch.nn.Module:
        register()
        self.model_config.hf_config._attn_implementation = ATTENTION_NAME
        self._model = super()._build_module()
        check_model(self._model, max_path_len=1)
        return self._model

    @override
    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> Any:
        """Compute one mini-batch as packs; arguments and result are those of `BaseEngine.forward_backward_batch`.

        `model_output` is empty unless `forward_only`; `loss` has one number per model call with a loss.

        Raises:
            ValueError: The tree path cannot compute the rows (`check_rows`), or one of them cannot be packed.
        """
        check_rows(data)
        self._announce_denominators(data)
        cost = self._costs["infer" if forward_only else "update"]
        batch = self._split(data, cost_model=cost.model)
        ranks = self._exchange_work(batch)

        clock, result = PackClock(get_device_name()), MiniBatchResult(tu.get(data, "input_ids"))
        steps = self._same_number_of_steps(batch)
        for number, micro in enumerate(steps):
            sync = self._gradient_sync_context(is_last_micro_batch=number == len(steps) - 1)
            grad = torch.no_grad() if forward_only else sync
            with grad, clock.measure(), torch.profiler.record_function(f"micro_batch{number}"):
                # verl needs equal metric keys on every rank, so a rank without any pack calls the loss once, on zeros.
                loss = loss_function if micro is not None or number == 0 else None
                result.add(self._step(micro, data, loss_function=loss, forward_only=forward_only), micro=micro)
        self._learn_costs(cost, ranks, clock=clock, forward_only=forward_only)
        return result.as_verl()

    def _announce_denominators(self, data: TensorDict) -> None:
        """Add the denominators of verl's losses: the trained tokens of all ranks and the number of ranks."""
        num_tokens = tu.get(data, "loss_mask").sum().to(_device())
        dist.all_reduce(num_tokens, group=self.get_data_parallel_group())
        tu.assign_non_tensor(data, sp_size=1, batch_num_tokens=num_tokens.item(), dp_size=self.get_data_parallel_size())

    def _split(self, data: TensorDict, *, cost_model: CostModel) -> TreeBatch:
        """Cut this rank's rows into packs."""
        tokens, offsets = (each.cpu().numpy() for each in jagged(data["input_ids"]))
        mask, mask_offsets = jagged(data["response_mask"] if "response_mask" in data else data["loss_mask"])
        row_lens = np.diff(offsets)
        # Length-dependent RoPE is refused only for rows that are long enough to be affected.
        check_model(self._model, max_path_len=int(row_lens.max()))
        temperature = tu.get(data, "temperature", default=1.0)
        capacity = self.tree_config.capacity
        return split_into_packs(
            tokens,
            offsets=offsets,
            trained=trained_tokens(mask.cpu().numpy(), mask_lens=mask_offsets.diff().cpu().numpy(), row_lens=row_lens),
            capacity=int(tu.get(data, "max_token_len_per_gpu")) if capacity is None else capacity,
            config=self.tree_config,
            cost_model=cost_model,
            # A tree token has one temperature, so rows with different temperatures do not merge.
            merge_keys=temperature.tolist() if isinstance(temperature, Tensor) and temperature.dim() else None,
        )

    def _exchange_work(self, batch: TreeBatch) -> list[RankWork]:
        """Exchange with all ranks what each of them computes."""
        ranks: list[RankWork] = gather(RankWork.of_batch(batch), group=self.get_data_parallel_group())
        self.num_micro_batches = max(len(rank.works) for rank in ranks)
        self.tree_counts = sum((rank.counts for rank in ranks), ForestCounts())
        return ranks

    def _same_number_of_steps(self, batch: TreeBatch) -> list[TreeMicroBatch | None]:
        """Fill this rank's packs up with None, because FSDP's collectives need as many model calls from every rank."""
        num_missing = max(self.num_micro_batches, 1) - len(batch.micro_batches)
        return [*batch.micro_batches, *[None] * num_missing]

    def _step(
        self, micro: TreeMicroBatch | None, data: TensorDict, *, loss_function: LossFunction | None, forward_only: bool
    ) -> StepResult:
        """Run the model, the loss and the backward on one pack."""
        rows, model_output = self._compute_nothing(data) if micro is None else self._compute_pack(micro, data)
        loss, metrics = None, {}
        if loss_function is not None:
            loss, metrics = loss_function(model_output=model_output, data=rows, dp_group=self.get_data_parallel_group())
        if not forward_only:
            # Without a loss the backward runs on zeros, because the other ranks wait in its collectives.
            total = torch.cat([jagged(each)[0] for each in model_output.values()]).sum() * 0.0 if loss is None else loss
            (total if self.scaler is None else self.scaler.scale(total)).backward()
        return StepResult(
            model_output=model_output if forward_only else {},
            loss=None if loss is None else loss.detach().item(),
            metrics=metrics,
        )

    def _learn_costs(
        self, cost: CostFitter, ranks: Sequence[RankWork], *, clock: PackClock, forward_only: bool
    ) -> None:
        """Fit the cost model to the measured times, and record how evenly the ranks worked on an update."""
        predicted_s = [sum(map(cost.model.predict, rank.works)) for rank in ranks]
        # Fitted costs decide which rank computes what, so a training run that must repeat bit for bit has none.
        if not self.engine_config.full_determinism:
            learn_costs(cost, [rank.works for rank in ranks], seconds=clock.seconds())
        if forward_only:
            return
        mine = (clock.busy_s(), cost.metrics(prefix="tree/cost_model"))
        gathered = gather(mine, group=self.get_data_parallel_group())
        self.rank_times = RankTimes.of_ranks(
            predicted_s=predicted_s,
            measured_s=[busy_s for busy_s, _ in gathered],
            packing_s=[rank.packing_s for rank in ranks],
        )
        self.cost_metrics = gathered[0][1]

    def _compute_pack(self, micro: TreeMicroBatch, data: TensorDict) -> tuple[TensorDict, dict[str, Tensor]]:
        """Return the rows of a pack and their model outputs, jagged and aligned as verl aligns them."""
        rows = tu.index_select_tensor_dict(data, torch.from_numpy(micro.rows)).to(_device())
        layout = micro.layout.to(_device())
        per_token = self._forward(
            layout,
            plan=self._plan(micro.layout),
            wanted_T=micro.wanted_T.to(_device()),
            temperature=_temperature_of_tokens(tu.get(rows, "temperature", default=1.0), layout),
            calculate_entropy=bool(tu.get(rows, "calculate_entropy", default=False)),
        )
        weight_F = None if micro.gradient_weight_F is None else micro.gradient_weight_F.to(_device())
        _, offsets = jagged(rows["input_ids"])
        model_output = {}
        for name, values_T in per_token.items():
            values_F = expand(values_T, layout, gradient_weight_F=weight_F).roll(self._output_shift)
            model_output[name] = torch.nested.nested_tensor_from_jagged(values_F, offsets)
        return rows, model_output

    def _compute_nothing(self, data: TensorDict) -> tuple[TensorDict, dict[str, Tensor]]:
        """Return the first row with zero outputs, tied to a model call so that the backward runs every collective."""
        rows = tu.index_select_tensor_dict(data, [0]).to(_device())
        token_ids, offsets = jagged(rows["input_ids"])
        layout = first_token_pack(int(token_ids[0]))
        per_token = self._forward(
            layout.to(_device()),
            plan=self._plan(layout),
            wanted_T=torch.ones(layout.num_tokens, dtype=torch.bool, device=_device()),
            temperature=1.0,
            calculate_entropy=bool(tu.get(data, "calculate_entropy", default=False)),
        )
        zeros = torch.zeros(len(token_ids), device=_device())
        return rows, {
            name: torch.nested.nested_tensor_from_jagged(zeros + values_T.sum() * 0.0, offsets)
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
        """Compute per-token outputs (T,) of the model on a pack."""
        with self._autocast():
            scores = tree_forward_log_probs(
                cast("PreTrainedModel", self.module),  # FSDP2 keeps the model's own class
                layout,
                plan=plan,
                wanted_T=wanted_T,
                temperature=temperature,
                calculate_entropy=calculate_entropy,
                chunk_size=self.tree_config.logits_chunk_size,
            )
        outputs = {"log_probs": scores.log_probs_T}
        return outputs if scores.entropy_T is None else outputs | {"entropy": scores.entropy_T}

    def _plan(self, layout: TreeLayout) -> AttentionPlan:
        """Plan the attention from the layout on the host, so that nothing waits for the device."""
        backend = self.tree_config.backend
        return AttentionPlan.from_subtree_end(layout.subtree_end_T, backend=backend, device=_device())

    def _autocast(self) -> AbstractContextManager[Any]:
        """Autocast as verl's `forward_step` does: only if the parameters are not float32."""
        if self._autocast_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(device_type=get_device_name(), dtype=self._autocast_dtype)


class FSDPTreeEngineWithValueHead(BuildTokenClassifier, FSDPTreeEngineWithLMHead):
    """The engine of the critic: one value per token of the rows, at the token's own position."""

    _output_shift = 0

    @override
    def _forward(
        self,
        layout: TreeLayout,
        *,
        plan: AttentionPlan,
        wanted_T: Tensor,
        temperature: float | Tensor,
        calculate_entropy: bool,
    ) -> dict[str, Tensor]:
        with self._autocast():
            output = self.module(
                input_ids=layout.token_ids_T.unsqueeze(0),
                position_ids=layout.position_T.unsqueeze(0),
                attention_mask=None,
                use_cache=False,
                tree_plan=plan,
            )
        return {"values": output.logits.reshape(layout.num_tokens).float()}


def _device() -> torch.device:
    return torch.device(get_device_id())


def _temperature_of_tokens(temperature: float | Tensor, layout: TreeLayout) -> float | Tensor:
    """Spread one temperature per row to the tree tokens (T,). Rows of different temperatures share no token."""
    if not isinstance(temperature, Tensor) or temperature.dim() == 0:
        return temperature
    row_lens = torch.from_numpy(np.diff(layout.leaf_offsets)).to(temperature.device)
    flat = torch.repeat_interleave(temperature.float(), row_lens)
    return flat.new_ones(layout.num_tokens).index_copy(0, layout.tree_index_F, flat)
