"""verl's methods that read columns of all tokens, on the ranks instead of the driver (`portions`).

A class of a mode names `BesideRows` last, so these methods stand in for those of `PPOTrainer` itself, and what verl's
mode or `TreeTrainer` does around them stays.

Some methods need all rows in one place and stay on the driver (docs/scale.md says what they read):

- estimators that compare rows of different prompts other than by whitening (`GROUP_WISE`, `UNWHITENED`), and
  estimators that we do not know
- rollout correction that rejects tokens, sets weights to 0, or divides them by their mean over the batch
- metrics of a mixture of experts' load, and of speculative decoding
"""

from collections.abc import Sequence
from functools import cached_property, partial, reduce
from operator import add
from typing import Any

import ray
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from typing_extensions import override
from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import compute_throughout_metrics, compute_timing_metrics
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_tree.config import teaches_on_ranks
from verl_tree.trainer.advantages import ESTIMATORS, REWARDS_ONLY
from verl_tree.trainer.portions import by_role
from verl_tree.trainer.portions.portion import Method, Portion, PortionResult, announcement, join_untrained
from verl_tree.trainer.portions.portion_metrics import join_metrics
from verl_tree.trainer.portions.whitening import UNWHITENED, unwhitened, whitening
from verl_tree.trainer.row_keys import group_rows
from verl_tree.trainer.rows.step_rows import StepRows

GROUP_WISE = REWARDS_ONLY | ESTIMATORS.keys()
"""Estimators for which only the rows of a prompt matter; those of `UNWHITENED` also need moments of the batch."""


