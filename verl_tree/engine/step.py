"""A mini-batch of verl as its forest, whatever the engine: rows to forest, packs and sections, losses, counts.

A micro-batch is a pack, or one tree in sections (`verl_tree.relay.run`). Its rows gather their log-probs, entropy or
values from the tree (`expand`). The backward of that gather sums over the rows, which gives the gradient of the flat
rows. No engine is in here: `ModelCalls` says what one must bring.

Three differences from verl's flat engines are intended:
- positions that no loss reads are not scored: their log-probs and entropy are 0;
- rows that no loss reads (padding) are not computed, and neither are, in an update, rows that teach nothing;
- a rank reports one value per metric, however often it computes the loss.

Legend: T tree tokens of a micro-batch, C kinds of scores, K scores of a model call.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name

from verl_tree import clashes
from verl_tree.config import TreeConfig
from verl_tree.cost.fit import CostFitter
from verl_tree.cost.model import CostModel
from verl_tree.engine.canary import Canary, DrawnRows, Finding
from verl_tree.engine.costs.capacity import CapacityChoice
from verl_tree.engine.costs.pack_times import PackClock, learn_costs
from verl_tree.engine.heads import POLICY, Head
from verl_tree.engine.losses.live_rows import leaves_out, live_rows, of_live_rows
from verl_tree.engine.losses.row_choice import choose_rows
from verl_tree.engine.losses.row_losses import is_sum_over_rows
from verl_tree.engine.losses.top_k import BatchReading, reading_of
from verl_tree.engine.model_calls import ModelCalls
from verl_tree.engine.routes.router_replay import ROUTES, MiniBatchRoutes
from verl_tree.engine.rows.columns import check_rows, gather, jagged
from verl_tree.engine.rows.computed_paths import ComputedPaths
from verl_tree.engine.rows.media import rows_with_images, with_images
from verl_tree.engine.rows.micro_batch import LossFunction, MicroBatchRows, RowLosses, device_of_rank
from verl_tree.engine.rows.packs import TreeBatch, first_token_pack, split_into_packs
from verl_tree.engine.rows.results import MiniBatchResult
from verl_tree.engine.rows.steps import RankWork, steps_of
from verl_tree.packing.counts import ForestCounts, RankTimes
from verl_tree.relay.run import Mode, NumCalls
from verl_tree.tree.nodes import IntArray
from verl_tree.tree.row_keys import prompt_numbers, row_keys, value_numbers
from verl_tree.tree.rows import trained_tokens

logger = logging.getLogger(__name__)

T = TypeVar("T")


class TreeEngine(ModelCalls):
    """An engine of verl that computes a mini-batch as its forest; `ModelCalls` says what an engine must bring for it.

    Attributes:
        tree_counts: Tokens, nodes and packs of the last mini-batch, summed over all ranks.
        computed_paths: What all ranks computed of it, if it was an update.
        num_micro_batches: Packs that each rank ran for it (the largest number of any rank).
        rank_times: How evenly the ranks worked on the last update.
        cost_metrics: The cost model of updates as rank 0 has fitted it, as metrics.
        canary: What compares rows of updates with the model's own forward.
    """

    def __init__(self, *, head: Head, tree_config: TreeConfig) -> None:
        super().__init__(head=head, tree_config=tree_config)
        self.tree_counts = ForestCounts()
        self.computed_paths = ComputedPaths()
        self.num_micro_batches = 0
        self.rank_times = RankTimes()
        self.cost_metrics: dict[str, float] = {}
        self._costs = {"update": CostFitter(), "infer": CostFitter()}
        self._capacity = CapacityChoice(self)
        self.canary = Canary(self)
        self._routes: MiniBatchRoutes | None = None
        self._reading: BatchReading | None = None

    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> Any:
        """Compute one mini-batch as its forest; see `BaseEngine.forward_backward_batch` for arguments and result.

        `model_output` is empty unless `forward_only`; `loss` has one number per call of the loss.

        Raises:
            ValueError: The tree path cannot compute the rows (`check_rows`), or one of them cannot be packed.
        """
        check_rows(data, with_images=self.reads_images)
        self._routes = self._start_routes(data, forward_only=forward_only)
        self._reading = self._start_reading(data, loss_function)
        self._announce_denominators(data)
        cost = self._costs["infer" if forward_only else "update"]
        mode: Mode = "forward" if forward_only else "rows" if is_sum_over_rows(loss_function) else "joint"
        leaves = not forward_only and self._leaves_out(loss_function)
        data, live = self._chosen(data) if leaves else (data, None)
        batch = self._split(data, cost_model=cost.model, mode=mode, live=live)
        ranks = self._exchange_work(batch, mode=mode)
        drawn = None if forward_only else self.canary.draw(batch, data, routes=self._routes)
        steps = steps_of([rank.num_calls for rank in ranks], mode=mode, in_one=self.has_schedule)
        names = self.head.names_of(calculate_entropy=_wants_entropy(data))
        names += () if self._reading is None else self._reading.names
        result = MiniBatchResult(tu.get(data, "input_ids"), output_names=names if forward_only else ())
        losses = RowLosses(loss_function, result, group=self.group, renamed=of_live_rows if leaves else dict)
        clock, store_bytes = PackClock(get_device_name()), 0
        for number, step in enumerate(steps):
            mine = [batch.micro_batches[index] for index in step.ranges[dist.get_rank(self.group)]]
            rows = [MicroBatchRows(micro, data, names=names, shift=self.head.shift) for micro in mine]
            is_last = number == len(steps) - 1
            with clock.measure(), torch.profiler.record_function(f"micro_batch{number}"):
                step_bytes = self._run(rows, data, losses, drawn, mode=mode, calls=step.calls, is_last=is_last)
            store_bytes = max(store_bytes, step_bytes)
        if not batch.micro_batches and self.has_outputs:
            losses.of_nothing(data, names=names)
        # Fitted costs decide which rank computes what, so a training run that must repeat bit for bit has none.
        predicted_s = [sum(map(cost.model.predict, rank.works)) for rank in ranks]
        if not self.engine_config.full_determinism:
            learn_costs(cost, [step.works(ranks) for step in steps], seconds=clock.seconds())
        if not forward_only:
            counts = ForestCounts(max_store_bytes=store_bytes)
            if self._routes is not None:
                counts += self._routes.counts
            found = None if drawn is None else self.canary.compare(drawn, partial(self._idle, data))
            self._record(cost, ranks, clock=clock, predicted_s=predicted_s, counts=counts, found=found)
        routes = {} if self._routes is None else self._routes.outputs(group=self.route_group, device=device_of_rank())
        if not self.has_outputs:
            return {}
        outputs = result.as_verl()
        outputs["model_output"] |= routes
        return outputs

    def _start_routes(self, data: TensorDict, *, forward_only: bool) -> MiniBatchRoutes | None:
        """Start to record or to impose routes of experts, if `router_replay.mode` says so and the call wants it."""
        column = data.pop(ROUTES, None)  # No loss reads it
        if self.replay is None:
            return None
        self.replay.begin()
        if not tu.get(data, "enable_routing_replay", default=True):
            return None
        records = forward_only and self.engine_config.router_replay.mode == "R2"
        return MiniBatchRoutes(self.replay, column, input_ids=tu.get(data, "input_ids"), records=records)

    def _start_reading(self, data: TensorDict, loss_function: LossFunction | None) -> BatchReading | None:
        """Find out what else than log-probs and entropy is to be read of the logits."""
        num_ids = self.model_config.hf_config.get_text_config(decoder=True).vocab_size
        reading = reading_of(data, loss_function, num_ids=num_ids)
        if reading is not None:
            used = {
                clashes.TREES: "tree.enabled=true",
                clashes.TOP_K: "distillation.distillation_loss.loss_mode=forward_kl_topk",
                clashes.ULYSSES: self.team is not None and f"ulysses_sequence_parallel_size={self.team_size}",
            }
            clashes.refuse(used)
        return reading

    def _chosen(self, data: TensorDict) -> tuple[TensorDict, NDArray[np.bool_]]:
        """Return which rows an update computes, and the rows with the weights of those that were drawn."""
        live = live_rows(data)
        if self.tree_config.keep_tokens is None:
            return data, live
        data = data.copy()  # shallow: the caller's advantages stay
        return data, choose_rows(data, live, share=self.tree_config.keep_tokens)

    def _leaves_out(self, loss_function: LossFunction | None) -> bool:
        """Whether an update leaves out rows that teach nothing."""
        leaves, reason = leaves_out(loss_function, self.tree_config), "this loss"
        if leaves and self.auxiliary_loss is not None:
            leaves, reason = False, self.auxiliary_loss
            _tell_all_rows(reason)
        keep = self.tree_config.keep_tokens
        if keep is not None and not leaves and self.head is POLICY:
            raise ValueError(f"tree.keep_tokens={keep}: {clashes.not_drawn(reason)}")
        return leaves

    def _announce_denominators(self, data: TensorDict) -> None:
        """Add the denominators of verl's losses: the trained tokens of all ranks and the number of ranks."""
        num_tokens = tu.get(data, "loss_mask").sum().to(device_of_rank())
        dist.all_reduce(num_tokens, group=self.group)
        dp_size = dist.get_world_size(self.group)
        tu.assign_non_tensor(data, sp_size=1, batch_num_tokens=num_tokens.item(), dp_size=dp_size)

    def _split(
        self, data: TensorDict, *, cost_model: CostModel, mode: Mode, live: NDArray[np.bool_] | None
    ) -> TreeBatch:
        """Cut this rank's rows, or the `live` ones, into micro-batches, the same on all ranks of a replica."""
        tokens, offsets = (each.cpu().numpy() for each in jagged(data["input_ids"]))
        images = rows_with_images(data, config=self.model_config.hf_config)
        mask, mask_offsets = jagged(data["response_mask"] if "response_mask" in data else data["loss_mask"])
        row_lens = np.diff(offsets)
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
            live=live,
            capacity=capacity,
            config=self.tree_config,
            cost_model=cost_model,
            mode=mode,
        )
        # Clocks, and so fitted costs and time limits, differ from rank to rank. So one rank cuts for its replica.
        batch = _of_first_rank(split, replica=self.replica)
        is_relayed = mode != "forward" and any(micro.is_relayed for micro in batch.micro_batches)
        self.check(max_path_len=int(row_lens.max()), is_relayed=is_relayed)
        return batch if images is None else with_images(batch, images, data, cost_model=cost_model)

    def _exchange_work(self, batch: TreeBatch, *, mode: Mode) -> list[RankWork]:
        """Exchange with all ranks what each of them computes."""
        mine = RankWork.of_batch(batch, mode=mode, scores_own_tokens=self.head.scores_own_tokens)
        ranks: list[RankWork] = gather(mine, group=self.group)
        self.num_micro_batches = max(len(rank.works) for rank in ranks)
        self.tree_counts = sum((rank.counts for rank in ranks), ForestCounts())
        self.computed_paths = ComputedPaths.sum(rank.paths for rank in ranks)
        return ranks

    def _run(
        self,
        rows: Sequence[MicroBatchRows],
        data: TensorDict,
        losses: RowLosses,
        drawn: DrawnRows | None,
        *,
        mode: Mode,
        calls: NumCalls,
        is_last: bool,
    ) -> int:
        """Run the micro-batches of a step; return the most bytes that their stores held."""
        reading = self._reading
        runs = [
            self.relay(
                each,
                mode=mode,
                calculate_entropy=_wants_entropy(data),
                reading=None if reading is None else reading.of_micro_batch(each.micro),
                around=None if self._routes is None else partial(self._routes.around, micro=each.micro),
            )
            for each in rows
        ]
        first = [partial(run.first, number) for run in runs for number in range(run.num_first)]
        last = [
            partial(run.last, number, partial(_loss, each, losses, drawn))
            for each, run in zip(rows, runs, strict=True)
            for number in range(run.num_last)
        ]
        idle = partial(self._idle, data)
        first, last = (
            self.with_idle(mine, idle, num_calls=num)
            for mine, num in ((first, calls.num_first), (last, calls.num_last))
        )
        self.run(first, last, is_last=is_last)
        if mode == "forward" and self.has_outputs:
            for each, run in zip(rows, runs, strict=True):
                losses.of_forward(each, run.scores_CT)
        return sum(run.store.num_bytes for run in runs)

    def _idle(self, data: TensorDict) -> Tensor:
        """Run the model on the smallest pack and return a loss of 0, or what it hands on."""
        layout = first_token_pack(int(jagged(tu.get(data, "input_ids"))[0][0]))
        made = self.score_pack(layout, calculate_entropy=_wants_entropy(data))
        return made.sum() * 0.0 if self.makes_scores else made  # the pack has a score, so that its backward runs

    def _record(
        self,
        cost: CostFitter,
        ranks: Sequence[RankWork],
        *,
        clock: PackClock,
        predicted_s: Sequence[float],
        counts: ForestCounts,
        found: Finding | None,
    ) -> None:
        """Record how the ranks worked on an update; `counts` and `found` are what is known only now."""
        mine = (clock.busy_s(), counts, cost.metrics(prefix="tree/cost_model"), found)
        measured_s, all_counts, metrics, all_found = zip(*gather(mine, group=self.group), strict=True)
        self.rank_times = RankTimes.of_ranks(
            predicted_s=predicted_s, measured_s=measured_s, packing_s=[rank.packing_s for rank in ranks]
        )
        self.cost_metrics = metrics[0]
        self.tree_counts += sum(all_counts, ForestCounts())
        self.canary.conclude(all_found)


@cache
def _tell_all_rows(setting: str) -> None:
    if dist.get_rank() == 0:
        logger.warning("tree.compute=live: updates compute all rows, because of %s", setting)


def _loss(
    rows: MicroBatchRows, losses: RowLosses, drawn: DrawnRows | None, scores_CT: Tensor, leaves: IntArray
) -> Tensor:
    """Compute the loss of some leaves of a micro-batch."""
    of_rows, outputs = rows.select(scores_CT, leaves)
    if drawn is not None:
        drawn.see(rows, leaves, outputs)
    return losses.of_rows(of_rows, outputs)


def _wants_entropy(data: TensorDict) -> bool:
    return bool(tu.get(data, "calculate_entropy", default=False))


def _of_first_rank(make: Callable[[], T], *, replica: dist.ProcessGroup | None) -> T:
    """Return what the first rank of a replica makes, on all its ranks; None is a rank alone."""
    if replica is None:
        return make()
    made = [make() if dist.get_rank(replica) == 0 else None]
    dist.broadcast_object_list(made, group=replica, group_src=0)
    return cast("T", made[0])
