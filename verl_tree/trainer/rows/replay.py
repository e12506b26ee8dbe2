"""Replay of stored rollouts whose sessions have several leaves.

verl's `skip.rollout_tq` stores the rows of a step and, if a step is already stored, uses them instead of generating.
Its loader (`RolloutTqSkip.load_dump_data`, verl 0.9.1) deals `rollout.n` rows of leaf 0 to every prompt, which drops or
repeats leaves. The loader here puts every row back under its own key, so a flat and a tree training run see the same
groups, sessions and leaves in the same order. Storing is verl's own::

    skip.rollout_tq.enable=true skip.rollout_tq.dump_dir=DIR skip.rollout_tq.steps=[1,2,3]
    skip.rollout_tq.action=cache
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transfer_queue as tq
from verl.utils.skip.base_skip import register_skip
from verl.utils.skip.rollout_skip import RolloutTqSkip
from verl.utils.tensordict_utils import index_select_tensor_dict

from verl_tree.trainer.row_keys import group_rows, parse_row_key

logger = logging.getLogger(__name__)

REPLAYED_TAG = "is_replayed"
"""A tag of rows that were not sampled in this training run."""


class TreeRolloutSkip(RolloutTqSkip):
    """verl's store of rollouts, with a loader that keeps sessions and leaves."""

    # What the loader uses of verl's class, which a decorator hides from type checkers.
    parameter_sync_step: int
    tq_batch_name: str
    _resolve_load_step_v1: Callable[[int], int]
    _get_project_dump_dir: Callable[[], Path]
    _get_v1_inner_dir: Callable[[int, int], Path]

    def load_dump_data(
        self,
        step: int,
        new_prompt_uids: list[str],
        n: int,  # noqa: ARG002 - verl's signature
        global_steps: int,
        partition_id: str = "train",
    ) -> None:
        """Put the rows stored for a step into TransferQueue, and mark as many prompts as were submitted as ended.

        The stored groups end as finished, and the mini-batches of a sync period are sampled in their stored order. If
        fewer groups are stored than prompts were submitted, all sessions of the missing ones had failed, so that many
        of `new_prompt_uids` end as failed. Stored weight versions are moved by the distance of `global_steps` to the
        stored step.

        Raises:
            FileNotFoundError: Nothing is stored for the step.
            ValueError: More groups are stored than prompts were submitted.
        """
        stored_step = self._resolve_load_step_v1(step)
        if stored_step == -1:
            raise FileNotFoundError(f"no rollouts of step {step} under {self._get_project_dump_dir()}")
        submitted_at: dict[str, float] = {}
        num_rows = 0
        for inner in range(self.parameter_sync_step):
            path = self._get_v1_inner_dir(stored_step, inner) / self.tq_batch_name
            # Our own file. It holds whole row dictionaries, which weights_only refuses.
            payload = torch.load(path, weights_only=False)
            _put_rows(payload, partition_id=partition_id, global_steps=global_steps)
            # The buffer samples by (step, uid). A fraction of a step makes nobody stale.
            uids = {parse_row_key(key).uid for key in payload["keys"]}
            submitted_at.update(dict.fromkeys(uids, global_steps + inner / self.parameter_sync_step))
            num_rows += len(payload["keys"])

        num_failed = len(new_prompt_uids) - len(submitted_at)
        if num_failed < 0:
            raise ValueError(
                f"step {stored_step} holds {len(submitted_at)} prompt groups and data.train_batch_size submits "
                f"{len(new_prompt_uids)}: replay with the batch size that the rollouts were stored with"
            )
        ended = [(uid, "finished", submitted_at[uid]) for uid in sorted(submitted_at)]
        ended += [(uid, "failure", global_steps) for uid in new_prompt_uids[:num_failed]]
        tq.kv_batch_put(
            keys=[uid for uid, _, _ in ended],
            partition_id=partition_id,
            tags=[{"is_prompt": True, "status": status, "global_steps": at} for _, status, at in ended],
        )
        logger.warning(
            "step %d: replaying %d trajectories of %d prompts stored at step %d (%d prompts had failed)",
            step,
            num_rows,
            len(submitted_at),
            stored_step,
            num_failed,
        )


def _put_rows(payload: dict[str, Any], *, partition_id: str, global_steps: int) -> None:
    """Write the rows of one stored file, sorted, under their own keys."""
    keys, tags = payload["keys"], payload["tags"]
    order = [row for group in group_rows(keys) for row in group]
    moved_by = global_steps - payload["global_steps"]
    moved = []
    for row in order:
        tag = dict(tags[row]) | {REPLAYED_TAG: True}
        for name in ("global_steps", "min_global_steps", "max_global_steps"):
            tag[name] += moved_by
        moved.append(tag)
    tq.kv_batch_put(
        keys=[keys[row] for row in order],
        partition_id=partition_id,
        fields=index_select_tensor_dict(payload["tensordict"], order),
        tags=moved,
    )


def register() -> None:
    """Make verl replay through `TreeRolloutSkip` in this process; repeated calls do nothing."""
    register_skip("rollout_tq")(TreeRolloutSkip)
