"""A portion: rows of a step whose columns one rank reads and writes, so that the driver sees no tokens.

verl's trainer moves log-probs, computes advantages and reports metrics in its own process, from columns of all tokens.
Here each rank does that with a portion of the rows, by verl's own methods (`PPOTrainer`, verl 0.9.1). The driver gets
what `PortionResult` has and joins it (`portion_metrics`).
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, ClassVar, Self

import numpy as np
import ray
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from typing_extensions import override
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.core_algos import FixedKLController
from verl.trainer.ppo.utils import need_critic
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_tree.trainer import advantages
from verl_tree.trainer.portions import whitening
from verl_tree.trainer.rows.step_rows import StepRows, fetch
from verl_tree.trainer.rows.step_tokens import fetch_steps

Method = Callable[..., KVBatchMeta | None]
"""A method of `PPOTrainer` that takes a batch and a dict to add metrics to."""


@dataclass(frozen=True, slots=True)
class Portion:
    """What a rank is to do with some rows."""

    method: Method
    batch: KVBatchMeta
    config: ray.ObjectRef  # the trainer's configuration
    kl_coef: float = 0.0  # of the KL penalty in the reward
    step_rows: StepRows | None = None  # the shapes of the rows, for advantages
    compared: tuple[str, str] | None = None  # two columns of the response whose `Moments` are wanted

    def cut(self, units: Sequence[Sequence[int]], *, num_portions: int) -> list[Self]:
        """Cut the rows into portions; see `cut_rows`."""
        batch, shapes = self.batch, self.step_rows
        cuts = cut_rows(units, row_lens=[tag["seq_len"] for tag in batch.tags], num_portions=num_portions)
        return [
            replace(self, batch=_take(batch, rows), step_rows=None if shapes is None else shapes.take(rows))
            for rows in cuts
        ]


@dataclass(frozen=True, slots=True)
class Counts:
    """What the means of a portion are means of."""

    num_rows: int
    num_answered_rows: int  # with a response of one token or more
    num_trained_rows: int  # with a trained token
    num_response_tokens: int
    num_trained_tokens: int
    longest_response: int  # tokens; verl pads the portion to it

    @classmethod
    def of(cls, masks: Sequence[np.ndarray]) -> Self:
        """Count the rows with these response masks."""
        lens, trained = [len(mask) for mask in masks], [int(mask.astype(bool).sum()) for mask in masks]
        return cls(
            num_rows=len(masks),
            num_answered_rows=sum(length > 0 for length in lens),
            num_trained_rows=sum(num > 0 for num in trained),
            num_response_tokens=sum(lens),
            num_trained_tokens=sum(trained),
            longest_response=max(lens),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Count, mean and co-moment of pairs of numbers; those of two sets can be added, and nothing cancels."""

    count: int
    mean: np.ndarray  # (2,) float64
    comoment: np.ndarray  # (2, 2) float64: sum of the products of the deviations from the mean

    @classmethod
    def of(cls, pairs: np.ndarray) -> Self:
        """Take the moments of (N, 2) numbers."""
        if not len(pairs):
            return cls(0, np.zeros(2), np.zeros((2, 2)))
        mean = pairs.mean(axis=0, dtype=np.float64)
        deviation = pairs - mean
        return cls(len(pairs), mean, deviation.T @ deviation)

    def __add__(self, other: Self) -> Self:
        count = self.count + other.count
        if not count:
            return self
        apart = other.mean - self.mean
        return replace(
            self,
            count=count,
            mean=self.mean + apart * (other.count / count),
            comoment=self.comoment + other.comoment + np.outer(apart, apart) * (self.count * other.count / count),
        )


@dataclass(frozen=True, slots=True)
class PortionResult:
    """What the driver gets of a portion; its size does not depend on the number of tokens."""

    metrics: dict[str, float]  # verl's, of these rows
    counts: Counts
    fields: list[str] | None  # of the rows, where the method wrote some
    moments: Moments | None  # of the trained tokens, where two columns were to be compared


class PortionTrainer(PPOTrainer):
    """verl's trainer of a portion: its methods, without workers, rollout or state."""

    ref_in_actor: ClassVar[bool] = False

    def __init__(self, config: DictConfig, *, kl_coef: float) -> None:
        advantages.register()
        whitening.register()
        self.config = config
        self.use_critic = need_critic(config)
        # Only the driver's controller adapts, to the KL of all rows.
        self.kl_ctrl_in_reward = FixedKLController(kl_coef)
        self._rollout_moe_lb_metrics_accumulator = None  # The driver computes these metrics.
        self.actor_rollout_wg = self.ref_policy_wg = self.critic_wg = _Computed()

    @override
    def _get_n_gpus_for_throughput(self) -> int:
        return 1  # The driver knows times and GPUs.

    @override
    def on_sample_end(self) -> None:
        raise AssertionError("a portion is not sampled")

    @override
    def on_step_end(self) -> None:
        raise AssertionError("a portion is no step")


