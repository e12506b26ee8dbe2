"""verl's replay buffers, first in, first out, with an account of what staleness threw away.

verl sorts the ended prompts by their step only, and they come from a set: which of the equally old ones are trained
first would change from run to run. Our uids sort in the order in which the prompts were drawn.

verl lists the tags of all rows at every look for ended prompts, which takes long with many rows (docs/scale.md). Here a
look asks how many prompts have ended, and rows are listed when these may be enough.
"""

import copy
import inspect
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Set
from typing import Any, Self

import transfer_queue as tq
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from typing_extensions import override
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from rollout_hooks.capture.report import ENDED
from rollout_hooks.capture.roles import ROLE
from verl_tree.trainer.row_keys import RowKey, parse_row_key
from verl_tree.trainer.rows.no_trajectory import NoTrajectoryError

POLL_INTERVAL_S = 0.05
"""Seconds between two looks for ended prompts; with verl's 2 s a generation phase takes up to 2 s longer."""
LIST_INTERVAL_S, LIST_SHARE = 2.0, 0.1
"""Rows are listed after so long in any case, as by verl: a prompt may have failed, or others may write. But not for a
larger share of the time than this.
"""


def dropped_metrics(uids: Set[str], lens: Mapping[RowKey, int]) -> dict[str, float]:
    """Return `tree/async/dropped_...` of the groups of `uids`, given the tokens of each of their rows."""
    values = {
        "groups": len(uids),
        "sessions": len({key[:2] for key in lens}),
        "leaves": len(lens),
        "flat_tokens": sum(lens.values()),
        "leaf_len/max": max(lens.values(), default=0),
    }
    return {f"tree/async/dropped_{name}": float(value) for name, value in values.items()}


class TreeReplayBuffer(ReplayBuffer):
    """verl's synchronous buffer in the order in which prompts were drawn.

    Attributes:
        max_failed: Prompts without a trajectory, one after the other, that end the training run. Where verl replaces
            them it would go on for ever.
        on_listed: Called with the prompts that have not ended, whenever rows are listed.
    """

    max_failed: int | None = None
    on_listed: Callable[[Set[str]], None] | None = None
    _num_failed = 0
    _num_wanted, _num_sampleable = 1, 0
    """Prompts that are waited for, and those that were there when rows were listed."""
    _num_listed: int | None = None
    """Prompts that had ended by then, as our workers count; None where others run the sessions."""
    _next_list_s = 0.0

    @classmethod
    def like(cls, buffer: ReplayBuffer, *, max_failed: int) -> Self:
        """Make a buffer with the settings of one that verl has built, our poll interval and `max_failed`."""
        settings = {name: vars(buffer)[name] for name in inspect.signature(ReplayBuffer).parameters}
        # With the switch on, verl calls a trainer idle if it waits for longer than one poll.
        if not OmegaConf.select(buffer.trainer_config, "hybrid_rollout.enable_switch"):
            settings["poll_interval"] = POLL_INTERVAL_S
        made = cls(**settings)
        made.max_failed = max_failed
        return made

    @override
    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        self._num_wanted = batch_size
        return super().sample(global_steps, partition_id, batch_size)

    @override
    def _sync_metadata_from_transfer_queue(self) -> None:
        started_s = time.monotonic()
        # Asked before: who ends meanwhile is listed twice, not overlooked.
        self._num_listed = num_ended()
        super()._sync_metadata_from_transfer_queue()
        if self.on_listed is not None:
            self.on_listed(frozenset().union(*self.pending_keys.values(), *self.running_keys.values()))
        now_s = time.monotonic()
        self._next_list_s = now_s + max(LIST_INTERVAL_S, (now_s - started_s) / LIST_SHARE)

    @override
    def _sampleable_terminal_keys(
        self, partition_id: str, eviction_reasons: tuple[set[str], set[str], set[str], Counter]
    ) -> set[str]:
        keys = super()._sampleable_terminal_keys(partition_id, eviction_reasons)
        self._num_sampleable = len(keys)
        return keys

    @override
    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        """Wait until as many prompts have ended as are missing; of a filter any of them, because it replaces some."""
        missing = 1 if self.filter_groups_metric else max(1, self._num_wanted - self._num_sampleable)
        while True:
            last_debug_time = super()._wait_for_next_poll(partition_id, last_debug_time)
            ended = num_ended()
            if ended is None or self._num_listed is None or time.monotonic() >= self._next_list_s:
                return last_debug_time
            if ended - self._num_listed >= missing:
                return last_debug_time

    @override
    def _select_prompt_uids(
        self, partition_id: str, sampleable_keys: set[str], batch_size: int
    ) -> tuple[list[str], dict[str, dict], dict[str, int]]:
        # verl's sort by step is stable.
        ordered: Any = sorted(sampleable_keys)
        selected = super()._select_prompt_uids(partition_id, ordered, batch_size)
        uids, rows, _ = selected
        if not {parse_row_key(key).uid for key in rows} & set(uids):
            raise NoTrajectoryError(f"all sessions of {len(uids)} prompts failed")
        return selected

    @override
    def _dapo_filtered_keys(self, partition_id: str) -> tuple[set[str], Counter]:
        """Filter prompts as verl does, but compare only rows of one role in those that have rows with a role.

        Such a prompt is filtered if rows were compared and none of them differ.
        """
        cache = self._dapo_classification_cache[partition_id]
        new = self.finished_keys[partition_id] - cache.keys()
        filtered = super()._dapo_filtered_keys(partition_id)
        if partition_id == "val" or self.filter_groups_metric is None or not new:  # verl asks again and again
            return filtered
        rows: dict[str | None, dict[str, dict[str, dict]]] = defaultdict(lambda: defaultdict(dict))
        for key, tag in self.partitions[partition_id].items():
            if (uid := parse_row_key(key).uid) in new:
                rows[tag.get(ROLE)][uid][key] = tag
        values: dict[str, list[float | None]] = {uid: [] for role in rows.keys() - {None} for uid in rows[role]}
        for prompts in rows.values():
            compared = {uid: each for uid, each in prompts.items() if uid in values and len(each) > 1}
            for uid, value in self._equal_values(compared, partition_id).items():
                values[uid].append(value)
        for uid, of_roles in values.items():
            cache[uid] = of_roles[0] if of_roles and None not in of_roles else None
        kept = {uid: value for uid, value in cache.items() if value is not None}
        return set(kept), Counter(kept.values())

    def _equal_values(self, prompts: dict[str, dict[str, dict]], partition_id: str) -> dict[str, float | None]:
        """Return what all of some rows of each prompt earned, as verl finds it; None where they differ."""
        found: dict[str, float | None] = {}
        if prompts:
            alone = copy.copy(self)
            alone.partitions = {partition_id: {key: tag for rows in prompts.values() for key, tag in rows.items()}}
            alone.finished_keys = {partition_id: set(prompts)}
            alone._dapo_classification_cache = {partition_id: found}
            super(TreeReplayBuffer, alone)._dapo_filtered_keys(partition_id)
        return found

    @override
    def _evict_terminal_groups(
        self,
        global_steps: int,
        partition_id: str,
        eviction_reasons: tuple[set[str], set[str], set[str], Counter],
    ) -> tuple[set[str], int, int, dict]:
        self._num_failed = 0 if self.finished_keys[partition_id] else self._num_failed + len(eviction_reasons[2])
        if self.max_failed is not None and self._num_failed >= self.max_failed:
            raise NoTrajectoryError(f"all sessions of {self._num_failed} prompts in a row failed")
        return super()._evict_terminal_groups(global_steps, partition_id, eviction_reasons)


