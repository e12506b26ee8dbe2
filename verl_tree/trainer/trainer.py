"""verl's synchronous PPO trainer for sessions with several leaves.

What differs from `PPOTrainerSync` (verl 0.9.1), each through one overridden method:

- rows: a prompt group stays in one mini-batch, and on one rank unless the ranks would be too uneven
  (`_balance_batch`, `batching`), in an order that does not depend on when rows arrived; which rank is decided by
  the cost model that the workers have fitted (`cost_model`); padding rows have two tokens and are left out of
  advantages, metrics and dumps;
- workers: `verl_tree.trainer.worker`, which cut mini-batches as planned here (`_init_resource_pool_mgr`,
  `_update_*`);
- advantages: our estimators are told which session a row belongs to, and its tokens where they need them
  (`_compute_advantage`, `advantages`);
- failures: sessions and prompts that fail are counted and printed with their cause (`step`, `_validate`);
- replay: stored rollouts come back with all their leaves (`replay`);
- looking: trees are stored and shown (`step`, `_validate`, `tree_log`).

`tree.enabled` changes nothing here: a flat run has the same rows, cuts and advantages.
"""

import logging
from collections.abc import Sequence
from itertools import count, islice

import numpy as np
import ray
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.profiler import marked_timer
from verl.utils.seqlen_balancing import log_seqlen_unbalance

from rollout_hooks.capture.report import CaptureReport
from rollout_hooks.worker import TreeAgentLoopManager
from verl_tree.cost.model import CostModel, WorkProfile
from verl_tree.packing.counts import ForestCounts
from verl_tree.trainer import advantages, replay
from verl_tree.trainer.batching import MiniBatchPlan, assign_rows, group_rows
from verl_tree.trainer.metrics import (
    capture_metrics,
    describe_failures,
    describe_step,
    promote_tree_metrics,
    session_metrics,
    tree_tokens_per_s,
)
from verl_tree.trainer.padding import append_padding_rows, fill_padding_rows, real_rows
from verl_tree.trainer.tree_log import TreeLog
from verl_tree.trainer.worker import TreeActorRolloutRefWorker, TreeTrainingWorker
from verl_tree.tree import TokenForest

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.05
"""Between two looks for ended prompts; verl's 2 s rounds every generation phase up."""


