"""Whether the rollout engine computes with the trainer's weights: asked of the first rows after weight syncs.

An engine may take new weights without an error and compute with others: it packs weights for its kernels, and what was
packed once may stay, or come unpacked. The training run would go on, with samples of a policy that nobody trains.

Nothing is computed for the comparison. Rows that were sampled under the current weights have the engine's log-probs,
and the old log-probs of a step are the trainer's under the same weights. They are compared in the first step, whose
weights were sent before it, and in the first step after a later weight sync. Then the engine is trusted.
"""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from verl_tree.trainer.rows.replay import REPLAYED_TAG
from verl_tree.trainer.rows.step_rows import arrays, fetch

logger = logging.getLogger(__name__)

METRIC = "tree/log_prob_difference"
"""How far the log-probs of engine and trainer are apart, in nats: the mean over the tokens that were compared."""

MAX_ROWS = 64
"""Rows that are read for one comparison."""

_OPTION = "tree.log_prob_tolerance"
_COLUMNS = ("rollout_log_probs", "old_log_probs", "response_mask")


class LogProbGuard:
    """What compares the log-probs of the rollout engine and the trainer at the beginning of a training run."""

    def __init__(self, *, tolerance: float | None, engine: str) -> None:
        """Make a guard.

        Args:
            tolerance: The largest mean difference, in nats; None compares nothing.
            engine: What the error calls the rollout engine and its model.
        """
        self._tolerance = tolerance
        self._engine = engine
        self._first_version: int | None = None

    @classmethod
    def from_config(cls, config: DictConfig) -> "LogProbGuard":
        """Make the guard of a training run; it warns if the run has nothing to compare."""
        rollout, tolerance = config.actor_rollout_ref.rollout, config.tree.log_prob_tolerance
        engine = f"{rollout.name} with {config.actor_rollout_ref.model.path}"
        engine = f"{engine} (dtype={rollout.dtype}, quantization={rollout.quantization})"
        blind = {
            "actor_rollout_ref.rollout.calculate_log_probs=false": not rollout.calculate_log_probs,
            "algorithm.rollout_correction.bypass_mode=true": config.algorithm.rollout_correction.bypass_mode,
        }
        reasons = [setting for setting, holds in blind.items() if holds]
        if reasons and tolerance is not None:
            logger.warning("%s=%s compares nothing, because of %s", _OPTION, tolerance, " and ".join(reasons))
        return cls(tolerance=None if reasons else tolerance, engine=engine)

    def compare(self, batch: KVBatchMeta, *, version: int) -> dict[str, float]:
        """Compare the log-probs of the rows of a batch that were sampled under the current weights.

        Args:
            batch: Rows with the trainer's old log-probs.
            version: The version of the weights under which these were computed.

        Returns:
            `METRIC`; nothing if there are no such rows, or if the engine is trusted.

        Raises:
            ValueError: The log-probs differ by more than the tolerance, or one is not a number.
        """
        if self._tolerance is None:
            return {}
        if self._first_version is None:
            self._first_version = version
        keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if _is_of(tag, version=version)]
        if not keys:
            return {}
        assert batch.partition_id is not None
        engine_F, trainer_F = _log_probs(fetch(keys[:MAX_ROWS], _COLUMNS, partition_id=batch.partition_id))
        if not len(engine_F):
            return {}
        difference = float(np.abs(engine_F - trainer_F).mean())
        if not difference <= self._tolerance:  # NaN is no agreement
            raise ValueError(
                f"{self._engine} does not compute with the trainer's weights: the {len(engine_F)} tokens that it "
                f"sampled under version {version} have a mean log-prob of {engine_F.mean():.3g} there and of "
                f"{trainer_F.mean():.3g} in the trainer, {difference:.3g} apart a token; {_OPTION}={self._tolerance}. "
                "A weight update of this model goes wrong in this engine without an error: try another version of it, "
                "another actor_rollout_ref.rollout.dtype, or no quantization. If the engine means to sample "
                f"differently (temperature, top_p, top_k), raise {_OPTION}, or set it to null"
            )
        if version > self._first_version:
            self._tolerance = None
        return {METRIC: difference}


def _is_of(tag: Mapping[str, Any], *, version: int) -> bool:
    """Return whether an engine of this training run sampled all of a row under a version."""
    if tag.get("is_padding", False) or tag.get(REPLAYED_TAG, False):
        return False
    return tag["min_global_steps"] == tag["max_global_steps"] == version


def _log_probs(columns: TensorDict) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-probs of the engine and of the trainer of all trained tokens, each (F,) float64."""
    masks = [mask != 0 for mask in arrays(columns, "response_mask")]
    engine_F, trainer_F = (
        np.concatenate([row[mask] for row, mask in zip(arrays(columns, name), masks, strict=True)], dtype=np.float64)
        for name in _COLUMNS[:2]
    )
    return engine_F, trainer_F
