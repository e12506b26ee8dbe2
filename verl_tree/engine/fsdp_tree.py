"""verl's FSDP2 engine with one change: it computes a mini-batch as its forest, not row by row.

The engine overrides `forward_backward_batch`. Everything else is verl's: building and sharding the model, LoRA,
offload, optimiser, checkpoints, weight export and the loss functions. A micro-batch is a pack, or one tree in sections
(`verl_tree.relay.run`). Its rows gather their log-probs, entropy or values from the tree (`expand`). The backward of
that gather sums over the rows, which gives the gradient of the flat rows. Source: verl 0.9.1, workers/engine/fsdp.

With `ulysses_sequence_parallel_size` > 1 the ranks of a team get the same rows from verl's dispatch and compute every
model call together (docs/ulysses.md). All of them have all scores, so each computes the same loss.

Three differences from the flat engine are intended:
- positions that no loss reads are not scored: their log-probs and entropy are 0;
- rows that no loss reads (padding) are not computed;
- a rank reports one value per metric, however often it computes the loss.

Legend: T tree tokens and F flat tokens of a micro-batch, Q tokens and K scores of a model call, C kinds of scores.
"""

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name

from verl_tree.attention.hf import ATTENTION_NAME, check_model, for_text, register
from verl_tree.attention.plan import AttentionPlan
from verl_tree.attention.sharding import SequenceShard
from verl_tree.config import FLAT_STRATEGY, TREE_STRATEGY
from verl_tree.cost.fit import CostFitter
from verl_tree.cost.model import CostModel
from verl_tree.engine.capacity import CapacityChoice
from verl_tree.engine.computed_paths import ComputedPaths
from verl_tree.engine.fsdp_flat import BuildOnAnyDevice
from verl_tree.engine.less_memory import BuildWithLessMemory
from verl_tree.engine.media import rows_with_images, with_images
from verl_tree.engine.micro_batch import LossFunction, MicroBatchRows, RowLosses, device_of_rank
from verl_tree.engine.pack_times import PackClock, learn_costs
from verl_tree.engine.packs import TreeBatch, first_token_pack, split_into_packs
from verl_tree.engine.recurrent_layers import bind_recurrent_layers
from verl_tree.engine.router_replay import ROUTES, MiniBatchRoutes, RouterReplay
from verl_tree.engine.row_losses import is_sum_over_rows
from verl_tree.engine.rows import MiniBatchResult, RankWork, check_rows, gather, jagged, steps_of
from verl_tree.engine.teams import BuildForTeam, of_first_rank
from verl_tree.engine_config import TreeFSDPEngineConfig
from verl_tree.functional.images import PackImages, reads_images, vision_tower
from verl_tree.functional.relayed import call_scores
from verl_tree.packing.counts import ForestCounts, RankTimes
from verl_tree.relay.calls import RelayCall
from verl_tree.relay.run import Mode, NumCalls, RelayRun, check_repeatable
from verl_tree.tree.layout import TreeLayout
from verl_tree.tree.nodes import IntArray
from verl_tree.tree.row_keys import prompt_numbers, row_keys, value_numbers
from verl_tree.tree.rows import trained_tokens