class _Computed:
    """Workers as verl's methods find them in a portion: the driver has let them compute all rows before."""

    futures: ClassVar[list[ray.ObjectRef]] = []

    def compute_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        return batch

    def compute_ref_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        return batch

    def infer_batch(self, _batch: KVBatchMeta) -> Self:
        return self


class PortionWorker:
    """What a worker needs to take portions; put before verl's worker class."""

    @register(dispatch_mode=Dispatch["ALL_TO_ALL"])
    def run_portion(self, portion: Portion | None) -> PortionResult | None:
        """Run a portion; None where there are fewer portions than ranks."""
        return None if portion is None else run_portion(portion, ray.get(portion.config))


def run_portion(portion: Portion, config: DictConfig) -> PortionResult:
    """Let verl read and write the columns of a portion's rows."""
    metrics: dict[str, Any] = {}
    trainer = PortionTrainer(config, kl_coef=portion.kl_coef)
    rows = portion.step_rows
    with nullcontext() if rows is None else announcement(rows, config):
        written = portion.method(trainer, portion.batch, metrics)
    names = ("response_mask", *(portion.compared or ()))
    columns = fetch(portion.batch.keys, names, partition_id=str(portion.batch.partition_id))
    masks = [mask.numpy() for mask in columns["response_mask"].unbind(dim=0)]
    return PortionResult(
        metrics={name: float(value) for name, value in metrics.items()},
        counts=Counts.of(masks),
        fields=None if written is None else written.fields,
        moments=None if portion.compared is None else _moments(columns, portion.compared, masks=masks),
    )


def announcement(rows: StepRows, config: DictConfig) -> Any:
    """Return the context in which estimators know these rows; `gigpo` reads their calls, unwhitened `gae` values."""
    told = rows.announcement(weigh_sessions=config.tree.session_weight == "session")
    if config.algorithm.adv_estimator == "gigpo":
        told = replace(told, calls=fetch_steps(rows))
    elif config.algorithm.adv_estimator == whitening.unwhitened("gae"):
        columns = fetch(rows.keys, ("values",), partition_id=rows.partition_id)
        told = replace(told, values=columns.to_padded_tensor()["values"])
    return advantages.announce_rows(told)


def _moments(columns: Any, names: tuple[str, str], *, masks: Sequence[np.ndarray]) -> Moments:
    """Compare two columns at the trained tokens; of log-probs, the probabilities."""
    is_trained = np.concatenate(masks).astype(bool)
    pair = []
    for name in names:
        values = columns[name].values()
        pair.append((values.exp() if name.endswith("log_probs") else values).double().numpy()[is_trained])
    return Moments.of(np.stack(pair, axis=1))


def _take(batch: KVBatchMeta, rows: Sequence[int]) -> KVBatchMeta:
    # KVBatchMeta.select_keys looks at all keys each time, and there may be thousands of portions.
    keys, tags = [batch.keys[row] for row in rows], [batch.tags[row] for row in rows]
    return KVBatchMeta(keys=keys, tags=tags, partition_id=batch.partition_id)


def cut_rows(units: Sequence[Sequence[int]], *, row_lens: Sequence[int], num_portions: int) -> list[list[int]]:
    """Cut units, lists of rows that stay together, into at most `num_portions` portions of about equally many tokens.

    `row_lens` are tokens of rows. A portion has consecutive units, and its rows in ascending order.
    """
    ends = np.cumsum([sum(row_lens[row] for row in unit) for unit in units])
    middles = ends - np.diff(ends, prepend=0) / 2
    places = (middles * num_portions / max(1, ends[-1])).astype(int).tolist()
    return [
        sorted(row for number in numbers for row in units[number])
        for _, numbers in groupby(range(len(units)), key=places.__getitem__)
    ]


def join_untrained(groups: Iterable[Sequence[int]], *, num_trained: Sequence[int]) -> list[list[int]]:
    """Join groups with less than two trained tokens to a neighbour: verl's statistics fail on a portion without."""
    units: list[list[int]] = []
    waiting: list[int] = []
    for group in groups:
        waiting = [*waiting, *group]
        if sum(num_trained[row] for row in waiting) >= 2:
            units.append(waiting)
            waiting = []
    if not units:
        return [waiting]
    units[-1] += waiting
    return units
