"""verl's replay buffers, first in, first out, with an account of what staleness threw away.

verl sorts the ended prompts by their step only, and they come from a set: which of the equally old ones are trained
first would change from run to run. Our uids sort in the order in which the prompts were drawn.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any, Self

from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from typing_extensions import override
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from verl_tree.trainer.row_keys import parse_row_key
from verl_tree.trainer.rows.no_trajectory import NoTrajectoryError

POLL_INTERVAL_S = 0.05
"""Seconds between two looks for ended prompts; with verl's 2 s a generation phase takes up to 2 s longer."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """What was evicted because it was too old; `sum(dropped, Dropped())` adds."""

    num_groups: int = 0
    num_sessions: int = 0
    num_leaves: int = 0
    num_flat_tokens: int = 0
    max_leaf_len: int = 0  # tokens of the longest leaf; the maximum when added

    def __add__(self, other: Self) -> Self:
        return type(self)(
            num_groups=self.num_groups + other.num_groups,
            num_sessions=self.num_sessions + other.num_sessions,
            num_leaves=self.num_leaves + other.num_leaves,
            num_flat_tokens=self.num_flat_tokens + other.num_flat_tokens,
            max_leaf_len=max(self.max_leaf_len, other.max_leaf_len),
        )

    @classmethod
    def of_groups(cls, uids: Set[str], *, tags: Mapping[str, Mapping[str, Any]]) -> Self:
        """Count the groups of `uids`, given the tags of all rows by row key."""
        lens = {parse_row_key(key): tag["seq_len"] for key, tag in tags.items()}
        lens = {key: length for key, length in lens.items() if key.uid in uids}
        return cls(
            num_groups=len(uids),
            num_sessions=len({(key.uid, key.session) for key in lens}),
            num_leaves=len(lens),
            num_flat_tokens=sum(lens.values()),
            max_leaf_len=max(lens.values(), default=0),
        )

    def metrics(self) -> dict[str, float]:
        """Return the metrics `tree/async/dropped_...`."""
        values = {
            "groups": self.num_groups,
            "sessions": self.num_sessions,
            "leaves": self.num_leaves,
            "flat_tokens": self.num_flat_tokens,
            "leaf_len/max": self.max_leaf_len,
        }
        return {f"tree/async/dropped_{name}": float(value) for name, value in values.items()}


class TreeReplayBuffer(ReplayBuffer):
    """verl's synchronous buffer in the order in which prompts were drawn.

    Attributes:
        max_failed: Prompts without a trajectory, one after the other, that end the training run. Where verl replaces
            them it would go on for ever.
    """

    max_failed: int | None = None
    _num_failed = 0

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


class TreeReplayBufferAsync(ReplayBufferAsync, TreeReplayBuffer):
    """verl's asynchronous buffer in the order in which prompts were drawn; it counts what staleness drops."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._dropped = Dropped()

    @override
    def _evict_terminal_groups(
        self,
        global_steps: int,
        partition_id: str,
        eviction_reasons: tuple[set[str], set[str], set[str], Counter],
    ) -> tuple[set[str], int, int, dict]:
        stale_uids = eviction_reasons[0]
        if stale_uids:
            self._dropped += Dropped.of_groups(stale_uids, tags=self.partitions[partition_id])
        return super()._evict_terminal_groups(global_steps, partition_id, eviction_reasons)

    def drain_dropped(self) -> Dropped:
        """Return what was dropped since the last call."""
        dropped, self._dropped = self._dropped, Dropped()
        return dropped


class WatchedBuffer:
    """A stand-in for a replay buffer that passes each sampled batch to `on_sample`."""

    def __init__(self, buffer: ReplayBuffer, *, on_sample: Callable[[KVBatchMeta], None]) -> None:
        self._buffer, self._on_sample = buffer, on_sample

    def sample(self, **options: Any) -> tuple[KVBatchMeta, dict[str, Any]]:
        """Sample from the buffer."""
        batch, metrics = self._buffer.sample(**options)
        self._on_sample(batch)
        return batch, metrics