class FSDPTreeEngineWithLMHead(BuildForTeam, BuildWithLessMemory, BuildOnAnyDevice):
    """The engine of policy and reference model: log-probs and entropy of the rows' trained tokens.

    Attributes:
        tree_counts: Tokens, nodes and packs of the last mini-batch, summed over all ranks.
        computed_paths: What all ranks computed of it, if it was an update.
        num_micro_batches: Packs that each rank ran for it (the largest number of any rank).
        rank_times: How evenly the ranks worked on the last update.
        cost_metrics: The cost model of updates as rank 0 has fitted it, as metrics.

    Raises:
        ValueError: `engine_config` has no tree options.
    """

    _output_shift: ClassVar[int] = -1
    """verl keeps a token's score one position earlier. First tokens have no score, so one roll shifts all rows."""

    _scores_own_tokens: ClassVar[bool] = False
    """Whether a token is scored by itself, as a value is, not by its parent."""

    def __init__(
        self, model_config: Any, engine_config: TreeFSDPEngineConfig, optimizer_config: Any, checkpoint_config: Any
    ) -> None:
        if not isinstance(engine_config, TreeFSDPEngineConfig):
            raise ValueError(
                f"strategy {TREE_STRATEGY} got an engine config of type {type(engine_config).__name__}: set "
                "fsdp_config._target_=verl_tree.engine_config.TreeFSDPEngineConfig (the config tree_ppo does)"
            )
        super().__init__(
            model_config=model_config,
            # verl's FSDP code knows only its own strategies.
            engine_config=dataclasses.replace(engine_config, strategy=FLAT_STRATEGY),
            optimizer_config=optimizer_config,
            checkpoint_config=checkpoint_config,
        )
        self.tree_config = engine_config.tree
        self.tree_counts = ForestCounts()
        self.computed_paths = ComputedPaths()
        self.num_micro_batches = 0
        self.rank_times = RankTimes()
        self.cost_metrics: dict[str, float] = {}
        self._costs = {"update": CostFitter(), "infer": CostFitter()}
        self._capacity = CapacityChoice(self)
        self._replay: RouterReplay | None = None
        self._routes: MiniBatchRoutes | None = None

    @override
    def _build_module(self) -> torch.nn.Module:
        register()
        hf_config = self.model_config.hf_config
        if reads_images(hf_config) and self.team is not None:
            raise ValueError(
                f"ulysses_sequence_parallel_size={self.ulysses_sequence_parallel_size}: a model with images "
                f"({hf_config.model_type}) is computed by one rank alone; set 1"
            )
        hf_config._attn_implementation = for_text(hf_config, ATTENTION_NAME)
        self._model = cast("PreTrainedModel", super()._build_module())
        bind_recurrent_layers(self._model, team=self.team)
        check_model(self._model, max_path_len=1)
        if self.engine_config.freeze_vision_tower and reads_images(hf_config):
            vision_tower(self._model).requires_grad_(False)
        if self.engine_config.router_replay.mode != "disabled":
            self._replay = RouterReplay(self._model)
        return self._model

    @override
    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> Any:
        """Compute one mini-batch as its forest; see `BaseEngine.forward_backward_batch` for arguments and result.

        `model_output` is empty unless `forward_only`; `loss` has one number per call of the loss.

        Raises:
            ValueError: The tree path cannot compute the rows (`check_rows`), or one of them cannot be packed.
        """
        check_rows(data, with_images=reads_images(self._model.config))
        self._routes = self._start_routes(data, forward_only=forward_only)
        self._announce_denominators(data)
        cost = self._costs["infer" if forward_only else "update"]
        mode: Mode = "forward" if forward_only else "rows" if is_sum_over_rows(loss_function) else "joint"
        batch = self._split(data, cost_model=cost.model, mode=mode)
        ranks = self._exchange_work(batch, mode=mode)
        steps = steps_of([rank.num_calls for rank in ranks], mode=mode)
        names = self._output_names(calculate_entropy=_wants_entropy(data))
        result = MiniBatchResult(tu.get(data, "input_ids"), output_names=names if forward_only else ())
        losses = RowLosses(loss_function, result, group=self.get_data_parallel_group(), scaler=self.scaler)
        clock, store_bytes = PackClock(get_device_name()), 0
        for number, step in enumerate(steps):
            mine = [batch.micro_batches[index] for index in step.ranges[self.get_data_parallel_rank()]]
            rows = [MicroBatchRows(micro, data, names=names, shift=self._output_shift) for micro in mine]
            is_last = number == len(steps) - 1
            with clock.measure(), torch.profiler.record_function(f"micro_batch{number}"):
                step_bytes = self._run(rows, data, losses, mode=mode, calls=step.calls, is_last=is_last)
            store_bytes = max(store_bytes, step_bytes)
        if not batch.micro_batches:
            losses.of_nothing(data, names=names)
        # Fitted costs decide which rank computes what, so a training run that must repeat bit for bit has none.
        predicted_s = [sum(map(cost.model.predict, rank.works)) for rank in ranks]
        if not self.engine_config.full_determinism:
            learn_costs(cost, [step.works(ranks) for step in steps], seconds=clock.seconds())
        if not forward_only:
            counts = ForestCounts(max_store_bytes=store_bytes)
            if self._routes is not None:
                counts += self._routes.counts
            self._record(cost, ranks, clock=clock, predicted_s=predicted_s, counts=counts)
        outputs = result.as_verl()
        if self._routes is not None:
            outputs["model_output"] |= self._routes.outputs(team=self.team, device=device_of_rank())
        return outputs

    def _start_routes(self, data: TensorDict, *, forward_only: bool) -> MiniBatchRoutes | None:
        """Start to record or to impose routes of experts, if `router_replay.mode` says so and the call wants it."""
        column = data.pop(ROUTES, None)  # No loss reads it
        if self._replay is None:
            return None
        self._replay.begin()
        if not tu.get(data, "enable_routing_replay", default=True):
            return None
        records = forward_only and self.engine_config.router_replay.mode == "R2"
        return MiniBatchRoutes(self._replay, column, input_ids=tu.get(data, "input_ids"), records=records)

    def _announce_denominators(self, data: TensorDict) -> None:
        """Add the denominators of verl's losses: the trained tokens of all ranks and the number of ranks."""
        num_tokens = tu.get(data, "loss_mask").sum().to(device_of_rank())
        dist.all_reduce(num_tokens, group=self.get_data_parallel_group())
        tu.assign_non_tensor(data, sp_size=1, batch_num_tokens=num_tokens.item(), dp_size=self.get_data_parallel_size())

    def _split(self, data: TensorDict, *, cost_model: CostModel, mode: Mode) -> TreeBatch:
        """Cut this rank's rows into micro-batches, the same on all ranks of a team."""
        tokens, offsets = (each.cpu().numpy() for each in jagged(data["input_ids"]))
        images = rows_with_images(data, config=self._model.config)
        mask, mask_offsets = jagged(data["response_mask"] if "response_mask" in data else data["loss_mask"])
        row_lens = np.diff(offsets)
        # Length-dependent RoPE is refused only for rows that are long enough to be affected.
        check_model(self._model, max_path_len=int(row_lens.max()))
        temperature = tu.get(data, "temperature", default=1.0)
        capacity = self._capacity.of(data, forward_only=mode == "forward", longest_row=int(row_lens.max()))
        trained = trained_tokens(mask.cpu().numpy(), mask_lens=mask_offsets.diff().cpu().numpy(), row_lens=row_lens)
        numbers = [] if images is None else [images.number_F]
        if self.tree_config.sharing == "prompt":
            numbers.append(prompt_numbers(offsets, response_lens=mask_offsets.diff().cpu().numpy()))
        if isinstance(temperature, Tensor) and temperature.dim():
            # A tree token has one temperature, so rows with different temperatures do not merge.
            numbers.append(value_numbers(offsets, values=temperature.tolist()))
        keys = row_keys(tokens, *numbers)
        if self._routes is not None and self.tree_config.route_conflicts == "fork":
            keys = row_keys(keys, self._routes.fork(keys, offsets=offsets, trained=trained))
        split = partial(
            split_into_packs,
            tokens,
            keys=keys,
            offsets=offsets,
            trained=trained,
            capacity=capacity,
            config=self.tree_config,
            cost_model=cost_model,
            mode=mode,
        )
        # Clocks, and so fitted costs and time limits, differ from rank to rank. So one rank cuts for its team.
        batch = of_first_rank(split, team=self.team)
        return batch if images is None else with_images(batch, images, data, cost_model=cost_model)

    def _exchange_work(self, batch: TreeBatch, *, mode: Mode) -> list[RankWork]:
        """Exchange with all ranks what each of them computes."""
        mine = RankWork.of_batch(batch, mode=mode, scores_own_tokens=self._scores_own_tokens)
        ranks: list[RankWork] = gather(mine, group=self.get_data_parallel_group())
        self.num_micro_batches = max(len(rank.works) for rank in ranks)
        self.tree_counts = sum((rank.counts for rank in ranks), ForestCounts())
        self.computed_paths = ComputedPaths.sum(rank.paths for rank in ranks)
        return ranks

    def _run(
        self,
        rows: Sequence[MicroBatchRows],
        data: TensorDict,
        losses: RowLosses,
        *,
        mode: Mode,
        calls: NumCalls,
        is_last: bool,
    ) -> int:
        """Run micro-batches one after another, in step with the other ranks: idle calls fill up the rest.

        Return the most bytes that a store held.
        """
        runs = [self._relay(each, data, mode=mode) for each in rows]
        first = [partial(run.first, number) for run in runs for number in range(run.num_first)]
        for call in range(calls.num_first):
            if call < len(first):
                first[call]()
            else:
                with torch.no_grad():
                    self._idle(data)
        last = [
            partial(run.last, number, partial(_loss, each, losses))
            for each, run in zip(rows, runs, strict=True)
            for number in range(run.num_last)
        ]
        for call in range(calls.num_last):
            with self._gradient_sync_context(is_last_micro_batch=is_last and call == calls.num_last - 1):
                if call < len(last):
                    last[call]()
                else:
                    (self._idle(data).sum() * 0.0).backward()
        if mode == "forward":
            for each, run in zip(rows, runs, strict=True):
                losses.of_forward(each, run.scores_CT)
        return max((run.store.num_bytes for run in runs), default=0)

    def _relay(self, rows: MicroBatchRows, data: TensorDict, *, mode: Mode) -> RelayRun:
        """Plan the model calls of a micro-batch."""
        if rows.micro.is_relayed and mode != "forward":
            check_repeatable(self.module)
        temperature, wants_entropy = rows.temperature(), _wants_entropy(data)

        def compute(call: RelayCall, plan: AttentionPlan) -> Tensor:
            return self._scores(
                call,
                rows.layout,
                plan=plan,
                images=rows.micro.images,
                temperature=temperature,
                calculate_entropy=wants_entropy,
            )

        # A loss that couples rows reads all of them at once.
        max_loss_terms = None if mode == "joint" else self.tree_config.max_loss_terms
        return RelayRun(
            rows.micro.calls(scores_own_tokens=self._scores_own_tokens, max_loss_terms=max_loss_terms),
            compute if self._routes is None else self._routes.around(compute, rows.micro),
            mode=mode,
            device=device_of_rank(),
            backend=self.tree_config.backend,
            store_on_host=self.tree_config.relay_store == "host",
            team=self.team,
        )

    def _idle(self, data: TensorDict) -> Tensor:
        """Run the model on the smallest pack, because the other ranks wait in its collectives; return its scores."""
        layout = first_token_pack(int(jagged(tu.get(data, "input_ids"))[0][0]))
        return self.score_pack(layout, calculate_entropy=_wants_entropy(data))

    def score_pack(self, layout: TreeLayout, *, temperature: float = 1.0, calculate_entropy: bool) -> Tensor:
        """Run the model on a pack that belongs to no rows and score all of it, (C, K); `layout` is on the host."""
        if self._replay is not None:
            self._replay.begin()
        tokens = np.arange(layout.num_tokens)
        scorer_T = tokens if self._scores_own_tokens else layout.parent_T.numpy()
        call = RelayCall.of_pack(layout.subtree_end_T.numpy(), scorer_T=scorer_T)
        return self._scores(
            call,
            layout.to(device_of_rank()),
            plan=AttentionPlan.from_subtree_end(
                call.subtree_end,
                backend=self.tree_config.backend,
                device=device_of_rank(),
                shard=SequenceShard(layout.num_tokens, self.team),
            ),
            images=PackImages.of_text(layout) if reads_images(self._model.config) else None,
            temperature=temperature,
            calculate_entropy=calculate_entropy,
        )

    def probe(self, layout: TreeLayout, *, forward_only: bool, is_last: bool) -> None:
        """Run the model, and a backward, on a pack of which everything is scored; see `ProbedEngine`."""
        with torch.no_grad() if forward_only else self._gradient_sync_context(is_last_micro_batch=is_last):
            # Any temperature but 1 takes one more copy of a chunk's logits.
            scores_CK = self.score_pack(layout, temperature=2.0, calculate_entropy=True)
            if not forward_only:
                scores_CK.sum().backward()

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype in which the model computes its keys and values."""
        return self._autocast_dtype

    def _output_names(self, *, calculate_entropy: bool) -> tuple[str, ...]:
        """Return verl's names of the kinds of scores."""
        return ("log_probs", "entropy") if calculate_entropy else ("log_probs",)

    def _scores(
        self,
        call: RelayCall,
        layout: TreeLayout,
        *,
        plan: AttentionPlan,
        images: PackImages | None,
        temperature: float | Tensor,
        calculate_entropy: bool,
    ) -> Tensor:
        """Run the model on one call and return its scores, (C, K)."""
        with self._autocast():
            return call_scores(
                cast("PreTrainedModel", self.module),  # FSDP2 keeps the model's own class
                call,
                layout,
                plan=plan,
                images=images,
                temperature=temperature,
                calculate_entropy=calculate_entropy,
                chunk_size=self.tree_config.logits_chunk_size,
            )

    def _record(
        self,
        cost: CostFitter,
        ranks: Sequence[RankWork],
        *,
        clock: PackClock,
        predicted_s: Sequence[float],
        counts: ForestCounts,
    ) -> None:
        """Record how the ranks worked on an update; `counts` is what is known only now."""
        mine = (clock.busy_s(), counts, cost.metrics(prefix="tree/cost_model"))
        measured_s, all_counts, metrics = zip(*gather(mine, group=self.get_data_parallel_group()), strict=True)
        self.rank_times = RankTimes.of_ranks(
            predicted_s=predicted_s, measured_s=measured_s, packing_s=[rank.packing_s for rank in ranks]
        )
        self.cost_metrics = metrics[0]
        self.tree_counts += sum(all_counts, ForestCounts())

    def _autocast(self) -> AbstractContextManager[Any]:
        """Autocast as verl's `forward_step` does: only if the parameters are not float32."""
        if self._autocast_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(device_type=get_device_name(), dtype=self._autocast_dtype)


def _loss(rows: MicroBatchRows, losses: RowLosses, scores_CT: Tensor, leaves: IntArray) -> Tensor:
    """Compute the loss of some leaves of a micro-batch."""
    return losses.of_rows(*rows.select(scores_CT, leaves))


def _wants_entropy(data: TensorDict) -> bool:
    return bool(tu.get(data, "calculate_entropy", default=False))