class TreePPOTrainerSync(PPOTrainerSync):
    """verl's synchronous trainer; see the module's docstring for what differs.

    Args:
        config: the composed configuration `tree_ppo`.

    Raises:
        ValueError: the critic asks for other mini-batches than the actor.
    """

    def __init__(self, config: DictConfig) -> None:
        advantages.register()
        replay.register()
        super().__init__(config)
        actor_groups = config.actor_rollout_ref.actor.ppo_mini_batch_size
        if self.use_critic and config.critic.ppo_mini_batch_size != actor_groups:
            raise ValueError(
                f"critic.ppo_mini_batch_size={config.critic.ppo_mini_batch_size} and "
                f"actor_rollout_ref.actor.ppo_mini_batch_size={actor_groups} differ: actor and critic share "
                "one cut of the batch, set them to the same number"
            )
        self._prompt_numbers = count()
        self._plan: MiniBatchPlan | None = None
        self._cost_model = CostModel.prior()
        self._tree_log = TreeLog.from_config(config)

    def _build_replay_buffer(self) -> ReplayBuffer:
        buffer = super()._build_replay_buffer()
        if type(buffer) is ReplayBuffer:  # a sampler of the user's keeps its own interval
            buffer.poll_interval = POLL_INTERVAL_S
        return buffer

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in self.role_worker_mapping:
            worker = TreeTrainingWorker if role == Role.Critic else TreeActorRolloutRefWorker
            self.role_worker_mapping[role] = ray.remote(worker)

    # ------------------------------------------------------------------ rows

    def _fetch_one_gen_batch(self) -> TensorDict:
        """Draws prompts whose uids sort in the order in which they were drawn.

        Rows arrive in the order in which sessions end; their keys then still say which prompt came first, in
        this trainer as in stored rollouts.
        """
        batch = super()._fetch_one_gen_batch()
        uids = [f"{next(self._prompt_numbers):09d}-{uid}" for uid in batch["uid"]]
        tu.assign_non_tensor_stack(batch, "uid", uids)
        return batch

    def _balance_batch(
        self,
        batch: KVBatchMeta,
        metrics: dict[str, float],
        logging_prefix: str = "global_seqlen",
        keep_minibatch: bool = False,
    ) -> KVBatchMeta:
        """Orders the rows rank by rank and mini-batch by mini-batch, and keeps the plan for the updates."""
        stored = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["input_ids", "response_mask"]
        )
        sequences = [row.numpy() for row in stored["input_ids"].unbind()]
        masks = [row.numpy() for row in stored["response_mask"].unbind()]
        groups = group_rows(batch.keys)
        actor = self.config.actor_rollout_ref.actor
        assignment = assign_rows(
            groups,
            profiles=[_profile(sequences, masks=masks, rows=group) for group in groups],
            model=self._cost_model,
            num_ranks=self._num_ranks(),
            groups_per_mini_batch=actor.ppo_mini_batch_size,
            shuffle_seed=(actor.data_loader_seed, self.global_steps) if actor.shuffle else None,
            # The other objectives count the leaves of a token, which must then be on one rank.
            cut_groups=self.config.tree.shared_tokens == "sum",
        )
        self._plan = assignment.plan
        metrics["tree/cut_groups"] = float(assignment.num_cut_groups)
        metrics["tree/cut_tokens"] = float(assignment.num_lost_tokens)
        if not self.config.tree.enabled:
            counts = count_flat(sequences, row_order=assignment.row_order, cells=assignment.plan.rows)
            metrics.update(sum([counts] * actor.ppo_epochs, ForestCounts()).metrics())

        batch = append_padding_rows(batch, num_rows=assignment.num_padding, eos_token_id=self.tokenizer.eos_token_id)
        batch.reorder(list(assignment.row_order))
        num_rank_rows = len(batch) // len(assignment.plan.rows)
        ranks = [range(start, start + num_rank_rows) for start in range(0, len(batch), num_rank_rows)]
        metrics.update(log_seqlen_unbalance([tag["seq_len"] for tag in batch.tags], ranks, prefix=logging_prefix))
        return batch

    def _num_ranks(self) -> int:
        """Data-parallel size of the actor, which the critic shares."""
        workers = self.actor_rollout_wg
        if "actor" not in workers._dispatch_info:
            workers._dispatch_info["actor"] = workers._query_dispatch_info("actor")
        return max(workers._dispatch_info["actor"]) + 1

    # ------------------------------------------------------------------ one step

    def step(self, metrics: dict[str, float], timing_raw: dict[str, float]) -> KVBatchMeta:
        """Trains one step; adds the metrics of sessions, capture and trees, and reports what failed."""
        try:
            batch = super().step(metrics, timing_raw)
        except RuntimeError:
            # verl stops here when no prompt has a single trajectory, and cannot say why.
            self._report_failures("train")
            raise
        rows = real_rows(batch)
        scores = tq.kv_batch_get(keys=rows.keys, partition_id=rows.partition_id, select_fields=["rm_scores"])
        rewards = np.array([row.sum().item() for row in scores["rm_scores"].unbind()])
        metrics.update(session_metrics(rows.keys, rewards=rewards))
        report = self._report_failures("train")
        if report is not None:
            metrics.update(capture_metrics(report))

        num_missing = self.config.data.train_batch_size - len(group_rows(rows.keys))
        num_reported = 0 if report is None else len(report.failed_prompts)
        if num_missing > num_reported:
            logger.warning(
                "step %d: %d prompts have no trajectory, %d were reported; see the agent loop workers' log",
                self.global_steps,
                num_missing,
                num_reported,
            )
        metrics["tree/failed_prompts"] = float(max(num_missing, num_reported))
        metrics.update(tree_tokens_per_s(metrics, update_s=timing_raw.get("update_actor", 0.0)))
        with marked_timer("tree_log", timing_raw):
            self._tree_log.log_step(self, rows)
        return batch

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        """Computes advantages of the real rows only: the mean KL and its controller must not see padding."""
        rows = real_rows(batch)
        with advantages.announce_rows(self._rows_of(rows)):
            written = super()._compute_advantage(rows, metrics)
        return fill_padding_rows(batch, written=written)

    def _rows_of(self, batch: KVBatchMeta) -> advantages.Rows:
        """What the estimator must know of the rows; their tokens only if it reads them."""
        if self.config.algorithm.adv_estimator not in advantages.ESTIMATORS_ON_NODES:
            return advantages.Rows(keys=batch.keys)
        stored = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["input_ids", "response_mask"]
        )
        return advantages.Rows(
            keys=batch.keys,
            sequences=[row.numpy() for row in stored["input_ids"].unbind()],
            response_lens=[len(row) for row in stored["response_mask"].unbind()],
        )

    def _update_critic(self, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        batch.extra_info.update(self._plan.to_extra_info())
        return super()._update_critic(batch, metrics)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        batch.extra_info.update(self._plan.to_extra_info())
        batch = super()._update_actor(batch, metrics)
        promote_tree_metrics(metrics)
        if "tree/cost_model/s_per_token" in metrics:
            self._cost_model = CostModel.from_metrics(metrics, prefix="tree/cost_model")
        return batch

    def _compute_metrics(
        self,
        batch: KVBatchMeta,
        metrics: dict[str, float],
        timing_raw: dict[str, float],
        global_steps: int,
        epoch: int,
    ) -> None:
        super()._compute_metrics(real_rows(batch), metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        print(describe_step(metrics, step=global_steps, num_steps=self.total_training_steps), flush=True)

    def _log_rollout_data(self, batch: KVBatchMeta, timing_raw: dict[str, float], rollout_data_dir: str) -> None:
        super()._log_rollout_data(real_rows(batch), timing_raw, rollout_data_dir)

    # ------------------------------------------------------------------ failures

    def _validate(self) -> dict[str, float]:
        """verl's validation (the last leaf of each session), and what failed in it."""
        try:
            with self._tree_log.watch_validation(self):
                metrics = super()._validate()
        except (RuntimeError, ValueError):
            # What verl raises when no session left a row.
            self._report_failures("val")
            raise
        report = self._report_failures("val")
        return metrics if report is None else metrics | capture_metrics(report, prefix="val-aux/tree")

    def _report_failures(self, partition: str) -> CaptureReport | None:
        """Logs what failed since the last report; None where another agent loop manager does not report."""
        if not isinstance(self.agent_loop_manager, TreeAgentLoopManager):
            return None
        report = self.agent_loop_manager.drain_capture_report(partition=partition)
        failures = describe_failures(report)
        if failures is not None:
            logger.warning("step %d (%s): %s", self.global_steps, partition, failures)
        return report


def _profile(sequences: list[np.ndarray], *, masks: list[np.ndarray], rows: list[int]) -> WorkProfile:
    """The work of a group; a mask covers the end of its row."""
    trained = []
    for row in rows:
        mask = np.zeros(len(sequences[row]), dtype=bool)
        mask[len(mask) - len(masks[row]) :] = masks[row]
        trained.append(mask)
    return WorkProfile.from_forest(_forest(sequences, rows), trained=trained)


def _forest(sequences: list[np.ndarray], rows: list[int]) -> TokenForest:
    return TokenForest.from_sequences([sequences[row] for row in rows])


def count_flat(
    sequences: list[np.ndarray], *, row_order: Sequence[int], cells: Sequence[Sequence[int]]
) -> ForestCounts:
    """Counts what verl's own engine computes: every row in full, whatever the rows of a mini-batch share.

    Args:
        sequences: the trajectories.
        row_order: rows as dispatched; what is not an index into `sequences` is padding.
        cells: per rank, per mini-batch: number of rows.

    Returns:
        Counts whose tree tokens are what a tree engine would find in the same mini-batches.
    """
    counts = ForestCounts()
    rows = iter(row_order)
    for num_rows in (num_rows for rank_rows in cells for num_rows in rank_rows):
        members = [row for row in islice(rows, num_rows) if row < len(sequences)]
        if members:
            forest = _forest(sequences, members)
            counts = counts + ForestCounts(
                num_flat_tokens=forest.num_flat_tokens,
                num_tree_tokens=forest.num_tokens,
                num_packed_tokens=forest.num_flat_tokens,
                num_nodes=forest.num_nodes,
                num_leaves=forest.num_leaves,
                depth=forest.depth,
            )
    return counts
