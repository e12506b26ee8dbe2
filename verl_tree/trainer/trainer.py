"""What every PPO trainer of verl gets for sessions with several leaves; `modes` has the trainers themselves.

What differs from `PPOTrainer` (verl 0.9.1), each through an overridden method:

- Rows (`_balance_batch`): a prompt group stays in one mini-batch, and on one rank unless the ranks would be too uneven
  (`batching`). The order does not depend on when rows arrived. The workers' fitted cost model balances the ranks.
  Advantages, metrics and dumps leave padding rows out (`padding`). `tree.rows` may leave out others (`chosen_rows`).
- Workers (`_init_resource_pool_mgr`, `_update_*`) cut mini-batches as planned here (`worker`); those of one node are on
  the trainer's (`pools`).
- A teacher may be the reference workers' model (`teacher`).
- Columns of tokens are read and written by the ranks (`beside_rows`, behind verl's mode).
- Log-probs of the rollout engine (`_compute_old_log_prob`) are compared with the trainer's (`log_prob_guard`).
- Failed sessions and prompts (`step`, `_validate`) are counted and printed with their cause.
- Replayed rollouts come back with all their leaves (`replay`).
- Trees (`step`, `_validate`) are stored and shown (`tree_log`), apart from those of earlier starts (`tree_folder`).
  Files are written beside training; `_save_checkpoint` and `_shutdown_dump_executor` wait for them.
- Starts and ends: see `resumable`.

`tree.enabled` changes nothing here: a flat training run has the same rows, mini-batches and advantages.
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from itertools import count
from typing import ClassVar, cast

import ray
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from typing_extensions import override
from verl.experimental.agent_loop import AgentLoopManager
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.utils import tensordict_utils as tu
from verl.utils.profiler import marked_timer
from verl.utils.seqlen_balancing import log_seqlen_unbalance
from verl.workers.engine_workers import ActorRolloutRefWorker

from rollout_hooks.capture.report import CaptureReport
from rollout_hooks.worker import TreeAgentLoopManager
from verl_tree.clashes import run_keeps_all_rows
from verl_tree.cost.model import CostModel
from verl_tree.packing.counts import ForestCounts
from verl_tree.records import StoredTree
from verl_tree.trainer import advantages
from verl_tree.trainer.advantages import REWARDS_ONLY
from verl_tree.trainer.hybrid_worker import TreeActorRolloutRefWorker
from verl_tree.trainer.pools import PoolsNearTrainer
from verl_tree.trainer.row_keys import number_sessions
from verl_tree.trainer.rows import replay
from verl_tree.trainer.rows.batching import MiniBatchPlan, assign_rows
from verl_tree.trainer.rows.chosen_rows import only_longest
from verl_tree.trainer.rows.no_trajectory import NoTrajectoryError
from verl_tree.trainer.rows.padding import append_padding_rows, fill_padding_rows, real_rows
from verl_tree.trainer.rows.replay_buffer import TreeReplayBuffer, TreeReplayBufferAsync, WatchedBuffer
from verl_tree.trainer.rows.row_check import check_step_rows
from verl_tree.trainer.rows.staleness import staleness_metrics
from verl_tree.trainer.rows.step_rows import StepRows
from verl_tree.trainer.rows.step_tokens import fetch_calls, fetch_cells, fetch_trees, flat_counts
from verl_tree.trainer.starts.restored import numbered_uid, take_over_restored
from verl_tree.trainer.starts.resumable import ResumableTrainer
from verl_tree.trainer.starts.tree_folder import take_over
from verl_tree.trainer.teacher import TeacherOnRanks
from verl_tree.trainer.told.log_prob_guard import LogProbGuard
from verl_tree.trainer.told.metrics import (
    capture_metrics,
    describe_cut_prompts,
    describe_failures,
    describe_step,
    describe_validation,
    session_metrics,
    tokens_per_s,
)
from verl_tree.trainer.told.tree_log import TreeLog, When
from verl_tree.trainer.told.update_metrics import as_numbers, step_metrics, take_tree_metrics
from verl_tree.trainer.worker import TreeTrainingWorker

logger = logging.getLogger(__name__)


class TreeTrainer(TeacherOnRanks, ResumableTrainer):
    """verl's trainer with trees, for a composed and validated configuration `tree_ppo`; put before a mode's class."""

    actor_worker: ClassVar[type[ActorRolloutRefWorker]] = TreeActorRolloutRefWorker
    """The class of the workers of policy and reference model."""
    _has_told_roles = False

    def __init__(self, config: DictConfig) -> None:
        advantages.register()
        replay.register()
        super().__init__(config)
        self._prompt_numbers = count()
        self._mini_batch_plan: MiniBatchPlan | None = None
        self._step_rows = StepRows()
        self._left_out: list[str] = []  # rows of the step that are not trained
        self._updates: list[dict[str, float]] = []
        self._kept_report = CaptureReport()
        self._cost_model = CostModel.prior()
        self._tree_log = TreeLog.from_config(config)
        self._log_prob_guard = LogProbGuard.from_config(config)

    @override
    def _build_replay_buffer(self) -> ReplayBuffer:
        buffer = super()._build_replay_buffer()
        ours = {ReplayBuffer: TreeReplayBuffer, ReplayBufferAsync: TreeReplayBufferAsync}.get(type(buffer))
        if ours is None:
            return buffer  # a user's own sampler stays
        # The prompts of a step and all that replaced them.
        made = ours.like(buffer, max_failed=2 * self.config.data.train_batch_size)
        made.on_listed = self._retry_lost
        return made

    @override
    def fit(self, agent_loop_manager: AgentLoopManager) -> None:
        """Train; see `PPOTrainer.fit`. Our manager retries what our replay buffer looks after."""
        if isinstance(agent_loop_manager, TreeAgentLoopManager):
            agent_loop_manager.retries = isinstance(self.replay_buffer, TreeReplayBuffer)
        super().fit(agent_loop_manager)

    def _retry_lost(self, open_uids: Set[str]) -> None:
        if isinstance(self.agent_loop_manager, TreeAgentLoopManager):
            self.agent_loop_manager.retry_lost(open_uids)

    @override
    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in self.role_worker_mapping:
            worker = TreeTrainingWorker if role == Role.Critic else self.actor_worker
            self.role_worker_mapping[role] = ray.remote(worker)
        self.resource_pool_manager = PoolsNearTrainer(self.resource_pool_manager.resource_pool_spec, self.mapping)

    @override
    def _fetch_one_gen_batch(self) -> TensorDict:
        batch = super()._fetch_one_gen_batch()
        # Sortable uids keep the order of the prompts although rows arrive out of order, also in a replay.
        uids = [numbered_uid(next(self._prompt_numbers), str(uid)) for uid in batch["uid"]]
        tu.assign_non_tensor_stack(batch, "uid", uids)
        return batch

    @override
    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if self._tree_log.writes:
            take_over(self._tree_log.page_dir, config=self.config, last_step=self.global_steps)
        # In synchronous mode nothing is in flight at a checkpoint.
        num_trained = self.global_steps * self.config.data.train_batch_size
        self._prompt_numbers = count(num_trained if self.trainer_mode == "sync" else take_over_restored("train"))

    @override
    def _save_checkpoint(self) -> None:
        # A start that goes on from the checkpoint does not write the trees before it again.
        self._tree_log.files.wait()
        super()._save_checkpoint()

    @override
    def _shutdown_dump_executor(self) -> None:
        self._tree_log.files.wait()
        super()._shutdown_dump_executor()

    @override
    def _balance_batch(
        self,
        batch: KVBatchMeta,
        metrics: dict[str, float],
        logging_prefix: str = "global_seqlen",
        keep_minibatch: bool = False,
    ) -> KVBatchMeta:
        """Order the rows by rank and mini-batch, and keep the mini-batch plan for the updates.

        Raises:
            ValueError: A row lacks what a step reads (`row_check`), or there is nothing to train on.
            RuntimeError: A server has died.
        """
        self.require_whole()
        check_step_rows(batch, reads_log_probs=self.config.actor_rollout_ref.rollout.calculate_log_probs)
        if self.config.tree.rows == "longest":
            # Not cleared before: the others have elements of them (rollout_hooks.capture.wire_columns).
            if self._left_out:
                assert batch.partition_id is not None
                tq.kv_clear(keys=self._left_out, partition_id=batch.partition_id)
            batch, self._left_out = only_longest(batch)
        rows = StepRows.fetch(batch)
        self._step_rows |= rows
        actor = self.config.actor_rollout_ref.actor
        assignment = assign_rows(
            rows.groups,
            profiles=rows.profiles(
                sharing=self.config.tree.sharing, live=rows.of_mixed_groups() if self._leaves_out_rows else None
            ),
            model=self._cost_model,
            num_ranks=self._num_ranks(),
            groups_per_mini_batch=actor.ppo_mini_batch_size,
            shuffle_seed=(actor.data_loader_seed, self.global_steps) if actor.shuffle else None,
            # The other objectives count the leaves of a token, so these must be on one rank.
            cut_groups=self.config.tree.shared_tokens == "sum",
        )
        self._mini_batch_plan = assignment.plan
        role_weight = self.config.tree.role_weight
        if self._weighs_sessions or role_weight:
            sessions = number_sessions(rows.keys) if self._weighs_sessions else range(len(rows.keys))
            role_weights = rows.role_weights(role_weight) if role_weight else None
            self._tell_unknown_roles(role_weight or {}, known=rows.roles.values())
            self._mini_batch_plan = assignment.plan.with_sessions(
                sessions, row_order=assignment.row_order, role_weights=role_weights
            )
        metrics["tree/cut_groups"] = float(assignment.num_cut_groups)
        metrics["tree/cut_tokens"] = float(assignment.num_lost_tokens)
        if not self.config.tree.enabled:
            counts = flat_counts(fetch_cells(rows, assignment))
            metrics.update(as_numbers(sum([counts] * actor.ppo_epochs, ForestCounts())))

        batch = append_padding_rows(batch, num_rows=assignment.num_padding, eos_token_id=self.tokenizer.eos_token_id)
        batch.reorder(list(assignment.row_order))
        num_rank_rows = len(batch) // len(assignment.plan.rows)
        ranks = [list(range(start, start + num_rank_rows)) for start in range(0, len(batch), num_rank_rows)]
        metrics.update(log_seqlen_unbalance([tag["seq_len"] for tag in batch.tags], ranks, prefix=logging_prefix))
        return batch

    @property
    def _leaves_out_rows(self) -> bool:
        """Whether an update leaves groups of equal rewards out; ranks are then even in what is left."""
        algorithm, tree = self.config.algorithm, self.config.tree
        return (
            tree.enabled
            and algorithm.adv_estimator in REWARDS_ONLY
            and not algorithm.use_kl_in_reward
            and not run_keeps_all_rows(self.config)
        )

    @property
    def _weighs_sessions(self) -> bool:
        """Whether every session weighs the same in the loss."""
        return self.config.tree.session_weight == "session"

    def _tell_unknown_roles(self, by_role: Mapping[str, float], *, known: Collection[str]) -> None:
        """Log once, in the first step, which roles of `tree.role_weight` no leaf has: they may be misspelt."""
        unknown = sorted(by_role.keys() - set(known))
        if unknown and not self._has_told_roles:
            named = f"the roles {', '.join(sorted(set(known)))}" if known else "no role"
            message = "tree.role_weight names %s, which no leaf has so far; leaves have %s"
            logger.warning(message, ", ".join(unknown), named)
        self._has_told_roles = True

    def _num_ranks(self) -> int:
        """Return the data-parallel size of the actor, which the critic shares."""
        workers = self.actor_rollout_wg
        if "actor" not in workers._dispatch_info:
            workers._dispatch_info["actor"] = workers._query_dispatch_info("actor")
        return max(workers._dispatch_info["actor"]) + 1

    @override
    def step(self, metrics: dict[str, float], timing_raw: dict[str, float]) -> KVBatchMeta:
        """Train one step, of one update or several; add the metrics of sessions, capture and trees."""
        self._step_rows, self._updates = StepRows(), []
        with self._explained("train"):
            batch = super().step(metrics, timing_raw)
            self.require_whole()
        trained = real_rows(batch)
        rows = self._step_rows.select(trained.keys)
        self._step_rows = StepRows()
        metrics.update(step_metrics(self._updates))
        metrics.update(session_metrics(rows.keys, rewards=rows.rewards, roles=rows.roles))
        metrics.update(self._failure_metrics(num_groups=len(rows.groups)))
        num_live = max(1, int(rows.of_mixed_groups().sum()))
        metrics["tree/sampled_tokens_per_live_leaf"] = metrics.get("tree/sampled_tokens", 0.0) / num_live
        metrics.update(self._async_metrics(rows))
        metrics.update(tokens_per_s(metrics, update_s=timing_raw.get("update_actor", 0.0)))
        with marked_timer("tree_log", timing_raw):
            when = self._when(is_validation=False)
            if self._tree_log.wants(when):
                max_trees = self._tree_log.max_trees(when)
                self._log_trees(fetch_trees(trained, step=when.step, max_trees=max_trees), when)
        return batch

    @override
    def _step_once(
        self, metrics: dict[str, float], timing_raw: dict[str, float], sample_batch_size: int
    ) -> KVBatchMeta:
        # Taken out before verl averages the updates of a step.
        batch = super()._step_once(metrics, timing_raw, sample_batch_size)
        self._updates.append(take_tree_metrics(metrics))
        return batch

    @override
    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        batch = super()._compute_old_log_prob(batch, metrics)
        # The rollout got the current weights after the step before.
        metrics.update(self._log_prob_guard.compare(batch, version=self.global_steps - 1))
        return batch

    @override
    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        # The mean KL and its controller must not see padding.
        written = super()._compute_advantage(real_rows(batch), metrics)
        return fill_padding_rows(batch, written=written)

    @override
    def _update_critic(self, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        self._send_plan(batch)
        batch = super()._update_critic(batch, metrics)
        metrics["perf/mfu/critic_flat_equivalent"] = metrics.pop("critic/mfu_flat_equivalent")
        return batch

    @override
    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        self._send_plan(batch)
        batch = super()._update_actor(batch, metrics)
        metrics["perf/mfu/actor_flat_equivalent"] = metrics.pop("actor/mfu_flat_equivalent")
        if "actor/tree/cost_model/s_per_token" in metrics:
            self._cost_model = CostModel.from_metrics(metrics, prefix="actor/tree/cost_model")
        return batch

    def _send_plan(self, batch: KVBatchMeta) -> None:
        assert self._mini_batch_plan is not None, "_balance_batch comes first"
        assert batch.extra_info is not None
        batch.extra_info.update(self._mini_batch_plan.to_extra_info())

    @override
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

    @override
    def _log_rollout_data(self, batch: KVBatchMeta, timing_raw: dict[str, float], rollout_data_dir: str) -> None:
        super()._log_rollout_data(real_rows(batch), timing_raw, rollout_data_dir)

    @override
    def _validate(self) -> dict[str, float]:
        # verl's own validation, which scores the last leaf of each session.
        with self._explained("val"), self._log_validation():
            metrics = super()._validate()
        report = self._report_failures("val")
        if not self._updates:  # before training
            print(describe_validation(metrics, step=self.global_steps), flush=True)
        return metrics if report is None else metrics | capture_metrics(report, prefix="val-aux/tree")

    @contextmanager
    def _log_validation(self) -> Iterator[None]:
        """Log the trees of a validation that runs inside the context and does not fail."""
        when = self._when(is_validation=True)
        if not self._tree_log.wants(when):
            yield
            return
        trees: list[StoredTree] = []
        # verl clears each batch before it samples the next, so trees are read as their rows are sampled.
        buffer = self.replay_buffer
        watched = WatchedBuffer(buffer, on_sample=lambda batch: trees.extend(fetch_trees(batch, step=when.step)))
        self.replay_buffer = cast(ReplayBuffer, watched)
        try:
            yield
        finally:
            self.replay_buffer = buffer
        # Prompts are drawn in any order and get new uids each time, so trees are sorted by their tokens.
        self._log_trees(sorted(trees, key=lambda tree: tree.leaves[0].token_ids.tobytes()), when)

    def _when(self, *, is_validation: bool) -> When:
        is_last = self.global_steps >= self.total_training_steps
        return When(step=self.global_steps, is_last=is_last, is_validation=is_validation)

    def _log_trees(self, trees: Sequence[StoredTree], when: When) -> None:
        self._tree_log.log(trees, when, tokenizer=self.tokenizer, wandb=self.logger.logger.get("wandb"))

    def _failure_metrics(self, *, num_groups: int) -> dict[str, float]:
        """Report what failed in a step of which `num_groups` prompt groups are left."""
        report = self._report_failures("train")
        num_missing = self.config.data.train_batch_size - num_groups
        num_reported = 0 if report is None else len(report.failed_prompts)
        if num_missing > num_reported:
            logger.warning(
                "step %d: %d prompts have no trajectory, %d were reported; see the agent loop workers' log",
                self.global_steps,
                num_missing,
                num_reported,
            )
        metrics = {} if report is None else capture_metrics(report)
        return metrics | {"tree/failed_prompts": float(max(num_missing, num_reported))}

    def _async_metrics(self, rows: StepRows) -> dict[str, float]:
        """Report how old a step's rows were, and what was too old to become one; nothing in the synchronous mode."""
        if self.trainer_mode == "sync":
            return {}
        # The rollout got the current weights after the step before.
        metrics = staleness_metrics(fetch_calls(rows), version=self.global_steps - 1)
        if isinstance(self.replay_buffer, TreeReplayBufferAsync):
            metrics.update(self.replay_buffer.drain_dropped())
        return metrics

    @contextmanager
    def _explained(self, partition: str) -> Iterator[None]:
        """Say which sessions failed, and why, if the body fails: a step or a validation.

        Raises:
            NoTrajectoryError: There was no trajectory; the message has the causes.
        """
        try:
            yield
        except NoTrajectoryError as error:
            report = self._drain_report(partition)
            failures = None if report is None else describe_failures(report)
            raise NoTrajectoryError(f"step {self.global_steps} ({partition}): {failures or error}") from error
        except (RuntimeError, ValueError):
            # A sampler of the user's own cannot say why there is no row.
            self._report_failures(partition)
            raise

    def _report_failures(self, partition: str) -> CaptureReport | None:
        """Log what failed since the last report, and return the report; None if the agent loop manager gives none."""
        report = self._drain_report(partition)
        if report is not None:
            limit = self.config.actor_rollout_ref.rollout.prompt_length
            for told in filter(None, (describe_failures(report), describe_cut_prompts(report, limit=limit))):
                logger.warning("step %d (%s): %s", self.global_steps, partition, told)
        return report

    @override
    def require_whole(self) -> None:
        """Let nothing be trained or saved that a server took with it when it died: its prompts have leaves too few.

        The run ends then in any case, and the next start samples these prompts again.

        Raises:
            RuntimeError: A server has died.
        """
        report = self._drain_report("train")
        if report is None:
            return
        self._kept_report = report
        if report.dead_servers:
            raise RuntimeError(
                f"step {self.global_steps}: the server of {len(report.dead_servers)} sessions died while they ran "
                f"({report.dead_servers[0]}); they lack leaves, so this step is neither trained nor saved"
            )

    def _drain_report(self, partition: str) -> CaptureReport | None:
        manager = self.agent_loop_manager
        if not isinstance(manager, TreeAgentLoopManager):
            return None
        report = manager.drain_capture_report(partition)
        if partition == "train":
            report, self._kept_report = self._kept_report + report, CaptureReport()
        return report