def num_ended() -> int | None:
    """Count the prompts that have ended, successfully or not; None if no worker of ours has said so."""
    tags = tq.kv_list(ENDED).get(ENDED)
    # A key is there a moment before its first tag.
    return sum(tag.get("num", 0) for tag in tags.values()) if tags else None


class TreeReplayBufferAsync(ReplayBufferAsync, TreeReplayBuffer):
    """verl's asynchronous buffer in the order in which prompts were drawn; it counts what staleness drops."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._dropped: tuple[set[str], dict[RowKey, int]] = (set(), {})

    @override
    def wait_for_sampleable(self, global_steps: int, partition_id: str, target_count: int) -> tuple[set[str], dict]:
        self._num_wanted = target_count
        return super().wait_for_sampleable(global_steps, partition_id, target_count)

    @override
    def _evict_terminal_groups(
        self,
        global_steps: int,
        partition_id: str,
        eviction_reasons: tuple[set[str], set[str], set[str], Counter],
    ) -> tuple[set[str], int, int, dict]:
        uids, lens = self._dropped
        if stale_uids := eviction_reasons[0]:
            uids |= stale_uids
            rows = ((parse_row_key(key), tag["seq_len"]) for key, tag in self.partitions[partition_id].items())
            lens |= {key: num_tokens for key, num_tokens in rows if key.uid in stale_uids}
        return super()._evict_terminal_groups(global_steps, partition_id, eviction_reasons)

    def drain_dropped(self) -> dict[str, float]:
        """Return the metrics of what was dropped as too old since the last call."""
        dropped, self._dropped = self._dropped, (set(), {})
        return dropped_metrics(*dropped)


class WatchedBuffer:
    """A stand-in for a replay buffer that passes each sampled batch to `on_sample`."""

    def __init__(self, buffer: ReplayBuffer, *, on_sample: Callable[[KVBatchMeta], None]) -> None:
        self._buffer, self._on_sample = buffer, on_sample

    def sample(self, **options: Any) -> tuple[KVBatchMeta, dict[str, Any]]:
        """Sample from the buffer."""
        batch, metrics = self._buffer.sample(**options)
        self._on_sample(batch)
        return batch, metrics