class BesideRows(PPOTrainer):
    """verl's trainer, whose columns of tokens are read and written by the ranks."""

    _step_rows: StepRows

    @override
    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        compared = None
        if not self._bypasses_old_log_probs:
            self._call(self.actor_rollout_wg.compute_log_prob, batch, calculate_entropy=True)
            if self.config.actor_rollout_ref.rollout.calculate_log_probs:
                compared = ("rollout_log_probs", "old_log_probs")
        results = self._run(PPOTrainer._compute_old_log_prob, batch, compared=compared)
        metrics.update(join_metrics(results, config=self.config))
        return batch if self._bypasses_old_log_probs else _with_fields(batch, results)

    @override
    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        if teaches_on_ranks(self.config.distillation):
            self._call(self.ref_policy_wg.compute_ref_log_prob, batch, calculate_entropy=False)
            return batch  # The rows have what the loss reads.
        if self.ref_in_actor:
            self._call(self.actor_rollout_wg.compute_log_prob, batch, calculate_entropy=False, no_lora_adapter=True)
        else:
            self._call(self.ref_policy_wg.compute_ref_log_prob, batch, calculate_entropy=False)
        self._run(PPOTrainer._compute_ref_log_prob, batch)
        return batch

    @override
    def _compute_values(self, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        ray.get(self._call(self.critic_wg.infer_batch, batch).futures)
        self._run(PPOTrainer._compute_values, batch)
        return batch

    @override
    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        rows = self._step_rows.select(batch.keys)
        method = by_role.compute_advantage if rows.roles else PPOTrainer._compute_advantage
        if not self._estimates_in_portions:
            with announcement(rows, self.config):
                return method(self, batch, metrics)
        units = join_untrained(group_rows(batch.keys), num_trained=rows.shapes["num_trained"].tolist())
        in_reward = self.config.algorithm.use_kl_in_reward
        kl_coef = self.kl_ctrl_in_reward.value if in_reward else 0.0
        whitens = self.config.algorithm.adv_estimator in UNWHITENED
        results = self._run(
            method,
            batch,
            config=self._unwhitened_config if whitens else None,
            units=units,
            step_rows=rows,
            compared=("advantages", "returns") if whitens else None,
            kl_coef=kl_coef,
        )
        if whitens:
            self._run(_whitening(results), batch, units=units)
        joined = join_metrics(results, config=self.config)
        if in_reward:
            self.kl_ctrl_in_reward.update(current_kl=joined["actor/reward_kl_penalty"], n_steps=len(batch))
        metrics.update(joined)
        return _with_fields(batch, results)

    @override
    def _compute_metrics(
        self,
        batch: KVBatchMeta,
        metrics: dict[str, Any],
        timing_raw: dict[str, float],
        global_steps: int,
        epoch: int,
    ) -> None:
        if self._reports_rare_metrics:
            super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
            return
        method = partial(PPOTrainer._compute_metrics, timing_raw={"step": 1.0}, global_steps=global_steps, epoch=epoch)
        results = self._run(method, batch, compared=("returns", "values") if self.use_critic else None)
        metrics.update(join_metrics(results, config=self.config))
        lens = _lens(results)
        metrics.update(compute_timing_metrics(batch=lens, timing_raw=timing_raw))
        n_gpus = self._get_n_gpus_for_throughput()
        metrics.update(compute_throughout_metrics(batch=lens, timing_raw=timing_raw, n_gpus=n_gpus))

    @property
    def _bypasses_old_log_probs(self) -> bool:
        correction = self.config.algorithm.get("rollout_correction")
        return correction is not None and bool(correction.get("bypass_mode", False))

    @property
    def _estimates_in_portions(self) -> bool:
        """Whether advantages and rollout correction of a prompt depend on others in nothing but whitening."""
        algorithm = self.config.algorithm
        if algorithm.adv_estimator not in GROUP_WISE | UNWHITENED.keys() or algorithm.get("use_pf_ppo", False):
            return False
        correction = algorithm.get("rollout_correction")
        if correction is None or self._bypasses_old_log_probs:
            return True
        if correction.get("rollout_rs") is not None or correction.get("rollout_is_batch_normalize", False):
            return False
        # A range ("0.5_2") makes weights 0. Where all of a portion are, verl divides by 0.
        return correction.get("rollout_is") is None or "_" not in str(correction.get("rollout_is_threshold"))

    @property
    def _reports_rare_metrics(self) -> bool:
        mtp = self.config.actor_rollout_ref.model.get("mtp")
        drafts = mtp is not None and mtp.get("enable", False) and mtp.get("enable_rollout", False)
        return drafts or self.config.actor_rollout_ref.rollout.get("moe_load_balance_metrics_interval", 0) > 0

    @cached_property
    def _config_ref(self) -> ray.ObjectRef:
        return ray.put(self.config)

    @cached_property
    def _unwhitened_config(self) -> ray.ObjectRef:
        estimator = unwhitened(self.config.algorithm.adv_estimator)
        return ray.put(OmegaConf.merge(self.config, {"algorithm": {"adv_estimator": estimator}}))

    def _call(self, method: Any, batch: KVBatchMeta, **options: bool) -> Any:
        """Let a model compute all rows, with what verl's methods tell it."""
        assert batch.extra_info is not None
        temperature = self.config.actor_rollout_ref.rollout.temperature
        batch.extra_info.update({"compute_loss": False, "temperature": temperature, **options})
        return method(batch)

    def _run(
        self,
        method: Method,
        batch: KVBatchMeta,
        *,
        config: ray.ObjectRef | None = None,
        units: Sequence[Sequence[int]] | None = None,
        step_rows: StepRows | None = None,
        compared: tuple[str, str] | None = None,
        kl_coef: float = 0.0,
    ) -> list[PortionResult]:
        """Run a method on the ranks, each with a portion of the rows; `units` of rows are not parted."""
        config = config or self._config_ref
        whole = Portion(method, batch, config, kl_coef=kl_coef, step_rows=step_rows, compared=compared)
        num_ranks = self.actor_rollout_wg.world_size
        work: list[Portion | None] = [*whole.cut(units or [[row] for row in range(len(batch))], num_portions=num_ranks)]
        work += [None] * (num_ranks - len(work))
        return [result for result in self.actor_rollout_wg.run_portion(work) if result is not None]


def _whitening(results: Sequence[PortionResult]) -> Method:
    """Return the method that whitens the advantages of all portions, of which these are the results."""
    moments = reduce(add, (result.moments for result in results if result.moments is not None))
    return whitening(count=moments.count, mean=float(moments.mean[0]), squares=float(moments.comoment[0, 0]))


def _with_fields(batch: KVBatchMeta, results: Sequence[PortionResult]) -> KVBatchMeta:
    """Return the batch as verl's methods do, with the fields that its rows have now."""
    return KVBatchMeta(keys=batch.keys, tags=batch.tags, partition_id=batch.partition_id, fields=results[0].fields)


def _lens(results: Sequence[PortionResult]) -> DataProto:
    """Return what verl's metrics of times add up: tokens, here of portions instead of rows."""
    num_tokens = [round(result.metrics["perf/total_num_tokens"]) for result in results]
    response = torch.tensor([result.counts.num_response_tokens for result in results], dtype=torch.float64)
    lens = {"response_length": response, "prompt_length": torch.tensor(num_tokens) - response}
    return DataProto(batch=TensorDict(lens, batch_size=len(results)), meta_info={"global_token_num": num_tokens})
